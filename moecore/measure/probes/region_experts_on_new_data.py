"""Region experts on volumes unlike training's: mixed tissues, complete volumes, new generator.

In training, volumes have a single tissue, which is the label of the experts: agreement on such
volumes is expected, and serves for comparison only.

N people with one volume each, R tissues that have an expert; shares of a tissue are uint8, 255 is
1. Agreement: expert_tissue_agreement.py; formulas: docs/methods.md.
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

FIRST_SEED = 10**12  # of the other generator's people, above the seeds of every cohort
SHARES = (0.25, 0.5, 0.75)  # remaining voxels of the second tissue
Filter = Callable[[np.ndarray], np.ndarray]  # a person's shares (R, D, H, W) → remaining shares


class RegionGeneralisationSettings(Config):
    """Volumes that differ from training, on which region experts are tested."""

    volumes: int = Field(
        48, ge=2, description="Largest number of test participants, one volume each."
    )
    subjects: int = Field(
        24, ge=2, le=PEOPLE, description="Simulated subjects of another generator of volumes."
    )


class RegionExpertAgreement(NamedTuple):
    """Region experts on the volumes of one generator."""

    whole: TissueAgreement  # complete volumes
    isolated: TissueAgreement  # single tissues, over all tissues, as in training
    correlation: dict[str, Interval]  # complete volumes: a tissue's share of a cube and the score


class RegionExperts(NamedTuple):
    """Region experts on all sorts of volumes."""

    test: RegionExpertAgreement
    mixed: TissueAgreement | None  # over all mixtures; None with a single region expert
    # (complete tissue, thinned tissue, remaining share of its voxels) → agreement
    mixtures: dict[tuple[str, str, float], TissueAgreement]
    other: RegionExpertAgreement | None  # of the other generator; None on another voxel grid


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
    """Return the agreement on test volumes, on mixtures and on the other generator's volumes.

    tissues: names of the first experts, in order; ages: youngest and oldest age of the other
    generator's people, in years; seed: of these people and of the mixtures.
    """
    test = select_scans(data, tissues, settings.volumes)
    mixed = {}
    for complete, thinned in permutations(range(len(tissues)), 2):
        for share in SHARES:
            mask = tissue_mixture_filter(complete, thinned, share, seed)
            mixed[complete, thinned, share] = route_tissue_masked_volumes(model, test, mask, batch)
    other = None
    if has_generator_voxel_grid(data):
        cohort = simulate_shell_cohort(tissues, settings.subjects, ages, seed)
        other = measure_tissue_routing(model, cohort, tissues, batch)
    return RegionExperts(
        test=measure_tissue_routing(model, test, tissues, batch),
        mixed=cube_tissue_agreement(list(mixed.values())) if mixed else None,
        mixtures={
            (tissues[complete], tissues[thinned], share): cube_tissue_agreement([cubes])
            for (complete, thinned, share), cubes in mixed.items()
        },
        other=other,
    )


def has_generator_voxel_grid(data: Prepared) -> bool:
    """Return whether the other generator's voxel grid is the data's."""
    return data.card["size"] == [SIDE] * 3 and data.card["voxel_mm"] == [VOXEL_MM] * 3


def select_scans(data: Prepared, tissues: tuple[str, ...], count: int) -> VolumesAndTissues:
    """Return the first volume of each of ``count`` test participants, evenly spread."""
    channels = list(region_channels(tissues, data.card))
    first: dict[str, int] = {}
    for index, row in enumerate(data.subjects("test")):
        first.setdefault(row["participant_id"], index)
    indices = np.array(list(first.values()))[evenly_spaced_indices(len(first), count)]
    return VolumesAndTissues(data.test.images[indices], data.regions("test")[indices][:, channels])


def simulate_shell_cohort(
    tissues: tuple[str, ...], count: int, ages: tuple[float, float], seed: int
) -> VolumesAndTissues:
    """Simulate people of the other generator with evenly spread ages, women and men in turn."""
    channels = [REGIONS.index(tissue) for tissue in tissues]
    people = [
        (float(age), alternating_sex(number), FIRST_SEED + seed * PEOPLE + number)
        for number, age in enumerate(np.linspace(*ages, count))
    ]
    scans = list(map_in_threads(lambda person: simulate_shell_scan(*person), people))
    images, regions = (np.stack(part) for part in zip(*scans, strict=True))
    return VolumesAndTissues(images, regions[:, channels])


def measure_tissue_routing(
    model: Model, scans: VolumesAndTissues, tissues: tuple[str, ...], batch: int
) -> RegionExpertAgreement:
    """Return the agreement on complete volumes, and on each tissue alone."""
    complete = route_tissue_masked_volumes(model, scans, None, batch)
    single = [
        route_tissue_masked_volumes(model, scans, one_tissue_filter(tissue), batch)
        for tissue in range(len(tissues))
    ]
    return RegionExpertAgreement(
        whole=cube_tissue_agreement([complete]),
        isolated=cube_tissue_agreement(single),
        correlation={
            name: cube_tissue_score_correlation(complete, tissue)
            for tissue, name in enumerate(tissues)
        },
    )


def one_tissue_filter(tissue: int) -> Callable[[int], Filter]:
    """Return a filter of each person that leaves one tissue, as in training."""

    def mask(shares: np.ndarray) -> np.ndarray:
        remaining = np.zeros_like(shares)
        remaining[tissue] = shares[tissue]
        return remaining

    return lambda person: mask


def tissue_mixture_filter(
    complete: int, thinned: int, share: float, seed: int
) -> Callable[[int], Filter]:
    """Return a filter of each person that leaves ``complete``, and a share of ``thinned``'s voxels.

    Each voxel draws one number: a larger share includes the voxels of a smaller one.
    """

    def of_person(person: int) -> Filter:
        def mask(shares: np.ndarray) -> np.ndarray:
            number = np.random.default_rng([seed, person]).random(shares.shape[1:])
            remaining = np.zeros_like(shares)
            remaining[complete] = shares[complete]
            remaining[thinned] = shares[thinned] * (number < share)
            return remaining

        return mask

    return of_person


def route_tissue_masked_volumes(
    model: Model, scans: VolumesAndTissues, mask: Callable[[int], Filter] | None, batch: int
) -> RoutedCubes:
    """Route volumes with some tissue masked; mask: number of a person → filter; None: no mask."""
    parts = []
    for start in range(0, len(scans.images), batch):
        images = scans.images[start : start + batch]
        shares = scans.shares[start : start + batch]
        if mask is not None:
            rows = enumerate(shares, start)
            shares = np.stack([mask(number)(row) for number, row in rows])
            total = shares.sum(axis=1, dtype=np.int64).clip(max=255).astype(np.uint8)
            images = keep_only_tissue(torch.from_numpy(images), torch.from_numpy(total)).numpy()
        parts.append(route_scans(model, VolumesAndTissues(images, shares), batch))
    return RoutedCubes(*(np.concatenate(field) for field in zip(*parts, strict=True)))


def route_scans(model: Model, scans: VolumesAndTissues, batch: int) -> RoutedCubes:
    """Return amounts and scores of volumes."""
    _, records = predict_in_batches(model, scans.images, batch)
    layout = model.layout
    scores = records[-1].logits[:, layout.special :, : scans.shares.shape[1]]
    inside = scans.shares * (scans.images > 0)
    return RoutedCubes(tissue_sums_by_cube(inside, layout.grid), scores.double().numpy())
