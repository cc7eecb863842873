"""Written by `python -m tools.stubs`: the parts of a family and their settings."""

from typing import Literal
from moecore.measure.calibrators.base import Calibrator as Calibrator
from moecore.measure.calibrators.gap_on_age import GapOnAge as _GapOnAge
from moecore.measure.calibrators.linear import Linear as _Linear
from moecore.measure.calibrators.temperature import Temperature as _Temperature

class GapOnAge(_GapOnAge):
    """Subtracts the gap ŷ − y expected at age y, fitted by least squares, pooled and per sex."""
    fit_on: Literal['train', 'validation', 'out_of_fold'] = 'train'
    """out_of_fold: training images, other folds' models."""
    degree: Literal[1, 2] = 1
    """1: a line in age; 2: a parabola."""

class Linear(_Linear):
    """Corrects an age ŷ to (ŷ − a)/b; ŷ = a + b·y fitted by least squares, pooled and per sex."""
    fit_on: Literal['train', 'validation', 'out_of_fold'] = 'train'
    """out_of_fold: training images, other folds' models."""
    min_slope: float = 0.1
    """Smallest |b|: errors are divided by b."""

class Temperature(_Temperature):
    """Fits one temperature by the negative log-likelihood."""
