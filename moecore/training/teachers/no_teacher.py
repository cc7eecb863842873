"""No teacher: for studies whose methods need none."""

from typing import Literal

from moecore.core.config import Config


class NoTeacher(Config):
    """No teacher is trained, and methods that need one are refused."""

    kind: Literal["no_teacher"] = "no_teacher"
