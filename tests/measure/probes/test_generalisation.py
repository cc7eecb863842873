"""Region experts on mixtures, whole volumes and another generator, against slow references."""

from itertools import permutations, product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from torch import nn

from moecore.core.routing_records import ModelOutput, RoutingRecord, TokenLayout
from moecore.data.prepared import Prepared
from moecore.measure.base import MeasuredModel
from moecore.measure.cohort_checks import CohortChecks, put_region_experts
from moecore.measure.probes.region_experts_on_new_data import (
    FIRST_SEED,
    RegionExperts,
    RegionGeneralisationSettings,
    RoutedCubes,
    VolumesAndTissues,
    cube_tissue_agreement,
    cube_tissue_score_correlation,
    measure_generalisation,
    one_tissue_filter,
    route_tissue_masked_volumes,
    select_scans,
    simulate_ellipsoid_cohort,
    tissue_mixture_filter,
    tissue_sums_by_cube,
)
from moecore.measure.values import Values
from tests.measure.subjects import compute_without_cache
from tests.volumes import GREY, balls, write_cohort

TISSUES = ("wm", "gm", "csf")


class ByBrightness(nn.Module):
    """The expert of a tissue likes cubes as bright as that tissue; the free one likes them all."""

    layout = TokenLayout(1, (4, 4, 4), (16, 16, 16))

    def __init__(self, greys: tuple[float, ...] = tuple(GREY.values())) -> None:
        super().__init__()
        self.greys = greys

    def forward(self, images: torch.Tensor) -> ModelOutput:
        pool = nn.functional.adaptive_avg_pool3d
        some = pool((images > 0).float(), self.layout.grid).flatten(1)
        mean = pool(images, self.layout.grid).flatten(1) / some.clamp_min(1e-6)
        scores = [1 - (mean - grey).abs() for grey in self.greys]
        scores = torch.stack([*scores, torch.full_like(mean, 9.0)], dim=-1)
        special = torch.full_like(scores[:, :1], 5.0)
        logits = torch.cat([special, scores], dim=1)
        first = RoutingRecord(*[-logits] * 5)
        return ModelOutput(mean.mean(1, keepdim=True), (first, RoutingRecord(*[logits] * 5)))


def drawn(seed: int, people: int = 5, places: int = 7, tissues: int = 3) -> RoutedCubes:
    """Cubes of which some hold nothing, with scores that lean towards what is held."""
    random = np.random.default_rng(seed)
    held = random.integers(0, 50, (people, places, tissues))
    held[random.random((people, places)) < 0.3] = 0
    return RoutedCubes(held, held / 50 + random.normal(0, 0.5, held.shape))


def slow(found: RoutedCubes) -> tuple[list[float], list[float], list[list[float]], list[float]]:
    """A loop over people, cubes and, for chance, all orders of a person's cubes."""
    rights, chances, rates, placed = [], [], [], []
    for person, (held, scores) in enumerate(zip(found.amounts, found.scores, strict=True)):
        places = [place for place, row in enumerate(held) if row.sum() > 0]
        own = [int(np.argmax(held[place])) for place in places]
        first = [int(np.argmax(scores[place])) for place in places]
        rights.append(np.mean([a == b for a, b in zip(own, first, strict=True)]))
        orders = [
            np.mean([a == b for a, b in zip(order, first, strict=True)])
            for order in permutations(own)
        ]
        chances.append(np.mean(orders))
        rates.append([own.count(tissue) / len(own) for tissue in range(held.shape[-1])])
        pairs = []
        for other, place in product(range(len(found.amounts)), places):
            theirs = found.amounts[other, place]
            if other != person and theirs.sum() > 0:
                pairs.append(np.argmax(theirs) == np.argmax(scores[place]))
        placed.append(np.mean(pairs))
    return rights, chances, rates, placed


@pytest.mark.parametrize("seed", range(3))
def test_agreement_against_loops_over_all_orders(seed):
    cubes = drawn(seed)
    rights, chances, rates, placed = slow(cubes)
    found = cube_tissue_agreement([cubes])
    assert found.people == 5
    assert found.cubes == int(cubes.amounts.any(axis=-1).sum())
    assert found.agreement.value == pytest.approx(np.mean(rights))
    assert found.permuted == pytest.approx(np.mean(chances))
    assert found.fixed == pytest.approx(np.mean(rates, axis=0).max())
    assert found.same_place == pytest.approx(np.mean(placed))
    assert found.over_chance.value == pytest.approx(np.mean(rights) - np.mean(chances))
    assert found.agreement.low <= found.agreement.value <= found.agreement.high <= 1


def test_an_expert_for_everything_is_no_better_than_chance():
    cubes = drawn(3)
    same = cubes._replace(scores=np.broadcast_to([0.0, 1.0, 0.5], cubes.scores.shape))
    found = cube_tissue_agreement([same])
    assert found.over_chance.value == pytest.approx(0)
    assert found.agreement.value == pytest.approx(found.permuted)
    right = cube_tissue_agreement([cubes._replace(scores=cubes.amounts.astype(float))])
    assert right.agreement.value == right.agreement.high == 1


def test_who_holds_no_tissue_is_left_out():
    """Several sorts of volumes are one set of cubes."""
    one, other = drawn(0), drawn(1)
    joined = RoutedCubes(*(np.concatenate(parts, axis=1) for parts in zip(one, other, strict=True)))
    assert cube_tissue_agreement([one, other]) == cube_tissue_agreement([joined])
    cubes = drawn(4)
    cubes.amounts[2] = 0
    left = [0, 1, 3, 4]
    without = RoutedCubes(cubes.amounts[left], cubes.scores[left])
    assert cube_tissue_agreement([cubes]) == cube_tissue_agreement([without])
    alone = cube_tissue_agreement([RoutedCubes(cubes.amounts[:1], cubes.scores[:1])])
    assert alone.same_place is alone.agreement.low is None


def test_correlation_is_spearmans_over_the_cubes_of_a_person():
    cubes = drawn(5)
    wanted = []
    for held, scores in zip(cubes.amounts, cubes.scores, strict=True):
        places = held.sum(axis=1) > 0
        shares = held[places, 1] / held[places].sum(axis=1)
        wanted.append(spearmanr(shares, scores[places, 1]).statistic)
    found = cube_tissue_score_correlation(cubes, 1)
    assert found.value == pytest.approx(np.mean(wanted))
    flat = cubes._replace(scores=np.zeros_like(cubes.scores))
    assert cube_tissue_score_correlation(flat, 1).value == 0


def test_amounts_are_sums_over_cubes():
    shares = np.random.default_rng(0).integers(0, 256, (2, 3, 4, 6, 2)).astype(np.uint8)
    found = tissue_sums_by_cube(shares, (2, 3, 1))
    assert found.shape == (2, 6, 3)
    for person, tissue, (a, b) in product(range(2), range(3), product(range(2), range(3))):
        cube = shares[person, tissue, 2 * a : 2 * a + 2, 2 * b : 2 * b + 2]
        assert found[person, 3 * a + b, tissue] == cube.astype(int).sum()


def test_a_mixture_keeps_one_tissue_and_a_share_of_another():
    shares = np.random.default_rng(1).integers(1, 80, (3, 16, 16, 16)).astype(np.uint8)
    little = tissue_mixture_filter(0, 2, 0.25, seed=3)(5, shares)
    much = tissue_mixture_filter(0, 2, 0.75, seed=3)(5, shares)
    for left, found in ((0.25, little), (0.75, much)):
        assert (found[0] == shares[0]).all() and (found[1] == 0).all()
        some = found[2] > 0
        assert (found[2][some] == shares[2][some]).all()
        assert some.mean() == pytest.approx(left, abs=0.03)
    assert ((little[2] > 0) <= (much[2] > 0)).all(), "what is left at 0.25 is left at 0.75"
    for seed, person in ((3, 6), (4, 5)):
        other = tissue_mixture_filter(0, 2, 0.25, seed=seed)(person, shares)
        assert not np.array_equal(little, other)


def test_what_is_left_is_what_the_model_sees():
    seen = []

    class Watching(ByBrightness):
        def forward(self, images: torch.Tensor) -> ModelOutput:
            seen.append(images.clone())
            return super().forward(images)

    random = np.random.default_rng(2)
    images = random.random((4, 1, 16, 16, 16)).astype(np.float16)
    images[:, :, :3] = 0
    shares = random.integers(0, 86, (4, 3, 16, 16, 16)).astype(np.uint8)
    scans = VolumesAndTissues(images, shares)
    found = route_tissue_masked_volumes(Watching(), scans, one_tissue_filter(1), 3)
    kept = images * (shares[:, 1:2] / np.float16(255))
    np.testing.assert_allclose(torch.cat(seen).numpy(), kept, atol=1e-3)
    assert (found.amounts[..., [0, 2]] == 0).all()
    inside = np.where(images[:, 0] > 0, shares[:, 1], 0).astype(int)
    np.testing.assert_array_equal(found.amounts[..., 1].sum(axis=1), inside.sum(axis=(1, 2, 3)))
    whole = route_tissue_masked_volumes(Watching(), scans, None, 3)
    assert torch.equal(seen[-1], torch.from_numpy(images[3:]).float())
    assert whole.scores.shape == (4, 64, 3), "without the special token and the free expert"


@pytest.fixture(scope="module")
def cohort(tmp_path_factory) -> Prepared:
    return balls(tmp_path_factory.mktemp("balls"))


def measured(cohort, tissues=TISSUES, batch: int = 3, **model) -> RegionExperts:
    settings = RegionGeneralisationSettings(volumes=6)
    subject = MeasuredModel(ByBrightness(**model), cohort, regions=tissues)
    return measure_generalisation(subject, settings, (20, 90), 0, batch)


def test_experts_that_know_their_tissue(cohort):
    found = measured(cohort)
    assert found.other is None, "the balls have 16³ voxels"
    isolated, whole = found.test.isolated, found.test.complete
    assert isolated.agreement.value == 1 and isolated.over_chance.low > 0.5
    assert whole.people == 6 and whole.agreement.value > 0.9 and whole.over_chance.low > 0
    assert found.mixed.over_chance.low > 0
    assert set(found.test.correlation) == set(TISSUES)
    assert len(found.mixtures) == 6 * 3
    assert {key[:2] for key in found.mixtures} == set(permutations(TISSUES, 2))
    assert found.mixed.cubes == sum(one.cubes for one in found.mixtures.values())
    assert found == measured(cohort, batch=4)


def test_the_order_of_names_is_the_order_of_experts(cohort):
    turned = ("csf", "wm")
    greys = (GREY["csf"], GREY["wm"])
    found = measured(cohort, turned, greys=greys)
    assert found.test.isolated.agreement.value == 1
    assert {key[:2] for key in found.mixtures} == set(permutations(turned))
    one = measured(cohort, ("csf",), greys=greys)
    assert one.mixed is None and one.mixtures == {}


def test_a_volume_of_each_participant(tmp_path):
    data = write_cohort(tmp_path)  # the first participant has two of the 40
    assert len(select_scans(data, TISSUES, 100).images) == 39
    few = select_scans(data, ("csf",), 3)
    assert few.images.shape == few.shares.shape == (3, 1, 16, 16, 16)
    np.testing.assert_array_equal(few.images[0], data.test.images[0])


def test_people_of_the_other_generator():
    found = simulate_ellipsoid_cohort(("csf", "gm"), 2, (30.0, 80.0), 1)
    assert found.images.shape == (2, 1, 64, 64, 64) and found.images.dtype == np.float16
    assert found.shares.shape == (2, 2, 64, 64, 64) and found.shares.dtype == np.uint8
    again = simulate_ellipsoid_cohort(("gm",), 2, (30.0, 80.0), 1)
    np.testing.assert_array_equal(again.shares[:, 0], found.shares[:, 1])
    other = simulate_ellipsoid_cohort(("gm",), 2, (30.0, 80.0), 2)
    assert not np.array_equal(other.images, found.images)
    assert FIRST_SEED > 1_000_000 * 400, "above the seeds of every cohort"


def test_who_is_not_tried_and_why(cohort):
    settings = CohortChecks()

    def tried(subject: MeasuredModel) -> tuple[set[str], dict[str, str]]:
        out = Values(settings.metrics, cohort.task, compute_without_cache)
        out.facts["not_checked"] = {}
        put_region_experts(subject, settings, out)
        return {value.metric for value in out.values}, out.facts["not_checked"]

    dense = MeasuredModel(ByBrightness(), cohort)
    metrics, reasons = tried(dense)
    assert not metrics and "no region experts" in reasons["generalisation"]
    named = dense._replace(regions=TISSUES)
    metrics, reasons = tried(named)
    assert list(reasons) == ["other generator"]
    assert {"isolated_agreement", "mixed_over_chance", "whole_same_place"} < metrics
    bare = SimpleNamespace(card=cohort.card | {"regions": []})
    metrics, reasons = tried(named._replace(data=bare))
    assert not metrics and "no tissue maps" in reasons["generalisation"]
