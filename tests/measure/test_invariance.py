import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moecore.backbones import MoESettings, SingleLayer, Vit
from moecore.data.prepared import evenly_spaced_indices
from moecore.measure import invariance
from moecore.measure.base import MeasuredModel
from moecore.measure.invariance import TRANSFORMS, Invariance, draw_affines
from moecore.measure.routing_metrics import layer_metrics
from moecore.measure.routing_metrics.layer_metrics import imed_by_image, squared_imed
from moecore.nn.experts.base import expert_grid_shape
from moecore.nn.predict import predict_in_batches
from moecore.testing import check_measurement
from tests.measure.subjects import built, compute_without_cache

SETTINGS = Invariance(images=40, batch=30)
MLPS = {"kind": "mlp", "number": 6, "hidden_ratio": 0.1}
MOE = {"router": {"kind": "noisy_top_k", "k": 1}, "experts": MLPS}
VIT = Vit(patch=6, width=16, depth=2, heads=2)
MODELS = {"single": (SingleLayer(), MoESettings(**MOE, blocks=[0]))}
MODELS["vit"] = (VIT, MoESettings(**MOE, blocks=[0, 1]))


@pytest.fixture(scope="module")
def vit(data):
    return built(*MODELS["vit"], data, 5)


@pytest.fixture(scope="module")
def results(data, vit):
    single = built(*MODELS["single"], data, 5)
    models = {"single": MeasuredModel(single, data), "vit": MeasuredModel(vit, data)}
    return {name: check_measurement(SETTINGS, model) for name, model in models.items()}


@pytest.fixture(scope="module")
def images(data):
    return data.test.images[evenly_spaced_indices(60, 40)]


@pytest.mark.parametrize(("name", "layers"), [("single", 1), ("vit", 2)])
def test_every_transform_has_its_distances_and_every_class_its_map(results, name, layers):
    found = results[name]
    assert list(found.curve("imed", "transform")) == list(TRANSFORMS)
    for value in found.all("imed"):
        assert len(value.item_values) == 40 and 0 <= value.low < value.value < value.high
        assert 0 < value.value**2 <= 1 / np.pi
    maps = np.array(found.facts["class_maps"])
    assert maps.shape == (10, layers, 6)
    np.testing.assert_allclose(maps.sum(-1), 1, atol=1e-6)


def test_the_identity_moves_nothing(data, vit, monkeypatch):
    still = torch.eye(3, dtype=torch.float64).expand(40, 3, 3)
    monkeypatch.setattr(invariance, "draw_affines", lambda *_: still)
    found = SETTINGS.collect_result(MeasuredModel(vit, data), compute_without_cache)
    for name in TRANSFORMS:
        imed = found.find("imed", transform=name)
        assert found.find("agreement_transformed", transform=name).value == 1
        assert found.interval("imed_normalised", transform=name) == imed.interval == (0, 0, 0)
        assert set(imed.item_values.tolist()) == {0.0}


def test_a_distance_is_held_against_that_between_different_images(results, vit, images):
    _, clean = predict_in_batches(vit, images, 40)
    pairs = layer_metrics.draw_partners(40, 0).tolist()
    probs = invariance.get_probs_of_records(clean)
    sides = [[tuple(layer[[i]] for layer in probs) for i in pair] for pair in enumerate(pairs)]
    one_by_one = [float(imed_by_image(*side)) for side in sides]
    for name, distance in results["vit"].curve("imed", "transform").items():
        value = results["vit"].find("imed_normalised", transform=name)
        assert value.value == pytest.approx(distance / (sum(one_by_one) / 40))
        assert 0 <= value.low < value.value < value.high


def test_values_are_those_of_the_images_moved_by_hand(results, vit, images):
    """They are means over images, and do not depend on the batch."""
    _, before = predict_in_batches(vit, images, 40)
    for name, batch in (("shear 15", 40), ("translation (0.1, 0.1)", 7)):
        drawn = draw_affines(name, 40, (12, 12), 0)
        _, after = predict_in_batches(vit, invariance.transform_images(images, drawn, batch), 40)
        best = [[layer.probs.argmax(-1) for layer in side] for side in (before, after)]
        same = [(a == b).double().mean() for a, b in zip(*best, strict=True)]
        agreement = results["vit"].find("agreement_transformed", transform=name).value
        assert agreement == pytest.approx(float(sum(same) / 2)) and agreement < 1
        d = imed_by_image(
            invariance.get_probs_of_records(before), invariance.get_probs_of_records(after)
        )
        value = results["vit"].find("imed", transform=name).value
        assert value == pytest.approx(float(d.mean()), rel=1e-4)


def test_flat_routing_has_a_small_distance_but_not_a_small_normalised_one(images):
    # A router whose probs are all moved ten times closer to even ones.
    d = torch.rand(40, generator=torch.Generator().manual_seed(0), dtype=torch.float64).numpy()
    between = 2 * d[::-1].copy()
    sure = invariance.bootstrap_imed_ratio(d, between)
    flat = invariance.bootstrap_imed_ratio(d / 10, between / 10)
    assert flat.value == pytest.approx(sure.value)
    assert invariance.bootstrap_imed_ratio(d, np.zeros(40)) is None


def test_few_images(data, vit):
    """One image has no other to compare with; a class without images has no map."""
    found = Invariance(images=1).collect_result(MeasuredModel(vit, data), compute_without_cache)
    assert found.all("imed") and not found.all("imed_normalised")
    maps = found.facts["class_maps"]
    assert {len(set(layer)) > 1 for of_class in maps for layer in of_class} == {True, False}
    assert [None] * 6 in [of_class[0] for of_class in maps]


def one_hot(experts: int, where: int) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(where), experts).float()


def by_definition(u: torch.Tensor, v: torch.Tensor, rows: int, columns: int, sigma: float) -> float:
    """The double sum over pairs of experts, with places counted row by row."""
    total = 0.0
    for i in range(rows * columns):
        for j in range(rows * columns):
            gap = (i // columns - j // columns) ** 2 + (i % columns - j % columns) ** 2
            weight = math.exp(-gap / (2 * sigma**2)) / (2 * math.pi * sigma**2)
            total += weight * float((u[i] - v[i]) * (u[j] - v[j]))
    return total


@pytest.mark.parametrize(
    ("first", "second", "squared_gap"),
    [(0, 399, math.inf), (0, 1, 1), (0, 20, 1), (19, 20, math.inf), (0, 21, 2)],
)
def test_one_hots_by_hand(first, second, squared_gap):
    # G_ii + G_jj − 2 G_ij = 2/(2π) · (1 − exp(−gap²/2)); experts 0 and 20 lie one below the other
    found = float(squared_imed(one_hot(400, first), one_hot(400, second)))
    assert found == pytest.approx((1 - math.exp(-squared_gap / 2)) / math.pi, abs=1e-12)


@given(st.sampled_from([4, 6, 7, 8, 12]), st.integers(0, 10**6), st.sampled_from([0.5, 1.0, 2.0]))
def test_equals_the_double_sum_and_is_a_distance(experts, seed, sigma):
    generator = torch.Generator().manual_seed(seed)
    u, v, w = torch.rand(3, experts, generator=generator, dtype=torch.float64).softmax(-1)
    d2 = float(squared_imed(u, v, sigma))
    assert d2 == pytest.approx(
        by_definition(u, v, *expert_grid_shape(experts), sigma), rel=1e-9, abs=1e-14
    )
    assert d2 == float(squared_imed(v, u, sigma)) > 0 == float(squared_imed(u, u, sigma))
    around = (float(squared_imed(*pair, sigma)) ** 0.5 for pair in ((u, w), (w, v)))
    assert math.sqrt(d2) <= sum(around) + 1e-12


def test_the_metric_is_positive_definite():
    # a row of points has eigenvalues of at least 1 + 2 Σ_k (−1)^k exp(−k²/2) = 0.0362 (its symbol
    # at π); the grid is the product of two
    least = 1 + 2 * sum((-1) ** k * math.exp(-k * k / 2) for k in range(1, 30))
    values = torch.linalg.eigvalsh(layer_metrics.imed_matrix(20, 20))
    assert float(values[0]) >= least**2 / (2 * math.pi) and float(values[0]) > 2e-4
    assert torch.equal(layer_metrics.imed_matrix(3, 4), layer_metrics.imed_matrix(3, 4).T)


def test_means_over_tokens_and_layers_by_hand():
    near, far, same = one_hot(16, 1), one_hot(16, 15), one_hot(16, 0)
    before = (same.expand(1, 2, 16), same.expand(1, 2, 16))  # one image, two tokens, two layers
    after = (torch.stack([near, same])[None], torch.stack([far, far])[None])
    # 15 lies 3 rows and 3 columns from 0
    adjacent, distant = ((1 - math.exp(-0.5)) / math.pi, (1 - math.exp(-9)) / math.pi)
    d = imed_by_image(before, after)
    assert d.shape == (1,)
    assert float(d) == pytest.approx((math.sqrt(adjacent) / 2 + math.sqrt(distant)) / 2)


def test_the_same_routing_has_no_distance():
    before = torch.rand(3, 5, 8, generator=torch.Generator().manual_seed(0)).softmax(-1)
    after = before.clone()
    after[1] = after[1].flip(-1)
    distance = imed_by_image((before,), (after,))
    assert distance[0] == distance[2] == 0 and distance[1] > 0


@given(st.integers(2, 60), st.integers(0, 10**6))
def test_partners_are_other_images_each_once_and_on_one_circle(images, seed):
    found = layer_metrics.draw_partners(images, seed).tolist()
    assert sorted(found) == list(range(images))
    place, seen = 0, []
    for _ in range(images):
        place = found[place]
        seen.append(place)
    assert sorted(seen) == list(range(images)) and seen[-1] == 0
    assert found == layer_metrics.draw_partners(images, seed).tolist()


def test_two_images_are_compared_with_each_other():
    probs = torch.stack([one_hot(16, 0)[None], one_hot(16, 1)[None]])
    adjacent = math.sqrt((1 - math.exp(-0.5)) / math.pi)
    assert layer_metrics.imed_to_others((probs,), 0).tolist() == pytest.approx([adjacent, adjacent])
    with pytest.raises(ValueError, match="two are needed"):
        layer_metrics.draw_partners(1, 0)
