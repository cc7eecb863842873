"""What every experts' settings say of them."""

from typing import ClassVar

from moecore.config import Config


class ExpertsConfig(Config):
    """``build(width)`` gives a module; ``module(rows)`` with Rows of values (R, d) returns values (R, d).

    Experts that lend their bases (``provides`` names "basis") have a parameter ``basis`` (E, d, r).
    """

    provides: ClassVar[frozenset[str]] = frozenset()
