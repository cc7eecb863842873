"""The teachers that a `teacher:` section may name."""

from typing import Annotated

from pydantic import Field

from moecore.teachers.dense import Dense
from moecore.teachers.no_teacher import NoTeacher
from moecore.teachers.timm import Timm

Teacher = Annotated[Dense | Timm | NoTeacher, Field(discriminator="kind")]
