"""No teacher: for studies whose methods need none."""

from typing import Literal

from moecore.backbones.image import ImageSpec
from moecore.config import Config


class NoTeacher(Config):
    """``teacher: {kind: no_teacher}``: nothing is trained, and methods that need a teacher are refused."""

    kind: Literal["no_teacher"] = "no_teacher"
    seed: Literal[0] = 0

    def build(self, image: ImageSpec) -> None:
        """There is none."""
