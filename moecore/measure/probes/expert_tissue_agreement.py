"""Agreement of a cube's first region expert with the cube's largest tissue.

N people with one volume each, R tissues that have an expert, P cubes (tokens) per volume. The
amount of a tissue in a cube is the sum of its shares over foreground voxels. Cubes with any amount
above 0 count; *own* is the tissue with the largest amount (in a tie the first). *First* is the
tissue whose expert has the highest score in the last MoE layer; free experts are left out.
Formulas: docs/methods.md, `Generalisation of region experts`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from moecore.measure.probes.ageing_and_rescans import rank_correlations
from moecore.statistics.intervals import Interval, bootstrap_mean

NONE = -1  # the tissue of an empty cube


class TissueAgreement(NamedTuple):
    """Share of a person's cubes whose first is their own, mean over people, and chance levels."""

    people: int
    cubes: int
    agreement: Interval
    permuted: float  # expected agreement with the person's cubes permuted
    fixed: float  # of the best constant answer
    same_place: float | None  # agreement with other people's cubes at the same places
    over_chance: Interval  # agreement − permuted, per person


class RoutedCubes(NamedTuple):
    """Tissue amounts of cubes, int64, and scores of their experts, fp64; (N, P, R)."""

    amounts: np.ndarray
    scores: np.ndarray

    @property
    def own(self) -> np.ndarray:
        """Return the largest tissue of each cube, or NONE, (N, P)."""
        has_tissue = self.amounts.any(axis=-1)
        return np.where(has_tissue, self.amounts.argmax(axis=-1), NONE)

    @property
    def first(self) -> np.ndarray:
        """Return the tissue whose expert has the highest score, (N, P)."""
        return self.scores.argmax(axis=-1)


def tissue_sums_by_cube(shares: np.ndarray, grid: tuple[int, ...]) -> np.ndarray:
    """Return sums over the cubes of a grid (a, b, c): (N, R, D, H, W) → int64 (N, a·b·c, R)."""
    split = [
        size
        for length, parts in zip(shares.shape[2:], grid, strict=True)
        for size in (parts, length // parts)
    ]
    sums = shares.reshape(*shares.shape[:2], *split).sum(axis=(3, 5, 7), dtype=np.int64)
    return sums.reshape(*shares.shape[:2], -1).swapaxes(1, 2)


def cube_tissue_agreement(sorts: Sequence[RoutedCubes]) -> TissueAgreement:
    """Return the agreement over the same people's cubes in several sorts of volumes."""
    cube_tissues = np.concatenate([cubes.own for cubes in sorts], axis=1)
    first = np.concatenate([cubes.first for cubes in sorts], axis=1)
    tissues = np.arange(sorts[0].amounts.shape[-1])
    is_included = (cube_tissues != NONE).any(axis=1)  # people with any cube with tissue
    cube_tissues, first = cube_tissues[is_included], first[is_included]
    has_tissue = cube_tissues != NONE
    number = has_tissue.sum(axis=1)
    is_own = cube_tissues[..., None] == tissues  # (N, P, R)
    is_first = (first[..., None] == tissues) & has_tissue[..., None]
    right = (is_own & is_first).sum(axis=(1, 2)) / number
    rates = is_own.sum(axis=1) / number[:, None]
    permuted = (is_first.sum(axis=1) / number[:, None] * rates).sum(axis=1)
    return TissueAgreement(
        people=len(cube_tissues),
        cubes=int(number.sum()),
        agreement=mean_over_people(right, 0.0),
        permuted=float(permuted.mean()),
        fixed=float(rates.mean(axis=0).max()),
        same_place=cross_person_place_accuracy(is_own, is_first),
        over_chance=mean_over_people(right - permuted, -1.0),
    )


def cross_person_place_accuracy(is_own: np.ndarray, is_first: np.ndarray) -> float | None:
    """Return how often a cube's first is the own of other people's cubes at the same place.

    Mean over people of the share of pairs of cubes with tissue; None without pairs. is_own,
    is_first: bool (N, P, R), one-hot or 0.
    """
    other_cubes = is_own.sum(axis=0) - is_own
    right = (other_cubes * is_first).sum(axis=(1, 2))
    pairs = (other_cubes.sum(axis=-1) * is_first.any(axis=-1)).sum(axis=1)
    has_pairs = pairs > 0
    if has_pairs.any():
        return float((right[has_pairs] / pairs[has_pairs]).mean())
    return None


def cube_tissue_score_correlation(routed_cubes: RoutedCubes, tissue: int) -> Interval:
    """Return Spearman's correlation of a tissue's share of a cube and its expert's score.

    Over a person's cubes, 0 if either is constant; mean over people.
    """
    values = []
    for amounts, scores in zip(routed_cubes.amounts, routed_cubes.scores, strict=True):
        total = amounts.sum(axis=-1)
        has_tissue = total > 0
        share = amounts[has_tissue, tissue] / total[has_tissue]
        values += rank_correlations(share, scores[has_tissue, tissue][None])
    return mean_over_people(np.array(values), -1.0)


def mean_over_people(values: np.ndarray, lowest: float) -> Interval:
    """Return the mean of one value per person, with limits between ``lowest`` and 1."""
    if len(values) < 2:
        return Interval(float(values.mean()))
    value, low, high = bootstrap_mean(values, lowest=lowest)
    return Interval(value, low, None if high is None else min(1.0, high))
