"""What every experts say of themselves, and the map that they lie on.

E experts, R rows, d width.
"""

import math
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


def map_shape(experts: int) -> tuple[int, int]:
    """Rows and columns of the map, filled row by row: as square as the number allows
    (MoGE, algorithm 1).

    Rows are the largest divisor not above √experts: 8 → (2, 4), 32 → (4, 8), 400 → (20, 20); a
    prime number p → (1, p).
    """
    rows = next(rows for rows in range(math.isqrt(experts), 0, -1) if experts % rows == 0)
    return rows, experts // rows
