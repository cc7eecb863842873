"""How unequally experts are used."""

from torch import Tensor


def squared_cv(values: Tensor) -> Tensor:
    """Squared coefficient of variation var/mean² of (E,) values, one per expert; 0 where all are
    equal, E − 1 where one has all.

    Population variance, never ``torch.std``, whose gradient is infinite at balance.
    """
    return values.var(correction=0) / values.mean().square()
