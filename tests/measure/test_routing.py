"""Everything about the routing on the digits, for routers of every kind."""

from operator import itemgetter

import numpy as np
import pytest
import torch

from moecore.core.encoded_arrays import decode_float_array
from moecore.core.routing_records import TokenLayout
from moecore.core.streams import derived_seed, generator_for
from moecore.data.prepared import evenly_spaced_indices
from moecore.data.views.views import make_random_views
from moecore.measure import routing
from moecore.measure.base import MeasuredModel
from moecore.measure.cost import Cost
from moecore.measure.exploring.expert_overlay_data import (
    CROPS,
    overlapping_crops,
    parse_expert_grid,
)
from moecore.measure.routing import Routing
from moecore.measure.routing_metrics.consistency import match_ratios
from moecore.measure.routing_metrics.layer_use import layer_use_metrics, use_metrics_by_image
from moecore.measure.routing_metrics.sweeps import score_threshold
from moecore.measure.routing_metrics.two_view_augmentations import draw_two_views
from moecore.nn.backbones.base_model import ImageSpec
from moecore.nn.backbones.vit import Vit
from moecore.nn.layers.moe import MoESettings
from moecore.nn.predict import predict_in_batches
from moecore.nn.routers.eigenbasis import Eigenbasis
from moecore.nn.routers.top_p import TopP
from moecore.testing import check_measurement
from moecore.training.guide import build_guide
from moecore.training.method import Method
from tests.measure.subjects import built, compute_without_cache
from tests.nn.test_correspondence import paired
from tests.routed import tiny

SETTINGS = Routing.model_validate(
    {
        "images": 40,
        "batch": 30,
        "overlays": 1,
        "views": {"crop": {"scale": [0.7, 1.0]}},
        "augmentations": ["noise", "flip", {"name": "mine", "views": {"shift": 1}, "noise": 0.02}],
        "augmentation_images": 15,
        "sweeps": {"k": [1, 2, 9], "threshold": [0.3, 0.5], "images": 20},
    }
)
NAMES = ("vmoe", "ermoe", "soft_moe", "expert_choice", "teacher_routed", "hash_moe")


@pytest.fixture(scope="module")
def models(data):
    image = ImageSpec.from_card(data.card)
    return {name: tiny(name, image) for name in NAMES}


@pytest.fixture(scope="module")
def images(data):
    return data.test.images[evenly_spaced_indices(60, 40)]


@pytest.fixture(scope="module")
def results(data, models):
    found = {}
    for name, model in models.items():
        subject = MeasuredModel(model, data, getattr(model, "guide", None))
        found[name] = check_measurement(SETTINGS, subject)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_every_method_has_every_measurement(results, name):
    found = results[name]
    assert found.images == 40 and len(found.layers) == 2
    assert [row.name for row in found.augmentations] == ["noise", "flip", "mine"]
    for row in (*found.layers, found, *found.augmentations):
        assert 0 <= row.match_top2_ordered <= min(row.match_top1, row.match_top2_sets) <= 1
    for layer in found.layers:
        assert (
            0 <= layer.load_cv2 <= 7
            and 0 <= layer.entropy <= 1
            and sum(layer.load) == pytest.approx(1)
        )
    sweeps = found.sweeps
    assert [row.k for row in sweeps.k] == ([] if name == "soft_moe" else [1, 2])
    assert [row.threshold for row in sweeps.threshold] == ([0.3, 0.5] if name == "ermoe" else [])


def test_the_teacher_decides_and_is_compared(results):
    assert results["teacher_routed"].teacher_agreement == 1, "the same router"
    assert results["vmoe"].teacher_agreement is None


@pytest.mark.parametrize("seen", [{"patch": 2, "depth": 2}, {"patch": 4, "depth": 1}])
def test_a_teacher_that_guides_no_routing_is_not_compared(data, models, seen):
    """Distillation alone takes one of other patches, or too flat for the student's four blocks."""
    teacher = Vit(width=16, heads=2, **seen).build(ImageSpec.from_card(data.card))
    router, experts = {"kind": "noisy_top_k", "k": 2}, {"kind": "mlp", "number": 8}
    method = Method(router=router, experts=experts, distillation=0.5)
    subject = MeasuredModel(models["vmoe"], data, build_guide(teacher, method, (4,)))
    few = Routing(images=4, overlays=0, augmentations=(), sweeps={"k": [], "threshold": []})
    assert few.measure(subject, compute_without_cache).teacher_agreement is None


def test_where_no_token_takes_part_there_is_no_load(data):
    """A new predictor says 0 of every token, and only those above 0 take part."""
    router = {"kind": "depth", "sampling": "predictor", "router": {"kind": "noisy_top_k"}}
    moe = MoESettings.model_validate({"router": router, "experts": {"kind": "mlp", "number": 4}})
    subject = MeasuredModel(built(Vit(patch=4, width=16, depth=4, heads=2), moe, data, 1), data)
    sweeps = {"k": [1], "threshold": []}
    few = Routing(images=20, overlays=0, augmentations=("noise",), sweeps=sweeps, roles={})
    result = few.measure(subject, compute_without_cache)
    assert (result.unrouted, result.experts_per_token) == (1, 0)
    for name in ("load_cv2", "max_violation", "dead", "entropy", "border_load", "corner_load"):
        assert getattr(result, name) is None and name not in result.items, name
    assert result.layers[0].load == (0, 0, 0, 0) and result.border_mass == 1
    assert result.sweeps.k[0].load_cv2 is None and "no token chose" in result.roles.skipped
    paid = Cost(batch=2, rounds=2, images=2).collect_result(subject, compute_without_cache)
    assert paid.find("routing_gflops").value < paid.find("gflops").value


def test_a_sum_of_probabilities_is_no_threshold_of_scores():
    """The share of tokens without an expert above it is no fallback of top_p."""
    assert score_threshold(TopP(threshold=0.4)) is None
    assert score_threshold(Eigenbasis(threshold=0.4)) == 0.4


def test_numbers_by_kind(results):
    assert results["soft_moe"].tail_of_probs is None
    assert results["ermoe"].fallback is not None
    assert results["vmoe"].fallback is None
    assert results["hash_moe"].tail_of_probs == 0


def test_the_tail_is_beyond_all_pieces_that_a_token_chooses(data):
    """k = 1 of experts in two pieces are the two best; what is left of the probs is the tail."""
    moe = {"router": {"kind": "noisy_top_k", "k": 1}, "experts": {"kind": "mlp", "fine": 2}}
    vit = Vit(patch=4, width=16, depth=4, heads=2)
    model = built(vit, MoESettings.model_validate(moe), data, 2)
    images = np.array(data.test.images[:10])
    _, records = predict_in_batches(model, images)
    subject = MeasuredModel(model, data)
    layers, _ = routing.routing_metrics_by_layer(subject, records, images, SETTINGS)
    for layer, record in zip(layers, records, strict=True):
        rest = 1 - record.probs.topk(2).values.sum(dim=-1)
        assert layer.tail_of_probs == pytest.approx(float(rest.mean()), abs=1e-6)


def test_means_are_over_the_layers(results):
    found = results["ermoe"]
    assert found.match_top1 == pytest.approx(sum(row.match_top1 for row in found.layers) / 2)
    assert found.fallback == pytest.approx(sum(row.fallback for row in found.layers) / 2)


def test_the_matches_of_the_views_by_hand(models, images, results):
    model, pixels = models["vmoe"], torch.from_numpy(np.array(images))
    drawn = derived_seed("measured_views", 0)
    views = [
        make_random_views(pixels, SETTINGS.views, generator_for(drawn, 0, number))
        for number in (0, 1)
    ]
    pixels, affines = (torch.cat(both) for both in zip(*views, strict=True))
    _, records = predict_in_batches(model, pixels, 80)
    for record, layer in zip(records, results["vmoe"].layers, strict=True):
        ratios = match_ratios(*paired(record.probs, affines, model.layout, False))
        matches = [layer.match_top1, layer.match_top2_ordered, layer.match_top2_sets]
        assert matches == pytest.approx(list(ratios))


def test_the_sweep_at_the_trained_setting_is_the_model_itself(data, models, results):
    where = evenly_spaced_indices(60, 40)[evenly_spaced_indices(40, 20)]
    logits, records = predict_in_batches(models["ermoe"], data.test.images[where], 20)
    labels = torch.from_numpy(data.test.labels[where])
    found = results["ermoe"].sweeps
    for own in (found.k[1], found.threshold[1]):
        assert own.score == float((logits.argmax(1) == labels).double().mean())
        for metric in ("load_cv2", "fallback", "tail_mass"):
            layers = [getattr(layer_use_metrics(record, 0.5, 2), metric) for record in records]
            assert getattr(own, metric) == pytest.approx(sum(layers) / 2)


def test_an_augmentation_does_not_depend_on_the_others(models, images, results):
    settings = Routing(augmentations=("flip",), augmentation_images=15, batch=8)
    (alone,) = routing.augmented_rows(models["vmoe"], images, settings, compute_without_cache)
    assert alone.match_top1 == pytest.approx(results["vmoe"].augmentations[1].match_top1)


def test_two_crops_and_their_corresponding_patches(images):
    layout = TokenLayout(1, (4, 4), (12, 12))
    found = overlapping_crops(images[:8], layout, 3)
    assert found == overlapping_crops(images[:8], layout, 3)
    first, second = (parse_expert_grid(rows).flatten().tolist() for rows in found.numbers)
    assert found.views.shape == (2, 1, 12, 12)
    shared = {number for number in first if number >= 0}
    assert shared and shared == {number for number in second if number >= 0}
    assert all(number in (-1, place) for place, number in enumerate(second))
    views = draw_two_views(images[:8], CROPS, 3)
    shown = [
        view
        for view in range(8)
        if np.array_equal(
            sorted(found.views.array().tolist()),
            sorted((views.images[[view, 8 + view]].numpy() * 255).round().tolist()),
        )
    ]
    assert len(shown) == 1
    assert overlapping_crops(images, TokenLayout(0, (1, 1), (12, 12)), 3) is None
    assert overlapping_crops(images[..., None], TokenLayout(0, (2, 2, 1), (12, 12, 1)), 3) is None


@pytest.mark.parametrize("name", NAMES)
def test_items_are_one_value_an_image_whose_mean_is_the_metric(results, name):
    found = results[name]
    assert {"match_top1", "load_cv2", "entropy", "token_entropy"} <= set(found.items)
    assert ("fallback" in found.items) == (found.fallback is not None)
    assert ("tail_mass" in found.items) == (found.tail_mass is not None)
    assert ("teacher_agreement" in found.items) == (found.teacher_agreement is not None)
    for metric, text in found.items.items():
        items = decode_float_array(text)
        if metric.startswith("confidence_"):
            place = metric.removeprefix("confidence_")
            value = np.mean([getattr(layer.confidence, place) for layer in found.layers])
        else:
            value = getattr(found, metric)
        assert items.shape == (40,) and items.mean() == pytest.approx(value, abs=1e-6), metric
    for layer in found.layers:
        assert layer.items.keys() == found.items.keys()
        items = decode_float_array(layer.items["match_top1"])
        assert items.mean() == pytest.approx(layer.match_top1, abs=1e-6)
        switched = decode_float_array(layer.items["switch_fraction"])
        assert switched.mean() == pytest.approx(layer.switch_fraction, abs=1e-6)
    for row in found.augmentations:
        for metric, text in row.items.items():
            items = decode_float_array(text)
            assert items.shape == (15,) and items.mean() == pytest.approx(getattr(row, metric))


@pytest.mark.parametrize("name", ["vmoe", "ermoe"])
def test_items_tell_what_leaving_an_image_out_does(models, images, name):
    """A value that is no mean over images: n·f − (n − 1)·f without it (Tukey's pseudo-value)."""
    _, records = predict_in_batches(models[name], images, 40)
    router = models[name].experts_and_router.router
    asked = (getattr(router, "threshold", None), router.k)
    for record in records:
        by_image = use_metrics_by_image(record, *asked)
        whole = layer_use_metrics(record, *asked)
        left = [np.delete(np.arange(40), place) for place in range(40)]
        without = [layer_use_metrics(record.map_tensors(itemgetter(rows)), *asked) for rows in left]
        for metric in ("load_cv2", "entropy", "token_entropy", "fallback"):
            if getattr(whole, metric) is None:
                continue
            pseudo = [40 * getattr(whole, metric) - 39 * getattr(less, metric) for less in without]
            spread = np.std(by_image[metric].numpy())
            assert np.allclose(by_image[metric], pseudo, atol=0.25 * spread + 1e-9), metric
