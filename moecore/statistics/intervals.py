"""Intervals: Wilson's for a share, Student's t over seeds, otherwise the bootstrap.

Resamples, permutations and halves keep all images of a person together. N images, M people.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Self

import numpy as np
from torch import Tensor

from moecore.core.config import Config

People = np.ndarray | None  # (N,), the person of each image; None: each is another person's


class Interval(NamedTuple):
    """A value and its limits, which are both None for a single measurement."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def limits(self) -> tuple[float, float] | None:
        if self.low is None or self.high is None:
            return None
        return (self.low, self.high)


def wilson(successes: int, count: int, level: float = 0.95) -> Interval:
    """Return successes / count with Wilson's score interval (1927); valid for shares of 0 and 1."""
    import scipy  # models import this file, and need no statistics

    limits = scipy.stats.binomtest(successes, count).proportion_ci(level, "wilson")
    return Interval(successes / count, limits.low, limits.high)


def mean_over_seeds(values: Sequence[float], level: float = 0.95) -> Interval:
    """Return the mean of one value per seed with Student's t interval; one seed gives no limits."""
    import scipy

    if len(values) == 0:
        raise ValueError("mean_over_seeds: no values")
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return Interval(mean)
    spread = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
    factor = float(scipy.special.stdtrit(len(values) - 1, (1 + level) / 2))
    half = factor * spread / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)


def mean_over_seed_pairs(values: np.ndarray, level: float = 0.95) -> Interval:
    """Return the mean of one value per pair of S seeds, with a jackknife interval over seeds."""
    # values: (S, S), symmetric; the diagonal is not read. Student's t with S − 1 degrees of
    # freedom; two seeds give no limits.
    import scipy

    seeds = len(values)
    if seeds < 2:
        raise ValueError("mean_over_seed_pairs: fewer than two seeds")
    pairs = np.where(np.eye(seeds, dtype=bool), 0.0, values)
    mean = float(pairs.sum() / (seeds * (seeds - 1)))
    if seeds == 2:
        return Interval(mean)
    # Pairs share seeds and are not independent, so a seed is left out with all its pairs.
    without = (pairs.sum() - 2 * pairs.sum(axis=1)) / ((seeds - 1) * (seeds - 2))
    variance = (seeds - 1) / seeds * float(np.square(without - without.mean()).sum())
    half = float(scipy.special.stdtrit(seeds - 1, (1 + level) / 2)) * math.sqrt(variance)
    return Interval(mean, mean - half, mean + half)


def jackknife_pseudo_values(values: np.ndarray) -> np.ndarray:
    """Return each seed's jackknife pseudo-value, (S,), from values (S, S) of pairs of seeds."""
    # S · mean over all pairs − (S − 1) · mean over pairs without it (Tukey, 1958). Methods are
    # compared seed by seed with them; ``mean_over_seed_pairs`` has the same t interval.
    seeds = len(values)
    pairs = np.where(np.eye(seeds, dtype=bool), 0.0, values)
    mean = pairs.sum() / (seeds * (seeds - 1))
    if seeds == 2:
        return np.array([mean, mean])
    without = (pairs.sum() - 2 * pairs.sum(axis=1)) / ((seeds - 1) * (seeds - 2))
    return seeds * mean - (seeds - 1) * without


def bootstrap_statistic(
    statistic: Callable[[np.ndarray], float],
    count: int,
    resamples: int = 1000,
    seed: int = 0,
    level: float = 0.95,
    lowest: float = -math.inf,
    highest: float = math.inf,
    people: People = None,
) -> Interval:
    """Return ``statistic`` over ``count`` images with its basic (reflected) bootstrap interval."""
    # statistic: takes the indices (count,) of a resample; its values are in [lowest, highest].
    # people: (count,), the person of each image. Whole people are then drawn, because images of one
    # person are not independent. Source: Davison & Hinkley (1997), eq. 5.6.
    if count < 1:
        raise ValueError("bootstrap: no images")
    generator = np.random.default_rng(seed)
    value = float(statistic(np.arange(count)))
    images = indices_by_person(people)
    estimates = []
    for _ in range(resamples):
        if images is None:
            indices = generator.integers(0, count, count)
        else:
            drawn_people = generator.integers(0, len(images), len(images))
            indices = np.concatenate([images[person] for person in drawn_people])
        estimates.append(statistic(indices))
    return basic_bootstrap_interval(value, estimates, level, lowest, highest)


def indices_by_person(people: People) -> list[np.ndarray] | None:
    """Return each person's image indices, in ascending order; None if nobody has several images."""
    if people is None:
        return None
    _, person_of_image = np.unique(people, return_inverse=True)
    counts = np.bincount(person_of_image)
    if counts.max(initial=0) < 2:
        return None
    return np.split(np.argsort(person_of_image, kind="stable"), np.cumsum(counts)[:-1])


def bootstrap_mean(
    values: np.ndarray, lowest: float = 0.0, highest: float = math.inf, people: People = None
) -> Interval:
    """Return the mean of one value per image, (N,), with its bootstrap interval."""
    mean = lambda chosen: float(values[chosen].mean())
    return bootstrap_statistic(mean, len(values), lowest=lowest, highest=highest, people=people)


def mean_share(shares: np.ndarray, people: People = None) -> Interval:
    """Return the mean of one share per image, (N,) in [0, 1], with its interval in [0, 1]."""
    # Wilson's interval if all shares are 0 or 1 and no person has several images; otherwise the
    # bootstrap.
    shares = np.asarray(shares, np.float64)
    if indices_by_person(people) is None and np.isin(shares, (0, 1)).all():
        return wilson(int(shares.sum()), len(shares))
    return bootstrap_mean(shares, highest=1.0, people=people)


def basic_bootstrap_interval(
    value: float,
    estimates: Sequence[float],
    level: float = 0.95,
    lowest: float = -math.inf,
    highest: float = math.inf,
) -> Interval:
    """Return the basic bootstrap interval from resampled ``estimates``, in [lowest, highest]."""
    # Not the percentile interval: the ECE is biased upward on finite samples, and a resample adds
    # the bias again. The reflection removes it, so the interval of an ECE may lie below its value.
    low, high = np.quantile(estimates, [(1 - level) / 2, (1 + level) / 2])
    limits = (min(highest, max(lowest, 2 * value - float(edge))) for edge in (high, low))
    return Interval(value, *limits)


class Estimate(Config):
    """A value and its 95 % limits, which are both None for a single measurement."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def interval(self) -> Interval:
        return Interval(self.value, self.low, self.high)

    @classmethod
    def of(cls, interval: Interval) -> Self:
        return cls(**interval._asdict())


def squared_cv(values: Tensor) -> Tensor:
    # 0 if all are equal, E − 1 if only one of E values is not 0.
    # Population variance, never ``torch.std``, whose gradient is infinite at balance.
    return values.var(correction=0) / values.mean().square()


def draw_image_permutations(
    images: int, number: int, seed: int, people: People = None
) -> Iterator[np.ndarray]:
    """Yield ``number`` random permutations (N,) of images; with ``people``, of whole people."""
    # With people (N,), a person swaps all images with a person who has equally many.
    random = np.random.default_rng(seed)
    by_person = indices_by_person(people) or list(np.arange(images)[:, None])
    groups = [
        np.stack([indices for indices in by_person if len(indices) == length])
        for length in np.unique([len(indices) for indices in by_person])
    ]
    for _ in range(number):
        order = np.arange(images)
        for group in groups:
            order[group] = group[random.permutation(len(group))]
        yield order


def every_second_mask(images: int, people: People = None) -> np.ndarray:
    """Return a mask (N,) bool: True for every second image, or for every second person's images."""
    if people is None or indices_by_person(people) is None:
        return np.arange(images) % 2 == 0
    return np.unique(people, return_inverse=True)[1] % 2 == 0
