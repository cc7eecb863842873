"""Do region experts know their tissue where nobody taught them? Tissues mixed at shares that
training never showed, whole volumes, and volumes of another generator.

They learn from isolated volumes whose tissue is their label, so that they follow it on other
isolated volumes is what they were taught, and is here for comparison only.

N people with one volume each, R tissues that have an expert; shares of a tissue are uint8, 255 for
1. What agrees with what: cubes.py; formulas: docs/methods.md.
"""

from collections.abc import Callable
from itertools import permutations
from typing import NamedTuple

import numpy as np
import torch
from pydantic import Field

from moecore.core.config import Config
from moecore.data.phantom.anatomy import SIDE, VOXEL_MM
from moecore.data.phantom.shells import simulate_shell_scan
from moecore.data.prepared import Prepared, evenly_spaced_indices
from moecore.data.thread_map import map_in_threads
from moecore.data.volumes.volume_preparation import REGIONS
from moecore.measure.probes.ageing_and_rescans import PEOPLE, alternating_sex
from moecore.measure.probes.expert_tissue_agreement import (
    RoutedCubes,
    TissueAgreement,
    cube_tissue_agreement,
    cube_tissue_score_correlation,
    tissue_sums_by_cube,
)
from moecore.nn.backbones.base_model import Model
from moecore.nn.predict import predict_in_batches
from moecore.statistics.intervals import Interval
from moecore.training.single_tissue_volumes import keep_only_tissue, region_channels

OTHERS = 10**12  # seeds of the other generator's people begin here, above those of every cohort
SHARES = (0.25, 0.5, 0.75)  # of the second tissue's voxels: those left
Kept = Callable[[np.ndarray], np.ndarray]  # shares of one person (R, D, H, W) → those that are left


class RegionGeneralisationSettings(Config):
    """On what region experts are tried that training did not show them."""

    volumes: int = Field(48, ge=2, description="Test participants, at most; a volume of each.")
    subjects: int = Field(
        24, ge=2, le=PEOPLE, description="Simulated subjects of another generator of volumes."
    )


class RegionExpertAgreement(NamedTuple):
    """Region experts on the volumes of one generator."""

    whole: TissueAgreement  # nothing isolated
    isolated: TissueAgreement  # one tissue left, over all tissues: what was taught
    correlation: dict[str, Interval]  # whole volumes: of a tissue's share of a cube and the score


class RegionExperts(NamedTuple):
    """Region experts where they were taught, and where not."""

    test: RegionExpertAgreement
    mixed: TissueAgreement | None  # over all mixtures; None where one tissue has an expert
    # all of one tissue, and of another the share that is left of its voxels
    mixtures: dict[tuple[str, str, float], TissueAgreement]
    other: RegionExpertAgreement | None  # None where the data lie on another grid than this one's


class VolumesAndTissues(NamedTuple):
    """Volumes float16 (N, 1, D, H, W) in [0, 1], and shares (N, R, D, H, W) of the tissues."""

    images: np.ndarray
    shares: np.ndarray


def measure_generalisation(
    model: Model,
    data: Prepared,
    tissues: tuple[str, ...],
    settings: RegionGeneralisationSettings,
    ages: tuple[float, float],
    seed: int,
    batch: int,
) -> RegionExperts:
    """All of it, on the test split and on volumes made here.

    tissues: those after which the first experts are named, in that order; ages: the youngest and
    the oldest of the other generator's people, in years; seed: draws them and the mixtures; batch:
    volumes a forward pass.
    """
    test = own_scans(data, tissues, settings.volumes)
    mixed = {}
    for whole, thinned in permutations(range(len(tissues)), 2):
        for left in SHARES:
            kept = tissue_mixture_filter(whole, thinned, left, seed)
            mixed[whole, thinned, left] = route_tissue_masked_volumes(model, test, kept, batch)
    other = None
    if has_generator_voxel_grid(data):
        made = simulate_shell_cohort(tissues, settings.subjects, ages, seed)
        other = measure_tissue_routing(model, made, tissues, batch)
    return RegionExperts(
        test=measure_tissue_routing(model, test, tissues, batch),
        mixed=cube_tissue_agreement(list(mixed.values())) if mixed else None,
        mixtures={
            (tissues[whole], tissues[thinned], left): cube_tissue_agreement([cubes])
            for (whole, thinned, left), cubes in mixed.items()
        },
        other=other,
    )


def has_generator_voxel_grid(data: Prepared) -> bool:
    """Return whether the other generator makes volumes as the data has them."""
    return data.card["size"] == [SIDE] * 3 and data.card["voxel_mm"] == [VOXEL_MM] * 3


def own_scans(data: Prepared, tissues: tuple[str, ...], count: int) -> VolumesAndTissues:
    """The first volume of each of ``count`` test participants, evenly spread over the split."""
    channels = list(region_channels(tissues, data.card))
    first: dict[str, int] = {}
    for place, row in enumerate(data.subjects("test")):
        first.setdefault(row["participant_id"], place)
    places = np.array(list(first.values()))[evenly_spaced_indices(len(first), count)]
    return VolumesAndTissues(data.test.images[places], data.regions("test")[places][:, channels])


def simulate_shell_cohort(
    tissues: tuple[str, ...], count: int, ages: tuple[float, float], seed: int
) -> VolumesAndTissues:
    """People of the other generator, of ages evenly spread, women and men in turn."""
    channels = [REGIONS.index(tissue) for tissue in tissues]
    who = [
        (float(age), alternating_sex(number), OTHERS + seed * PEOPLE + number)
        for number, age in enumerate(np.linspace(*ages, count))
    ]
    made = list(map_in_threads(lambda person: simulate_shell_scan(*person), who))
    images, regions = (np.stack(part) for part in zip(*made, strict=True))
    return VolumesAndTissues(images, regions[:, channels])


def measure_tissue_routing(
    model: Model, scans: VolumesAndTissues, tissues: tuple[str, ...], batch: int
) -> RegionExpertAgreement:
    """Whole volumes, and each tissue alone."""
    whole = route_tissue_masked_volumes(model, scans, None, batch)
    alone = [
        route_tissue_masked_volumes(model, scans, one_tissue_filter(tissue), batch)
        for tissue in range(len(tissues))
    ]
    return RegionExpertAgreement(
        whole=cube_tissue_agreement([whole]),
        isolated=cube_tissue_agreement(alone),
        correlation={
            name: cube_tissue_score_correlation(whole, tissue)
            for tissue, name in enumerate(tissues)
        },
    )


def one_tissue_filter(tissue: int) -> Callable[[int], Kept]:
    """Only one tissue is left, as in training."""

    def kept(shares: np.ndarray) -> np.ndarray:
        remaining = np.zeros_like(shares)
        remaining[tissue] = shares[tissue]
        return remaining

    return lambda person: kept


def tissue_mixture_filter(
    whole: int, thinned: int, left: float, seed: int
) -> Callable[[int], Kept]:
    """Two tissues are left, ``thinned`` in the share ``left`` of its voxels, drawn one by one.

    A person's voxel draws one number: what is left at a share is left at all greater ones.
    """

    def of_person(person: int) -> Kept:
        def kept(shares: np.ndarray) -> np.ndarray:
            number = np.random.default_rng([seed, person]).random(shares.shape[1:])
            remaining = np.zeros_like(shares)
            remaining[whole] = shares[whole]
            remaining[thinned] = shares[thinned] * (number < left)
            return remaining

        return kept

    return of_person


def route_tissue_masked_volumes(
    model: Model, scans: VolumesAndTissues, kept: Callable[[int], Kept] | None, batch: int
) -> RoutedCubes:
    """The cubes of volumes of which ``kept`` leaves some tissue; None leaves them whole.

    kept: takes the person's number.
    """
    parts = []
    for start in range(0, len(scans.images), batch):
        images = scans.images[start : start + batch]
        shares = scans.shares[start : start + batch]
        if kept is not None:
            rows = enumerate(shares, start)
            shares = np.stack([kept(number)(row) for number, row in rows])
            total = shares.sum(axis=1, dtype=np.int64).clip(max=255).astype(np.uint8)
            images = keep_only_tissue(torch.from_numpy(images), torch.from_numpy(total)).numpy()
        parts.append(route_scans(model, VolumesAndTissues(images, shares), batch))
    return RoutedCubes(*(np.concatenate(field) for field in zip(*parts, strict=True)))


def route_scans(model: Model, scans: VolumesAndTissues, batch: int) -> RoutedCubes:
    """Amounts and scores of volumes as they are."""
    _, records = predict_in_batches(model, scans.images, batch)
    layout = model.layout
    scores = records[-1].logits[:, layout.special :, : scans.shares.shape[1]]
    inside = scans.shares * (scans.images > 0)
    return RoutedCubes(tissue_sums_by_cube(inside, layout.grid), scores.double().numpy())
