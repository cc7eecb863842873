from itertools import permutations, product
from types import SimpleNamespace

import numpy as np
import pytest
import scipy
import torch
from torch import nn

from moecore.core.routing_records import ModelOutput, RoutingRecord, TokenLayout
from moecore.data.prepared import SPLITS, Prepared
from moecore.measure.cohort_checks import CohortChecks, put_region_experts
from moecore.measure.probes import linear_probe
from moecore.measure.probes import simulated_people as simulated
from moecore.measure.probes.linear_probe import PENALTIES, ModelAndProbeErrors, predict_volumes
from moecore.measure.probes.simulated_people import (
    FIRST_SEED,
    RegionExpertGeneralisation,
    RoutedCubes,
)
from moecore.parts import MeasuredModel, Values
from tests.data.making import GREY, balls, write_cohort
from tests.measure.subjects import Brightness, Source, compute_without_cache

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
        logits = torch.cat([torch.full_like(scores[:, :1], 5.0), scores], dim=1)
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
    found = simulated.measure_tissue_agreement([cubes])
    assert found.people == 5 and found.cubes == int(cubes.amounts.any(axis=-1).sum())
    assert found.agreement.value == pytest.approx(np.mean(rights))
    assert found.permuted == pytest.approx(np.mean(chances))
    assert found.fixed == pytest.approx(np.mean(rates, axis=0).max())
    assert found.same_place == pytest.approx(np.mean(placed))
    assert found.over_chance.value == pytest.approx(np.mean(rights) - np.mean(chances))
    assert found.agreement.low <= found.agreement.value <= found.agreement.high <= 1


def test_an_expert_for_everything_is_no_better_than_chance():
    cubes = drawn(3)
    same = cubes._replace(scores=np.broadcast_to([0.0, 1.0, 0.5], cubes.scores.shape))
    found = simulated.measure_tissue_agreement([same])
    assert found.over_chance.value == pytest.approx(0)
    assert found.agreement.value == pytest.approx(found.permuted)
    right = simulated.measure_tissue_agreement([cubes._replace(scores=cubes.amounts.astype(float))])
    assert right.agreement.value == right.agreement.high == 1


def test_who_holds_no_tissue_is_left_out():
    """Several sorts of volumes are one set of cubes."""
    one, other = drawn(0), drawn(1)
    both = RoutedCubes(*(np.concatenate(parts, axis=1) for parts in zip(one, other, strict=True)))
    assert simulated.measure_tissue_agreement([one, other]) == simulated.measure_tissue_agreement(
        [both]
    )
    cubes = drawn(4)
    cubes.amounts[2] = 0
    left = [0, 1, 3, 4]
    without = RoutedCubes(cubes.amounts[left], cubes.scores[left])
    assert simulated.measure_tissue_agreement([cubes]) == simulated.measure_tissue_agreement(
        [without]
    )
    alone = simulated.measure_tissue_agreement([RoutedCubes(cubes.amounts[:1], cubes.scores[:1])])
    assert alone.same_place is alone.agreement.low is None


def test_correlation_is_spearmans_over_the_cubes_of_a_person():
    cubes = drawn(5)
    wanted = []
    for held, scores in zip(cubes.amounts, cubes.scores, strict=True):
        places = held.sum(axis=1) > 0
        shares = held[places, 1] / held[places].sum(axis=1)
        wanted.append(scipy.stats.spearmanr(shares, scores[places, 1]).statistic)
    found = simulated.average_tissue_score_correlation(cubes, 1)
    assert found.value == pytest.approx(np.mean(wanted))
    flat = cubes._replace(scores=np.zeros_like(cubes.scores))
    assert simulated.average_tissue_score_correlation(flat, 1).value == 0


def test_amounts_are_sums_over_cubes():
    shares = np.random.default_rng(0).integers(0, 256, (2, 3, 4, 6, 2)).astype(np.uint8)
    found = simulated.tissue_sums_by_cube(shares, (2, 3, 1))
    assert found.shape == (2, 6, 3)
    for person, tissue, (a, b) in product(range(2), range(3), product(range(2), range(3))):
        cube = shares[person, tissue, 2 * a : 2 * a + 2, 2 * b : 2 * b + 2]
        assert found[person, 3 * a + b, tissue] == cube.astype(int).sum()


def test_a_mixture_keeps_one_tissue_and_a_share_of_another():
    shares = np.random.default_rng(1).integers(1, 80, (3, 16, 16, 16)).astype(np.uint8)
    little = simulated.tissue_voxel_thinner(0, 2, 0.25, seed=3)(5, shares)
    much = simulated.tissue_voxel_thinner(0, 2, 0.75, seed=3)(5, shares)
    for left, found in ((0.25, little), (0.75, much)):
        assert (found[0] == shares[0]).all() and (found[1] == 0).all()
        some = found[2] > 0
        assert (found[2][some] == shares[2][some]).all()
        assert some.mean() == pytest.approx(left, abs=0.03)
    assert ((little[2] > 0) <= (much[2] > 0)).all(), "what is left at 0.25 is left at 0.75"
    for seed, person in ((3, 6), (4, 5)):
        other = simulated.tissue_voxel_thinner(0, 2, 0.25, seed=seed)(person, shares)
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
    scans = simulated.VolumesAndTissues(images, shares)
    first = simulated.other_tissue_remover(1)
    found = simulated.route_tissue_masked_volumes(Watching(), scans, first, 3)
    kept = images * (shares[:, 1:2] / np.float16(255))
    np.testing.assert_allclose(torch.cat(seen).numpy(), kept, atol=1e-3)
    assert (found.amounts[..., [0, 2]] == 0).all()
    inside = np.where(images[:, 0] > 0, shares[:, 1], 0).astype(int)
    np.testing.assert_array_equal(found.amounts[..., 1].sum(axis=1), inside.sum(axis=(1, 2, 3)))
    whole = simulated.route_tissue_masked_volumes(Watching(), scans, None, 3)
    assert torch.equal(seen[-1], torch.from_numpy(images[3:]).float())
    assert whole.scores.shape == (4, 64, 3), "without the special token and the free expert"


@pytest.fixture(scope="module")
def balls_cohort(tmp_path_factory) -> Prepared:
    return balls(tmp_path_factory.mktemp("balls"))


def measured(balls_cohort, tissues=TISSUES, batch: int = 3, **model) -> RegionExpertGeneralisation:
    settings = simulated.RegionGeneralisationSettings(volumes=6)
    subject = MeasuredModel(ByBrightness(**model), balls_cohort, regions=tissues)
    return simulated.measure_region_experts(subject, settings, (20, 90), 0, batch)


def test_experts_that_know_their_tissue(balls_cohort):
    found = measured(balls_cohort)
    assert found.other is None, "the balls have 16³ voxels"
    isolated, whole = found.test.isolated, found.test.complete
    assert isolated.agreement.value == 1 and isolated.over_chance.low > 0.5
    assert whole.people == 6 and whole.agreement.value > 0.9 and whole.over_chance.low > 0
    assert found.mixed.over_chance.low > 0 and set(found.test.correlation) == set(TISSUES)
    assert len(found.mixtures) == 6 * 3
    assert {key[:2] for key in found.mixtures} == set(permutations(TISSUES, 2))
    assert found.mixed.cubes == sum(one.cubes for one in found.mixtures.values())
    assert found == measured(balls_cohort, batch=4)


def test_the_order_of_names_is_the_order_of_experts(balls_cohort):
    turned = ("csf", "wm")
    greys = (GREY["csf"], GREY["wm"])
    found = measured(balls_cohort, turned, greys=greys)
    assert found.test.isolated.agreement.value == 1
    assert {key[:2] for key in found.mixtures} == set(permutations(turned))
    one = measured(balls_cohort, ("csf",), greys=greys)
    assert one.mixed is None and one.mixtures == {}


def test_a_volume_of_each_participant(tmp_path):
    data = write_cohort(tmp_path)  # the first participant has two of the 40
    assert len(simulated.read_first_volume_per_participant(data, TISSUES, 100).images) == 39
    few = simulated.read_first_volume_per_participant(data, ("csf",), 3)
    assert few.images.shape == few.shares.shape == (3, 1, 16, 16, 16)
    np.testing.assert_array_equal(few.images[0], data.test.images[0])


def test_people_of_the_other_generator():
    found = simulated.simulate_ellipsoid_cohort(("csf", "gm"), 2, (30.0, 80.0), 1)
    assert found.images.shape == (2, 1, 64, 64, 64) and found.images.dtype == np.float16
    assert found.shares.shape == (2, 2, 64, 64, 64) and found.shares.dtype == np.uint8
    again = simulated.simulate_ellipsoid_cohort(("gm",), 2, (30.0, 80.0), 1)
    np.testing.assert_array_equal(again.shares[:, 0], found.shares[:, 1])
    other = simulated.simulate_ellipsoid_cohort(("gm",), 2, (30.0, 80.0), 2)
    assert not np.array_equal(other.images, found.images)
    assert FIRST_SEED > 1_000_000 * 400, "above the seeds of every cohort"


def test_who_is_not_tried_and_why(balls_cohort):
    settings = CohortChecks()

    def tried(subject: MeasuredModel) -> tuple[set[str], dict[str, str]]:
        out = Values(settings.metrics, balls_cohort.task, compute_without_cache)
        out.facts["not_checked"] = {}
        put_region_experts(subject, settings, out)
        return {value.metric for value in out.values}, out.facts["not_checked"]

    dense = MeasuredModel(ByBrightness(), balls_cohort)
    metrics, reasons = tried(dense)
    assert not metrics and "no region experts" in reasons["generalisation"]
    named = dense._replace(regions=TISSUES)
    metrics, reasons = tried(named)
    assert list(reasons) == ["other generator"]
    assert {"isolated_agreement", "mixed_over_chance", "whole_same_place"} < metrics
    bare = SimpleNamespace(card=balls_cohort.card | {"regions": []})
    metrics, reasons = tried(named._replace(data=bare))
    assert not metrics and "no tissue maps" in reasons["generalisation"]


class Pooled(nn.Module):
    """Its head reads the mean and the greatest voxel of a volume."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 1)

    def forward(self, images: torch.Tensor) -> ModelOutput:
        flat = images.flatten(1)
        return ModelOutput(self.head(torch.stack([flat.mean(1), flat.amax(1)], dim=1)))


def test_what_the_head_reads_and_says():
    images, model = torch.rand(7, 1, 2, 2, 2), Pooled().train()
    said, read = linear_probe.predict_and_capture_features(model, images, 3)
    flat = images.flatten(1)
    np.testing.assert_allclose(read, torch.stack([flat.mean(1), flat.amax(1)], dim=1), rtol=1e-6)
    np.testing.assert_allclose(said, model(images).prediction[:, 0].detach(), rtol=1e-6)
    assert model.training and not model.head._forward_pre_hooks, "the model is left as it was"


def test_against_the_normal_equations():
    random = np.random.default_rng(0)
    features, ages = random.normal(3, 5, (60, 4)), random.normal(50, 10, 60)
    others = random.normal(3, 5, (30, 4)), random.normal(50, 10, 30)
    probe, penalty = linear_probe.fit_ridge_probe((features, ages), others)
    errors = {}
    for tried in PENALTIES:  # minimise |y - mean - Xw|^2 + 60 * penalty * |w|^2 of standardised X
        x = (features - features.mean(0)) / features.std(0)
        weights = np.linalg.solve(x.T @ x + 60 * tried * np.eye(4), x.T @ (ages - ages.mean()))
        errors[tried] = (others[0] - features.mean(0)) / features.std(0) @ weights + ages.mean()
    means = {tried: np.abs(found - others[1]).mean() for tried, found in errors.items()}
    assert penalty == min(means, key=means.get)
    np.testing.assert_allclose(probe.predict(others[0]), errors[penalty], rtol=1e-9)
    # features that do not vary say the mean age
    ages = np.array([20.0, 30.0, 70.0])
    training, validation = (np.ones((3, 2)), ages), (np.ones((2, 2)), ages[:2])
    probe, penalty = linear_probe.fit_ridge_probe(training, validation)
    assert probe.predict(np.ones((1, 2))).tolist() == pytest.approx([40])
    assert penalty == PENALTIES[-1]


def test_every_tissue_has_its_own_map():
    # Half of the voxels hold a tissue that is 0.2 bright, a quarter one of 0.4, a quarter one of
    # 0.8: their means are what is left of each.
    volumes = np.full((3, 1, 2, 2, 2), 0.2, np.float16)
    volumes[:, 0, 1, 0], volumes[:, 0, 1, 1] = 0.4, 0.8
    regions = np.zeros((3, 3, 2, 2, 2), np.uint8)
    regions[:, 0, 0] = regions[:, 1, 1, 0] = regions[:, 2, 1, 1] = 255
    test = SimpleNamespace(images=volumes, labels=np.zeros(3))
    data = SimpleNamespace(test=test, regions=lambda split: regions)
    for region, age in enumerate((20, 40, 80)):
        found = predict_volumes(Brightness(), data, "test", region, 2, None)
        assert found.predicted == pytest.approx([age] * 3, rel=1e-3)


def test_an_offset_does_not_count_for_the_probe(cohort):
    errors = linear_probe.model_and_probe_errors
    sides = [errors(Brightness(), cohort, place, 16, 256) for place in (None, 0)]
    whole, white = ([one.mean() for one in side] for side in sides)
    # a third of the brightness is 40 years too young, and as good a measure
    assert white[0] > 30 and white[1] < 3 and white[1] == pytest.approx(whole[1], rel=0.02)


def test_each_split_has_its_part_in_the_probe(cohort):
    # By hand: least squares of age on brightness over the training split, with the penalty that is
    # best for the validation split.
    found = linear_probe.model_and_probe_errors(Brightness(), cohort, None, 16, None)
    said = [predict_volumes(Brightness(), cohort, split, None, 16, None) for split in SPLITS]
    train, validation, test = said
    centre, spread = train.predicted.mean(), train.predicted.std()
    together = ((train.predicted - centre) * train.ages).sum() / spread
    lines = {}
    for penalty in PENALTIES:
        slope = together / (len(train.ages) * (1 + penalty))
        lines[penalty] = lambda x, slope=slope: train.ages.mean() + slope * (x - centre) / spread
    gaps = {name: line(validation.predicted) - validation.ages for name, line in lines.items()}
    errors = {penalty: np.abs(gap).mean() for penalty, gap in gaps.items()}
    by_hand = np.abs(lines[min(lines, key=errors.get)](test.predicted) - test.ages)
    np.testing.assert_allclose(found.probe, by_hand, rtol=1e-9)
    np.testing.assert_allclose(found.raw, np.abs(test.predicted - test.ages))


def test_few_volumes_are_spread_over_the_split(cohort):
    train = predict_volumes(Brightness(), cohort, "train", None, 16, None)
    few = predict_volumes(Brightness(), cohort, "train", 1, 16, 7)
    whole = dict(zip(train.ages.tolist(), train.predicted.tolist(), strict=True))
    assert len(few.ages) == len(set(few.ages)) == 7
    assert max(few.ages) > train.ages.mean() > min(few.ages)
    np.testing.assert_allclose(few.predicted, [whole[age] / 3 for age in few.ages], rtol=2e-3)


def test_tissues_are_compared_on_the_same_volumes():
    errors = {"wm": [5, 6, 7, 8], "gm": [4, 5, 6, 7], "csf": [6, 6, 6, 6]}
    tissues = {name: ModelAndProbeErrors(*[np.array(row)] * 2) for name, row in errors.items()}
    found = linear_probe.compare_probe_errors_of_tissues(tissues)
    assert list(found) == [("gm", "csf"), ("wm", "gm")]
    first = found["gm", "csf"]
    assert first.low < first.value == -0.5 < first.high < 1.5
    # every volume a year more: no doubt is left
    assert found["wm", "gm"] == (1.0, 1.0, 1.0)
    assert linear_probe.compare_probe_errors_of_tissues({"wm": tissues["wm"]}) == {}


def test_rising_steps_and_rank_correlations():
    # 5 of 6: the second subject's last step falls; standing still is no rise.
    told = pytest.approx(5 / 6)
    assert (
        simulated.compute_mean_rising_step_share(np.array([[1.0, 2, 3, 4], [1, 2, 3, 2.5]])) == told
    )
    assert simulated.compute_mean_rising_step_share(np.array([[1.0, 1.0, 2.0]])) == 0.5
    ages, tied = [20, 40, 60, 90], [1, 1, 2, 2]
    predictions = np.array([[1.0, 4, 9, 16], [4, 3, 2, 1], tied, [5, 5, 5, 5], [2, 1, 4, 3]])
    # the last: 1 − 6·4/(4·15)
    expected = [1, -1, scipy.stats.spearmanr(ages, tied).statistic, 0, 0.6]
    assert simulated.rank_correlations(ages, predictions) == pytest.approx(expected)


def test_only_age_changes_when_a_subject_is_aged():
    source = Source()
    people = simulated.UnseenPeopleSimulator(source)
    found = simulated.predict_ageing(Brightness(), people, 3, (20, 50, 80), 2)
    assert np.allclose(found, [[20, 50, 80]] * 3, atol=1e-4)
    # people from number 40 on are in no split
    asked = [(age, "FMF"[n], 7_000_040 + n, 0, 0) for n in range(3) for age in (20, 50, 80)]
    assert source.asked == asked


def test_a_scan_again_and_at_another_site():
    source = Source()
    ages = np.linspace(20, 80, 4)
    people = simulated.UnseenPeopleSimulator(source)
    same, other = simulated.measure_simulated_rescans(Brightness(), people, ages, 2)
    assert (same.value, other.value) == pytest.approx((0.1, 10.1), abs=1e-4)
    assert [asked[0] for asked in source.asked[:4]] == [20, 40, 60, 80]
    assert {asked[3:] for asked in source.asked} == {(0, 0), (1, 0), (1, 1)}
    # other people than those who are aged
    assert {asked[2] for asked in source.asked} == {7_000_540 + n for n in range(4)}


def test_sessions_within_the_time_are_pairs():
    rows = [("a", 50.0), ("b", 30.0), ("a", 51.0), ("a", 53.0), ("b", 30.5), ("c", 30.6)]
    subjects = [{"participant_id": name, "age": str(age)} for name, age in rows]
    # a: 50 → 51 yes, 51 → 53 no; b: 30 → 30.5; c is another person
    assert simulated.session_pairs(subjects) == [(0, 2), (1, 4)]
    assert simulated.session_pairs(subjects[:2]) == []


def test_sessions_of_one_person_are_compared_less_the_years_between(cohort, monkeypatch):
    rows = cohort.subjects("test")
    (a, b) = [place for place, row in enumerate(rows) if row["participant_id"] == "sub-test001"]
    years = abs(float(rows[a]["age"]) - float(rows[b]["age"]))
    monkeypatch.setattr(simulated, "RESCAN_YEARS", years / 2)
    assert simulated.session_pairs(rows) == []
    monkeypatch.setattr(simulated, "RESCAN_YEARS", years + 1)
    pairs = simulated.session_pairs(rows)
    assert len(pairs) == 1
    found = simulated.mean_session_gap_change(Brightness(), cohort, pairs, 2)
    over = simulated.predict_years(Brightness(), cohort.test.images, 16) - cohort.test.labels
    assert found.value == pytest.approx(abs(over[a] - over[b]))
