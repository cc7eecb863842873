"""Which region expert comes first in a cube, and which tissue the cube holds.

N people with one volume each, R tissues that have an expert, P cubes (tokens) of a volume. Of a
cube the amount of a tissue is the sum of its shares over the voxels that are not background. The
cube counts where any amount is above 0; *own* is the tissue with the greatest, the first of equal
ones. *First* is the tissue whose expert has the highest score in the last MoE layer; free experts
are left out. Formulas: docs/methods.md, `Generalisation of region experts`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from moecore.measure.probes.ageing_and_rescans import rank_correlations
from moecore.statistics.intervals import Interval, bootstrap_mean

NONE = -1  # the tissue of a cube that holds none


class TissueAgreement(NamedTuple):
    """How often the first region expert is that of the cube's tissue, beside three kinds of chance.

    All are means over people, of the shares of a person's cubes.
    """

    people: int
    cubes: int
    agreement: Interval
    permuted: float  # expected, had the decisions met the person's cubes in another order
    fixed: float  # what the best answer that is the same everywhere would reach
    same_place: float | None  # the decisions against other people's cubes of the same places
    over_chance: Interval  # agreement − permuted, for each person


class RoutedCubes(NamedTuple):
    """What volumes hold and how they are routed: amounts int64 and scores fp64, (N, P, R)."""

    amounts: np.ndarray
    scores: np.ndarray

    @property
    def own(self) -> np.ndarray:
        """The tissue of each cube, or NONE: (N, P)."""
        held = self.amounts.any(axis=-1)
        return np.where(held, self.amounts.argmax(axis=-1), NONE)

    @property
    def first(self) -> np.ndarray:
        """The tissue whose expert has the highest score: (N, P)."""
        return self.scores.argmax(axis=-1)


def tissue_sums_by_cube(shares: np.ndarray, grid: tuple[int, ...]) -> np.ndarray:
    """Sums over the cubes of a grid (a, b, c): (N, R, D, H, W) → int64 (N, a·b·c, R)."""
    split = [
        size
        for length, parts in zip(shares.shape[2:], grid, strict=True)
        for size in (parts, length // parts)
    ]
    sums = shares.reshape(*shares.shape[:2], *split).sum(axis=(3, 5, 7), dtype=np.int64)
    return sums.reshape(*shares.shape[:2], -1).swapaxes(1, 2)


def cube_tissue_agreement(sorts: Sequence[RoutedCubes]) -> TissueAgreement:
    """Return the agreement of the same people's cubes in several sorts of volumes."""
    own = np.concatenate([cubes.own for cubes in sorts], axis=1)
    first = np.concatenate([cubes.first for cubes in sorts], axis=1)
    tissues = np.arange(sorts[0].amounts.shape[-1])
    whose = (own != NONE).any(axis=1)  # who has a cube with tissue
    own = own[whose]
    first = first[whose]
    held = own != NONE
    number = held.sum(axis=1)
    is_own = own[..., None] == tissues  # (N, P, R)
    is_first = (first[..., None] == tissues) & held[..., None]
    right = (is_own & is_first).sum(axis=(1, 2)) / number
    rates = is_own.sum(axis=1) / number[:, None]
    permuted = (is_first.sum(axis=1) / number[:, None] * rates).sum(axis=1)
    return TissueAgreement(
        people=len(own),
        cubes=int(number.sum()),
        agreement=mean_over_people(right, 0.0),
        permuted=float(permuted.mean()),
        fixed=float(rates.mean(axis=0).max()),
        same_place=cross_person_place_accuracy(is_own, is_first),
        over_chance=mean_over_people(right - permuted, -1.0),
    )


def cross_person_place_accuracy(is_own: np.ndarray, is_first: np.ndarray) -> float | None:
    """Share of the pairs (a person's cube, another person's cube of that place, both with tissue)
    in which the decision for the first is the tissue of the second: bool (N, P, R), one-hot or 0.

    The mean over people; None where no person has such a pair.
    """
    others = is_own.sum(axis=0) - is_own
    right = (others * is_first).sum(axis=(1, 2))
    pairs = (others.sum(axis=-1) * is_first.any(axis=-1)).sum(axis=1)
    having = pairs > 0
    if having.any():
        return float((right[having] / pairs[having]).mean())
    return None


def cube_tissue_score_correlation(routed_cubes: RoutedCubes, tissue: int) -> Interval:
    """Spearman's, of a tissue's share of what a cube holds and the score of its expert.

    Over a person's cubes, 0 where one of the two is constant; the mean over people.
    """
    values = []
    for held, scores in zip(routed_cubes.amounts, routed_cubes.scores, strict=True):
        total = held.sum(axis=-1)
        some = total > 0
        share = held[some, tissue] / total[some]
        values += rank_correlations(share, scores[some, tissue][None])
    return mean_over_people(np.array(values), -1.0)


def mean_over_people(values: np.ndarray, lowest: float) -> Interval:
    """Return the mean of one value per person, from ``lowest`` to 1, with limits from people."""
    if len(values) < 2:
        return Interval(float(values.mean()))
    value, low, high = bootstrap_mean(values, lowest=lowest)
    return Interval(value, low, None if high is None else min(1.0, high))
