"""What is predicted: the tasks that a data card may name. Only this room looks at labels."""

from typing import Annotated

from pydantic import Field

from moecore.tasks.classification import Classification
from moecore.tasks.image_text import ImageText
from moecore.tasks.multi_label import MultiLabel
from moecore.tasks.next_token import NextToken
from moecore.tasks.regression import Regression

AnyTask = Annotated[
    Classification | MultiLabel | Regression | NextToken | ImageText, Field(discriminator="kind")
]
