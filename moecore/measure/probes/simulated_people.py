"""Test brain-age models on simulated people: ageing, rescans, and experts of tissues.

N people with one volume each, R tissues that have an expert, P cubes (tokens) per volume. A cube
agrees if its largest tissue (*own*; in a tie the first) is the tissue whose expert has the highest
score in the last MoE layer (*first*); experts without a tissue are left out. A tissue's amount is
the sum of its shares over the cube's foreground voxels; cubes without any amount do not count.
Formulas: docs/methods.md, `Generalisation of region experts`.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise, permutations
from typing import NamedTuple

import numpy as np
import scipy
import torch
from pydantic import Field
from torch import Tensor

from moecore.core.config import Config
from moecore.data.phantom.anatomy import SIDE, VOXEL_MM
from moecore.data.phantom.simulated_person import simulate_ellipsoid_scan
from moecore.data.prepared import Prepared, evenly_spaced_indices
from moecore.data.sources.phantom import Phantom
from moecore.data.thread_map import map_in_threads
from moecore.data.volumes.volume_preparation import TISSUES
from moecore.measure.base import MeasuredModel
from moecore.nn.backbones.base_model import Model
from moecore.nn.predict import predict_in_batches
from moecore.statistics.intervals import Interval, bootstrap_mean
from moecore.training.single_tissue_volumes import find_mask_channels, keep_only_tissue

RESCAN_YEARS = 1.0  # two sessions of a participant within this time count as a rescan
PEOPLE = 1000  # reserved for these checks; rescans use the second half
NO_TISSUE = -1  # the tissue of an empty cube


class ScanRequest(NamedTuple):
    age: float
    sex: str
    person: int  # seed
    scan: int = 0
    site: int = 0


class UnseenPeopleSimulator(NamedTuple):
    """Simulates people of a cohort who are in none of its splits."""

    source: Phantom

    def person_seed(self, number: int) -> int:
        """Return the seed of the person with this ``number``, which is below ``PEOPLE``."""
        return self.source.person_seed(self.source.subjects + number)

    def draw_volumes(self, scans: Sequence[ScanRequest]) -> np.ndarray:
        """Simulate volumes, float16 (N, 1, D, H, W), as `prepare` would store them."""
        return np.stack(list(map_in_threads(lambda scan: self.source.draw(*scan)[0], scans)))


def choose_sex(number: int) -> str:
    return "FM"[number % 2]


def predict_years(model: Model, volumes: np.ndarray | Tensor, batch: int) -> np.ndarray:
    """Return predicted years (N,) fp64 of volumes (N, 1, D, H, W)."""
    prediction, _ = predict_in_batches(model, volumes, batch, routing=False)
    return prediction[:, 0].double().numpy()


def predict_ageing(
    model: Model, people: UnseenPeopleSimulator, subjects: int, ages: Sequence[float], batch: int
) -> np.ndarray:
    """Return predicted ages (S, A) of ``subjects`` simulated people, each at all ``ages``."""
    # Anatomy, scanner and the difference of brain age from age do not change.
    rows = []
    for number in range(subjects):
        person = people.person_seed(number)
        scans = [ScanRequest(age, choose_sex(number), person) for age in ages]
        rows.append(predict_years(model, people.draw_volumes(scans), batch))
    return np.stack(rows)


def compute_mean_rising_step_share(predictions: np.ndarray) -> float:
    """Return the share of steps between ages at which predictions (S, A) rise; A ≥ 2."""
    return float((np.diff(predictions, axis=1) > 0).mean())


def rank_correlations(ages: Sequence[float], predictions: np.ndarray) -> list[float]:
    """Return each subject's Spearman correlation of ages (A,), predictions (S, A); constant: 0."""
    age_ranks = scipy.stats.rankdata(ages) - (len(ages) + 1) / 2
    ranks = scipy.stats.rankdata(predictions, axis=1) - (len(ages) + 1) / 2
    lengths = np.sqrt((age_ranks @ age_ranks) * (ranks * ranks).sum(axis=1))
    sums = zip(ranks @ age_ranks, lengths, strict=True)
    return [float(total / length) if length else 0.0 for total, length in sums]


def measure_simulated_rescans(
    model: Model, people: UnseenPeopleSimulator, ages: Sequence[float] | np.ndarray, batch: int
) -> tuple[Interval, Interval]:
    """Return the mean |difference| in years of two scans per person, at one site and at two."""
    scans = [
        ScanRequest(float(age), choose_sex(number), people.person_seed(PEOPLE // 2 + number))
        for number, age in enumerate(ages)
    ]

    def predict(scan: int, site: int) -> np.ndarray:
        volumes = people.draw_volumes([request._replace(scan=scan, site=site) for request in scans])
        return predict_years(model, volumes, batch)

    first, again, elsewhere = predict(0, 0), predict(1, 0), predict(1, 1)
    return bootstrap_mean(np.abs(again - first)), bootstrap_mean(np.abs(elsewhere - first))


def mean_session_gap_change(
    model: Model, data: Prepared, pairs: Sequence[tuple[int, int]], batch: int
) -> Interval:
    """Return the mean |change of predicted age − years between|; pairs: test indices."""
    indices, inverse = np.unique(pairs, return_inverse=True)
    gaps = predict_years(model, data.test.images[indices], batch) - data.test.labels[indices]
    earlier, later = gaps[inverse.reshape(-1, 2)].T
    people = data.test.people_at(np.array(pairs)[:, 0])
    return bootstrap_mean(np.abs(later - earlier), people=people)


def session_pairs(subjects: Sequence[Mapping[str, str]]) -> list[tuple[int, int]]:
    """Return index pairs of a person's consecutive sessions at most RESCAN_YEARS apart."""
    visits = sorted(
        (subject["participant_id"], float(subject["age"]), index)
        for index, subject in enumerate(subjects)
    )
    return [
        (earlier, later)
        for (person, age, earlier), (other, later_age, later) in pairwise(visits)
        if person == other and later_age - age <= RESCAN_YEARS
    ]


class TissueAgreement(NamedTuple):
    """Share of a person's cubes whose best expert is their tissue's; three chance levels of it."""

    people: int
    cubes: int
    agreement: Interval
    permuted: float  # expected agreement with the person's cubes permuted
    fixed: float  # of the best constant answer
    same_place: float | None  # agreement with other people's cubes at the same places
    over_chance: Interval  # agreement − permuted, per person


class RoutedCubes(NamedTuple):
    amounts: np.ndarray  # int64 (N, P, R), tissue per cube
    scores: np.ndarray  # fp64 (N, P, R), of the tissues' experts

    @property
    def largest_tissue(self) -> np.ndarray:
        """Return the index of each cube's largest tissue, or NO_TISSUE, (N, P)."""
        return np.where(self.amounts.any(axis=-1), self.amounts.argmax(axis=-1), NO_TISSUE)

    @property
    def best_expert(self) -> np.ndarray:
        """Return the index of the tissue whose expert has the highest score, (N, P)."""
        return self.scores.argmax(axis=-1)


def tissue_sums_by_cube(shares: np.ndarray, grid: tuple[int, ...]) -> np.ndarray:
    """Sum tissue shares (N, R, D, H, W) over the cubes of a grid (a, b, c): int64 (N, a·b·c, R)."""
    split = [
        size
        for length, parts in zip(shares.shape[2:], grid, strict=True)
        for size in (parts, length // parts)
    ]
    sums = shares.reshape(*shares.shape[:2], *split).sum(axis=(3, 5, 7), dtype=np.int64)
    return sums.reshape(*shares.shape[:2], -1).swapaxes(1, 2)


def measure_tissue_agreement(sorts: Sequence[RoutedCubes]) -> TissueAgreement:
    """Return how often a cube's best expert is its tissue's; sorts: N volumes per tissue filter."""
    cube_tissues = np.concatenate([cubes.largest_tissue for cubes in sorts], axis=1)
    first = np.concatenate([cubes.best_expert for cubes in sorts], axis=1)
    tissues = np.arange(sorts[0].amounts.shape[-1])
    is_included = (cube_tissues != NO_TISSUE).any(axis=1)  # people with any cube with tissue
    cube_tissues, first = cube_tissues[is_included], first[is_included]
    has_tissue = cube_tissues != NO_TISSUE
    number = has_tissue.sum(axis=1)
    is_own = cube_tissues[..., None] == tissues  # (N, P, R), one-hot or 0, as is_first
    is_first = (first[..., None] == tissues) & has_tissue[..., None]
    right = (is_own & is_first).sum(axis=(1, 2)) / number
    rates = is_own.sum(axis=1) / number[:, None]
    permuted = (is_first.sum(axis=1) / number[:, None] * rates).sum(axis=1)
    # How often a cube's first is the own of other people's cubes at the same place: mean over
    # people of the share of pairs of cubes with tissue.
    other_cubes = is_own.sum(axis=0) - is_own
    same = (other_cubes * is_first).sum(axis=(1, 2))
    pairs = (other_cubes.sum(axis=-1) * is_first.any(axis=-1)).sum(axis=1)
    has_pairs = pairs > 0
    same_place = None
    if has_pairs.any():
        same_place = float((same[has_pairs] / pairs[has_pairs]).mean())
    return TissueAgreement(
        people=len(cube_tissues),
        cubes=int(number.sum()),
        agreement=bootstrap_mean_over_people(right, 0.0),
        permuted=float(permuted.mean()),
        fixed=float(rates.mean(axis=0).max()),
        same_place=same_place,
        over_chance=bootstrap_mean_over_people(right - permuted, -1.0),
    )


def average_tissue_score_correlation(routed_cubes: RoutedCubes, tissue: int) -> Interval:
    """Return Spearman's correlation of a tissue's share of a cube and its expert's score."""
    # Over a person's cubes, 0 if either is constant; mean over people.
    values = []
    for amounts, scores in zip(*routed_cubes, strict=True):
        total = amounts.sum(axis=-1)
        has_tissue = total > 0
        share = amounts[has_tissue, tissue] / total[has_tissue]
        values += rank_correlations(share, scores[has_tissue, tissue][None])
    return bootstrap_mean_over_people(np.array(values), -1.0)


def bootstrap_mean_over_people(values: np.ndarray, lowest: float) -> Interval:
    """Return the mean of values (N,), one per person, with 95 % limits in [``lowest``, 1]."""
    if len(values) < 2:
        return Interval(float(values.mean()))
    value, low, high = bootstrap_mean(values, lowest=lowest)
    return Interval(value, low, None if high is None else min(1.0, high))


FIRST_SEED = 10**12  # of the other generator's people, above the seeds of every cohort
THINNED_VOXEL_SHARES = (0.25, 0.5, 0.75)  # remaining voxels of the second tissue
# number of a person, and the shares (R, D, H, W) → remaining shares
Filter = Callable[[int, np.ndarray], np.ndarray]


class RegionGeneralisationSettings(Config):
    """Volumes that differ from training, on which region experts are tested."""

    volumes: int = Field(48, ge=2, description="Most test participants, one volume each.")
    subjects: int = Field(24, ge=2, le=PEOPLE, description="Subjects of another volume generator.")


class RegionExpertAgreement(NamedTuple):
    complete: TissueAgreement  # complete volumes
    isolated: TissueAgreement  # single tissues, over all tissues, as in training
    correlation: dict[str, Interval]  # complete volumes: a tissue's share of a cube and the score


class RegionExpertGeneralisation(NamedTuple):
    test: RegionExpertAgreement
    mixed: TissueAgreement | None  # over all mixtures; None with a single region expert
    # (complete tissue, thinned tissue, remaining share of its voxels) → agreement
    mixtures: dict[tuple[str, str, float], TissueAgreement]
    other: RegionExpertAgreement | None  # of the other generator; None on another voxel grid


class VolumesAndTissues(NamedTuple):
    images: np.ndarray  # float16 (N, 1, D, H, W) in [0, 1]
    shares: np.ndarray  # (N, R, D, H, W)


def measure_region_experts(
    subject: MeasuredModel,
    settings: RegionGeneralisationSettings,
    ages: tuple[float, float],  # youngest and oldest of the other generator's people, in years
    seed: int,  # of these people and of the mixtures
    batch: int,  # volumes per forward pass
) -> RegionExpertGeneralisation:
    """Return region experts' agreement with tissues on test, two-tissue and simulated volumes."""
    model, data, tissues = subject.model, subject.data, subject.regions
    test = read_first_volume_per_participant(data, tissues, settings.volumes)
    mixed = {}
    for complete, thinned in permutations(range(len(tissues)), 2):
        for share in THINNED_VOXEL_SHARES:
            mask = tissue_voxel_thinner(complete, thinned, share, seed)
            mixed[complete, thinned, share] = route_tissue_masked_volumes(model, test, mask, batch)
    other = None
    if has_generator_voxel_grid(data):
        cohort = simulate_ellipsoid_cohort(tissues, settings.subjects, ages, seed)
        other = measure_region_expert_agreement(model, cohort, tissues, batch)
    return RegionExpertGeneralisation(
        test=measure_region_expert_agreement(model, test, tissues, batch),
        mixed=measure_tissue_agreement(list(mixed.values())) if mixed else None,
        mixtures={
            (tissues[complete], tissues[thinned], share): measure_tissue_agreement([cubes])
            for (complete, thinned, share), cubes in mixed.items()
        },
        other=other,
    )


def has_generator_voxel_grid(data: Prepared) -> bool:
    return data.card["size"] == [SIDE] * 3 and data.card["voxel_mm"] == [VOXEL_MM] * 3


def read_first_volume_per_participant(
    data: Prepared, tissues: tuple[str, ...], count: int
) -> VolumesAndTissues:
    """Return the first volume of each of ``count`` test participants, evenly spread."""
    channels = list(find_mask_channels(tissues, data.card))
    first: dict[str, int] = {}
    for index, row in enumerate(data.subjects("test")):
        first.setdefault(row["participant_id"], index)
    indices = np.array(list(first.values()))[evenly_spaced_indices(len(first), count)]
    return VolumesAndTissues(data.test.images[indices], data.regions("test")[indices][:, channels])


def simulate_ellipsoid_cohort(
    tissues: tuple[str, ...], count: int, ages: tuple[float, float], seed: int
) -> VolumesAndTissues:
    """Simulate ``count`` people by ``simulate_ellipsoid_scan``: evenly spread ages, both sexes."""
    channels = [TISSUES.index(tissue) for tissue in tissues]
    people = [
        (float(age), choose_sex(number), FIRST_SEED + seed * PEOPLE + number)
        for number, age in enumerate(np.linspace(*ages, count))
    ]
    scans = list(map_in_threads(lambda person: simulate_ellipsoid_scan(*person), people))
    images, regions = (np.stack(part) for part in zip(*scans, strict=True))
    return VolumesAndTissues(images, regions[:, channels])


def measure_region_expert_agreement(
    model: Model, scans: VolumesAndTissues, tissues: tuple[str, ...], batch: int
) -> RegionExpertAgreement:
    """Measure how often a cube's best expert is its tissue's, on whole and one-tissue volumes."""
    complete = route_tissue_masked_volumes(model, scans, None, batch)
    single = [
        route_tissue_masked_volumes(model, scans, other_tissue_remover(tissue), batch)
        for tissue in range(len(tissues))
    ]
    return RegionExpertAgreement(
        complete=measure_tissue_agreement([complete]),
        isolated=measure_tissue_agreement(single),
        correlation={
            name: average_tissue_score_correlation(complete, tissue)
            for tissue, name in enumerate(tissues)
        },
    )


def other_tissue_remover(tissue: int) -> Filter:
    """Return a filter that sets the shares of all tissues but one to 0, as in training."""

    def mask(person: int, shares: np.ndarray) -> np.ndarray:
        remaining = np.zeros_like(shares)
        remaining[tissue] = shares[tissue]
        return remaining

    return mask


def tissue_voxel_thinner(complete: int, thinned: int, share: float, seed: int) -> Filter:
    """Return a filter that keeps tissue ``complete`` and a random share of ``thinned``'s voxels."""

    def mask(person: int, shares: np.ndarray) -> np.ndarray:
        # one number per voxel: a larger share includes the voxels of a smaller one
        number = np.random.default_rng([seed, person]).random(shares.shape[1:])
        remaining = np.zeros_like(shares)
        remaining[complete] = shares[complete]
        remaining[thinned] = shares[thinned] * (number < share)
        return remaining

    return mask


def route_tissue_masked_volumes(
    model: Model, scans: VolumesAndTissues, mask: Filter | None, batch: int
) -> RoutedCubes:
    """Route volumes, reduced by ``mask`` if given; return tissues and expert scores of cubes."""
    layout = model.layout
    parts = []
    for start in range(0, len(scans.images), batch):
        images = scans.images[start : start + batch]
        shares = scans.shares[start : start + batch]
        if mask is not None:
            shares = np.stack([mask(person, row) for person, row in enumerate(shares, start)])
            total = shares.sum(axis=1, dtype=np.int64).clip(max=255).astype(np.uint8)
            images = keep_only_tissue(torch.from_numpy(images), torch.from_numpy(total)).numpy()
        _, records = predict_in_batches(model, images, batch)
        scores = records[-1].logits[:, layout.special :, : shares.shape[1]].double().numpy()
        parts.append((tissue_sums_by_cube(shares * (images > 0), layout.grid), scores))
    return RoutedCubes(*(np.concatenate(field) for field in zip(*parts, strict=True)))
