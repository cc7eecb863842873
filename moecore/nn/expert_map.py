"""The map of experts: who is whose neighbour (MoGE, §2.3)."""

import math


def map_shape(experts: int) -> tuple[int, int]:
    """Rows and columns of the map, filled row by row: as square as the number allows
    (MoGE, algorithm 1).

    Rows are the largest divisor not above √experts: 8 → (2, 4), 32 → (4, 8), 400 → (20, 20); a
    prime number p → (1, p).
    """
    rows = next(rows for rows in range(math.isqrt(experts), 0, -1) if experts % rows == 0)
    return rows, experts // rows
