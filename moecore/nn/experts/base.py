"""What every experts' settings say of them."""

from typing import ClassVar

from torch import Tensor, nn

from moecore.core.config import Config


class ExpertsConfig(Config):
    """``build(width)`` gives a module; ``module(rows)`` with Rows of values (R, d) returns values
    (R, d).

    Experts that lend their bases (``provides`` names "basis") have a parameter ``basis`` (E, d, r).
    """

    provides: ClassVar[frozenset[str]] = frozenset()


class ExpertsModule(nn.Module):
    """``experts(rows)`` with Rows of values (R, d) returns values (R, d)."""

    def lent_basis(self) -> Tensor | None:
        """The bases (E, d, r) that the router may use; None where there are none."""
        return None
