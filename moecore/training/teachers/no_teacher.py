"""No teacher: for studies whose methods need none."""

from typing import Literal

from moecore.core.config import Config


class NoTeacher(Config):
    """``teacher: {kind: no_teacher}``: nothing is trained, and methods that need a teacher are
    refused.
    """

    kind: Literal["no_teacher"] = "no_teacher"
