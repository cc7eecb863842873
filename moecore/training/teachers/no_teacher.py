"""No teacher, for studies whose methods need none."""

from typing import Literal, NoReturn

from moecore.core.files import UserError
from moecore.nn.backbones.base_model import ImageSpec
from moecore.training.teachers.base import Teacher


class NoTeacher(Teacher):
    """No teacher is trained; methods that need one are refused."""

    kind: Literal["no_teacher"] = "no_teacher"
    training: None = None

    def build(self, image: ImageSpec) -> NoReturn:
        raise UserError("teacher.kind: found no_teacher, which has no model")
