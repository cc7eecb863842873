"""Two methods on the same items with the same seeds: their difference, for other items and seeds.

D[s, i] = ours − theirs of seed s = 1 … S on item i = 1 … n: test images, or people where people
have several images. A difference found with these seeds on these items is of interest for others,
so its interval covers both choices. docs/intervals.md has what was simulated.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import stdtr, stdtrit

from moecore.core.encoded_arrays import pack_numbers
from moecore.statistics.intervals import Interval, indices_by_person

LEVEL = 0.95
POWER = 0.8
BOTH = "items × seeds"
ITEMS = "items"
SEEDS = "seeds"


class VarianceSource(NamedTuple):
    """One choice that the mean difference depends on."""

    variance: float  # of the mean, by this choice
    freedom: int  # degrees of freedom of that variance


class Difference(NamedTuple):
    """A mean difference and where its variance comes from: seeds, items, both, or () for none."""

    value: float
    sources: tuple[VarianceSource, ...]
    kind: str  # BOTH, ITEMS, SEEDS; "" without an interval
    seeds: int
    items: int  # 0 where the values have none

    def half(self, level: float = LEVEL) -> float | None:
        """Half the width of the interval; None without an interval.

        half² = t²(S − 1)·A + t²(n − 1)·B, A = var(seed means)/S, B = var(item means)/n (Cochran and
        Cox's weighting of two variances): exact where one of them vanishes, else at least as wide
        as needed, as the scatter of single values lies in both.
        """
        if not self.sources:
            return None
        return self._half_width((1 - level) / 2)

    def interval(self, level: float = LEVEL) -> Interval:
        """The mean with its limits; without limits where nothing says how it varies."""
        half = self.half(level)
        if half is None:
            return Interval(self.value)
        return Interval(self.value, self.value - half, self.value + half)

    def p_at(self, distance: float) -> float | None:
        """Two-sided p of a mean that lies ``distance`` ≥ 0 from what is tested.

        Below 1 − level exactly where ``half(level)`` < distance; None without an interval.
        """
        if not self.sources:
            return None
        if distance <= 0:
            return 1.0
        if not any(source.variance for source in self.sources):
            return 0.0

        from scipy.optimize import root_scalar  # slow to import

        def gap(log_tail: float) -> float:
            return self._half_width(math.exp(log_tail)) - distance

        # Both sources together reach the distance at a smaller t than either does alone.
        alone = [
            float(stdtr(source.freedom, -distance / math.sqrt(source.variance)))
            for source in self.sources
            if source.variance > 0
        ]
        log_tail = math.log(max(*alone, 1e-300))
        if gap(log_tail) > 0:
            log_tail = root_scalar(gap, bracket=(log_tail, math.log(0.5)), xtol=1e-15).root
        return 2 * math.exp(log_tail)

    def _half_width(self, tail: float) -> float:
        """Half the width of the interval that leaves ``tail`` on either side."""
        squares = [
            source.variance * float(stdtrit(source.freedom, tail)) ** 2
            for source in self.sources
            if source.variance > 0
        ]
        return math.sqrt(math.fsum(squares))

    @property
    def p(self) -> float | None:
        """Two-sided p of no difference; None without an interval."""
        return self.p_at(abs(self.value))

    @property
    def smallest(self) -> float | None:
        """The smallest difference that this design sees with 80 % power at 5 %.

        (t(0.975) + t(0.8)) · standard error, each t with the degrees of freedom of its source.
        """
        reach = self.half(LEVEL)
        more = self.half(2 * POWER - 1)
        return None if reach is None or more is None else reach + more


def linearize_by_person(values: np.ndarray, people: np.ndarray | None) -> np.ndarray:
    """Return one value per person, whose mean is that of the values (N,) of all images.

    v + (n_p / mean n)·(mean of the person's − v) of a person with n_p images: the mean over images
    is a ratio of two sums over people, and this is its linearisation. people: (N,), whose image
    each is, or None. The values themselves where nobody has several.
    """
    values = np.asarray(values, np.float64)
    images = indices_by_person(people)
    if images is None:
        return values
    sums = np.array([(values[places] - values.mean()).sum() for places in images])
    return values.mean() + sums * len(images) / len(values)


def encode_item_values(values: np.ndarray, people: np.ndarray | None = None) -> str:
    """Values (N,) of images as a result keeps them: one per item, see ``linearize_by_person``."""
    return pack_numbers(linearize_by_person(values, people))


def linearize_ratio(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    """Return values (N,) of images, whose mean is r = Σ above / Σ below: r + (a − r·b)/mean b."""
    ratio = above.sum() / below.sum()
    return ratio + (above - ratio * below) / below.mean()


def crossed_difference(differences: np.ndarray) -> Difference:
    """The mean of D (S, n), over seeds and items.

    One seed: over items alone, given that seed. Items that are all alike, as of a model that is
    never right, leave no interval. ValueError unless D is (S ≥ 1, n ≥ 2) and finite.
    """
    values = np.asarray(differences, np.float64)
    if values.ndim != 2 or values.shape[0] < 1 or values.shape[1] < 2:
        shape = values.shape
        raise ValueError(f"crossed: differences of shape {shape}; (seeds, items ≥ 2) are needed")
    if not np.isfinite(values).all():
        raise ValueError("crossed: differences are not all finite")
    seeds, items = values.shape
    value = float(values.mean())
    of_items = values.mean(axis=0)
    if np.ptp(values) == 0:
        return Difference(value, (), "", seeds, items)
    by_items = VarianceSource(float(of_items.var(ddof=1)) / items, items - 1)
    if seeds == 1:
        return Difference(value, (by_items,), ITEMS, seeds, items)
    by_seeds = VarianceSource(float(values.mean(axis=1).var(ddof=1)) / seeds, seeds - 1)
    return Difference(value, (by_seeds, by_items), BOTH, seeds, items)


def headroom_recovered(
    scores: np.ndarray, floor: np.ndarray, ceiling: np.ndarray
) -> Difference | None:
    """Return (scores − floor) / (ceiling − floor) of the means over seeds and items.

    scores, floor, ceiling: (S, n), of the same seeds and items. Delta method. None where the
    interval of ceiling − floor includes 0: then the share's would be unbounded (Fieller).
    """
    room = crossed_difference(ceiling - floor).interval()
    if room.low is None or room.low <= 0:
        return None
    return crossed_difference(linearize_ratio(scores - floor, ceiling - floor))


def paired_seed_difference(differences: Sequence[float]) -> Difference:
    """Return the mean of one difference per seed, of what has no items: times, sizes.

    One seed has no interval. Raises ValueError where there is no difference.
    """
    values = np.asarray(differences, np.float64)
    if values.ndim != 1 or not len(values):
        shape = f"differences of shape {values.shape}"
        raise ValueError(f"paired_seed_difference: {shape}; (seeds,) is needed")
    value = math.fsum(differences) / len(values)
    if len(values) == 1:
        return Difference(value, (), "", 1, 0)
    spread = math.fsum((one - value) ** 2 for one in differences) / (len(values) - 1)
    return Difference(
        value, (VarianceSource(spread / len(values), len(values) - 1),), SEEDS, len(values), 0
    )
