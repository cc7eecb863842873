"""The teachers that a `teacher:` section may name."""

from typing import Annotated

from pydantic import Field

from moecore.training.teachers.dense import Dense
from moecore.training.teachers.no_teacher import NoTeacher
from moecore.training.teachers.open_clip import OpenClip
from moecore.training.teachers.timm import Timm

Teacher = Annotated[Dense | Timm | OpenClip | NoTeacher, Field(discriminator="kind")]
