"""A measured value as results keep it."""

from typing import Self

from moecore.core.config import Config
from moecore.statistics.intervals import Interval


class Estimate(Config):
    """A value and its 95 % limits, which are None where one measurement gives none."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def interval(self) -> Interval:
        """The same as a tuple."""
        return Interval(self.value, self.low, self.high)

    @classmethod
    def of(cls, interval: Interval) -> Self:
        return cls(**interval._asdict())
