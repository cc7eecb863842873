"""Intervals: Wilson for a share, Student's t over seeds, else the bootstrap.

Where people have several images, a person's stay together in resamples, permutations and halves.
N images, M people.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Self

import numpy as np
from scipy.special import stdtrit
from torch import Tensor

from moecore.core.config import Config


class Interval(NamedTuple):
    """A value and the limits around it; both limits are None where one measurement gives none."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def limits(self) -> tuple[float, float] | None:
        """(low, high), or None."""
        return None if self.low is None or self.high is None else (self.low, self.high)


def wilson(successes: int, count: int, level: float = 0.95) -> Interval:
    """Return a share with Wilson's score interval (1927), valid for small counts, 0 and 1.

    Raises ValueError unless 0 ≤ successes ≤ count and count ≥ 1.
    """
    from scipy.stats import binomtest  # slow to import

    limits = binomtest(successes, count).proportion_ci(level, "wilson")
    return Interval(successes / count, limits.low, limits.high)


def mean_over_seeds(values: Sequence[float], level: float = 0.95) -> Interval:
    """Mean over seeds with Student's t interval (n − 1 degrees); one seed gives no limits.

    Raises ValueError where there are no values.
    """
    if len(values) == 0:
        raise ValueError("mean_over_seeds: no values")
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return Interval(mean)
    spread = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
    half = float(stdtrit(len(values) - 1, (1 + level) / 2)) * spread / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)


def mean_over_seed_pairs(values: np.ndarray, level: float = 0.95) -> Interval:
    """Mean of one value per pair of S seeds with a jackknife interval over seeds (t, S − 1).

    values: (S, S), symmetric; the diagonal is not read. Pairs share seeds, so that they are not
    independent; two seeds give no limits.  Raises ValueError where there are fewer.
    """
    seeds = len(values)
    if seeds < 2:
        raise ValueError("mean_over_seed_pairs: fewer than two seeds")
    pairs = np.where(np.eye(seeds, dtype=bool), 0.0, values)
    mean = float(pairs.sum() / (seeds * (seeds - 1)))
    if seeds == 2:
        return Interval(mean)
    without = (pairs.sum() - 2 * pairs.sum(axis=1)) / ((seeds - 1) * (seeds - 2))
    variance = (seeds - 1) / seeds * float(np.square(without - without.mean()).sum())
    half = float(stdtrit(seeds - 1, (1 + level) / 2)) * math.sqrt(variance)
    return Interval(mean, mean - half, mean + half)


def seed_pseudo_values(values: np.ndarray) -> np.ndarray:
    """Return S · mean over pairs − (S − 1) · mean without the seed, (S,), the jackknife's values.

    values: (S, S) as in ``mean_over_seed_pairs``, whose interval is Student's of these; so two
    methods' are compared seed by seed (Tukey, 1958). Of two seeds both are the pair's value.
    """
    seeds = len(values)
    pairs = np.where(np.eye(seeds, dtype=bool), 0.0, values)
    mean = pairs.sum() / (seeds * (seeds - 1))
    if seeds == 2:
        return np.array([mean, mean])
    without = (pairs.sum() - 2 * pairs.sum(axis=1)) / ((seeds - 1) * (seeds - 2))
    return seeds * mean - (seeds - 1) * without


def bootstrap_interval(
    statistic: Callable[[np.ndarray], float],
    count: int,
    resamples: int = 1000,
    seed: int = 0,
    level: float = 0.95,
    lowest: float = -math.inf,
    highest: float = math.inf,
    people: np.ndarray | None = None,
) -> Interval:
    """Basic (reflected) bootstrap interval (Davison & Hinkley, 1997, eq. 5.6) of ``count`` images.

    people: (count,), whose image each is; then people are drawn anew, each with all its images, as
    two images of one person are no two persons. None: images are drawn.

    statistic: takes the indices (count,) of a resample and returns a float, never below ``lowest``
    or above ``highest``. Reflected and not percentile, because the ECE is biased upward on finite
    samples and a resample adds that bias once more, which the reflection takes out; hence the
    interval of an ECE may lie below its value.  Raises ValueError where there are no images.
    """
    if count < 1:
        raise ValueError("bootstrap: no images")
    generator = np.random.default_rng(seed)
    value = float(statistic(np.arange(count)))
    images = indices_by_person(people)
    if images is None:
        drawn = [statistic(generator.integers(0, count, count)) for _ in range(resamples)]
    else:
        number = len(images)
        drawn = [
            statistic(
                np.concatenate([images[one] for one in generator.integers(0, number, number)])
            )
            for _ in range(resamples)
        ]
    return reflected_interval(value, drawn, level, lowest, highest)


def indices_by_person(people: np.ndarray | None) -> list[np.ndarray] | None:
    """The places of each person's images; None where nobody has several, or nothing is known."""
    if people is None:
        return None
    _, person = np.unique(people, return_inverse=True)
    counts = np.bincount(person)
    if counts.max(initial=0) < 2:
        return None
    return np.split(np.argsort(person, kind="stable"), np.cumsum(counts)[:-1])


def bootstrap_mean(
    values: np.ndarray,
    resamples: int = 1000,
    lowest: float = 0.0,
    highest: float = math.inf,
    people: np.ndarray | None = None,
) -> Interval:
    """Return the mean of one value per image, (N,), with its bootstrap interval."""
    return bootstrap_interval(
        lambda chosen: float(values[chosen].mean()),
        len(values),
        resamples,
        lowest=lowest,
        highest=highest,
        people=people,
    )


def mean_share(shares: np.ndarray, people: np.ndarray | None = None) -> Interval:
    """Return the mean of one share per image, (N,) in [0, 1], with its interval in [0, 1].

    Wilson's where all are 0 or 1; the bootstrap else, and over people who have several images.
    """
    shares = np.asarray(shares, np.float64)
    if indices_by_person(people) is None and np.isin(shares, (0, 1)).all():
        return wilson(int(shares.sum()), len(shares))
    return bootstrap_mean(shares, highest=1.0, people=people)


def reflected_interval(
    value: float,
    drawn: Sequence[float],
    level: float = 0.95,
    lowest: float = -math.inf,
    highest: float = math.inf,
) -> Interval:
    """The basic bootstrap interval of ``value``, within ``lowest`` and ``highest``."""
    low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2])
    return Interval(
        value, *(min(highest, max(lowest, 2 * value - float(edge))) for edge in (high, low))
    )


class Estimate(Config):
    """A value and its 95 % limits, which are None where one measurement gives none."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def interval(self) -> Interval:
        """Return it as a tuple."""
        return Interval(self.value, self.low, self.high)

    @classmethod
    def of(cls, interval: Interval) -> Self:
        return cls(**interval._asdict())

    @classmethod
    def of_mean(cls, values: Tensor, is_share: bool = True) -> Self:
        """Return the mean of (N,) values ≥ 0 and its interval: a share's, or by the bootstrap."""
        interval = mean_share if is_share else bootstrap_mean
        return cls.of(interval(values.double().numpy()))


def squared_cv(values: Tensor) -> Tensor:
    """Squared coefficient of variation var/mean² of (E,) values, one per expert; 0 where all are
    equal, E − 1 where one has all.

    Population variance, never ``torch.std``, whose gradient is infinite at balance.
    """
    return values.var(correction=0) / values.mean().square()


def permuted_orders(
    images: int, number: int, seed: int, people: np.ndarray | None = None
) -> Iterator[np.ndarray]:
    """Yield so many times an order (N,) of images in which any is as likely as another by chance.

    people: (N,), whose image each is: people are then exchanged, each with all images, with others
    that have as many; one who is alone with a number stays.
    """
    random = np.random.default_rng(seed)
    by_person = indices_by_person(people) or list(np.arange(images)[:, None])
    lengths = np.array([len(own) for own in by_person])
    groups = [
        np.stack([own for own in by_person if len(own) == length]) for length in np.unique(lengths)
    ]
    for _ in range(number):
        order = np.arange(images)
        for group in groups:
            order[group] = group[random.permutation(len(group))]
        yield order


def first_half(images: int, people: np.ndarray | None = None) -> np.ndarray:
    """Return which images are of one half, (N,) bool: every other one, or every other person's."""
    if people is None or indices_by_person(people) is None:
        return np.arange(images) % 2 == 0
    return np.unique(people, return_inverse=True)[1] % 2 == 0
