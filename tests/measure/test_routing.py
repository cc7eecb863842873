from operator import itemgetter

import numpy as np
import pytest
import torch

from moecore.core.streams import derived_seed, generator_for
from moecore.data.prepared import evenly_spaced_indices
from moecore.data.views.random_views import make_random_views
from moecore.measure import Cost, Routing, routing
from moecore.measure.routing_metrics import layer_metrics
from moecore.measure.routing_metrics.expert_profiles import (
    TWO_CROPS,
    draw_crop_pair,
    parse_expert_grid,
)
from moecore.measure.routing_metrics.interventions import get_router_threshold_or_none
from moecore.measure.routing_metrics.two_view_agreement import draw_two_views
from moecore.nn.backbones.vit import Vit
from moecore.nn.predict import predict_in_batches
from moecore.parts import ImageSpec, MeasuredModel, MoESettings, TokenLayout, Values
from moecore.routers import Eigenbasis, TopP
from moecore.testing import check_measurement
from moecore.training.method import Method, initialise_guide
from tests.measure.subjects import built, compute_without_cache, match_ratios
from tests.methods import tiny
from tests.nn.test_dispatch import paired

SETTINGS = Routing.model_validate(
    {"images": 40, "batch": 30, "overlays": 1, "views": {"crop": {"scale": [0.7, 1.0]}}}
    | {"augmentations": ["noise", "flip", {"name": "mine", "views": {"shift": 1}, "noise": 0.02}]}
    | {"sweeps": {"k": [1, 2, 9], "threshold": [0.3, 0.5], "images": 20}, "augmentation_images": 15}
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


def number(found, metric, **at):
    value = found.find(metric, **at)
    return value and value.value


@pytest.mark.parametrize("name", NAMES)
def test_every_method_has_every_measurement(results, name):
    found = results[name]
    layers = [("_layer", {"layer": layer}) for layer in (1, 2)]
    rows = [("_augmented", {"augmentation": kind}) for kind in ("noise", "flip", "mine")]
    for suffix, at in (*layers, ("", {}), *rows):
        names = [f"match_top{name}{suffix}" for name in ("1", "2_ordered", "2_sets")]
        first, ordered, sets = (number(found, name, **at) for name in names)
        assert 0 <= ordered <= min(first, sets) <= 1
    for load, (_, at) in zip(found.facts["load"], layers, strict=True):
        assert 0 <= number(found, "load_cv2_layer", **at) <= 7
        assert 0 <= number(found, "entropy_layer", **at) <= 1 and sum(load) == pytest.approx(1)
    assert list(found.curve("score_k", "k")) == ([] if name == "soft_moe" else [1, 2])
    thresholds = list(found.curve("score_threshold", "threshold"))
    assert thresholds == ([0.3, 0.5] if name == "ermoe" else [])


@pytest.mark.parametrize("seen", [{"patch": 2, "depth": 2}, {"patch": 4, "depth": 1}])
def test_a_teacher_that_guides_no_routing_is_not_compared(data, models, seen):
    """Distillation alone takes one of other patches, or too flat for the student's four blocks."""
    teacher = Vit(width=16, heads=2, **seen).build(ImageSpec.from_card(data.card))
    router, experts = {"kind": "noisy_top_k", "k": 2}, {"kind": "mlp", "number": 8}
    method = Method(router=router, experts=experts, distillation=0.5)
    subject = MeasuredModel(models["vmoe"], data, initialise_guide(teacher, method, (4,)))
    few = Routing(images=4, overlays=0, augmentations=(), sweeps={"k": [], "threshold": []})
    assert few.collect_result(subject, compute_without_cache).find("teacher_agreement") is None


def test_where_no_token_takes_part_there_is_no_load(data):
    """A new predictor says 0 of every token, and only those above 0 take part."""
    router = {"kind": "depth", "sampling": "predictor", "router": {"kind": "noisy_top_k"}}
    moe = MoESettings.model_validate({"router": router, "experts": {"kind": "mlp", "number": 4}})
    subject = MeasuredModel(built(Vit(patch=4, width=16, depth=4, heads=2), moe, data, 1), data)
    sweeps = {"k": [1], "threshold": []}
    few = Routing(images=20, overlays=0, augmentations=("noise",), sweeps=sweeps, roles={})
    result = few.collect_result(subject, compute_without_cache)
    assert number(result, "unrouted") == 1 and number(result, "experts_per_token") == 0
    for name in ("load_cv2", "max_violation", "dead", "entropy", "border_load", "corner_load"):
        assert number(result, name) is None, name
    assert result.facts["load"][0] == [0, 0, 0, 0] and number(result, "border_mass") == 1
    assert number(result, "score_k", k=1) is not None and number(result, "load_cv2_k", k=1) is None
    assert "no token chose" in result.facts["roles"]["skipped"]
    paid = Cost(batch=2, rounds=2, images=2).collect_result(subject, compute_without_cache)
    assert paid.find("routing_gflops").value < paid.find("gflops").value


def test_numbers_by_kind(results):
    """A share of tokens without an expert above a sum of probabilities is no fallback of top_p."""
    assert get_router_threshold_or_none(TopP(threshold=0.4)) is None
    assert get_router_threshold_or_none(Eigenbasis(threshold=0.4)) == 0.4
    assert number(results["soft_moe"], "tail_of_probs") is None
    assert number(results["ermoe"], "fallback") is not None
    assert number(results["vmoe"], "fallback") is None
    assert number(results["hash_moe"], "tail_of_probs") == 0
    for name in ("match_top1", "fallback"):
        layers = results["ermoe"].curve(f"{name}_layer", "layer").values()
        assert number(results["ermoe"], name) == pytest.approx(sum(layers) / 2)
    assert number(results["teacher_routed"], "teacher_agreement") == 1, "the same router"
    assert number(results["vmoe"], "teacher_agreement") is None


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
        assert layer["tail_of_probs"] == pytest.approx(float(rest.mean()), abs=1e-6)


def test_the_matches_of_the_views_by_hand(models, images, results):
    model, pixels = models["vmoe"], torch.from_numpy(np.array(images))
    drawn = derived_seed("measured_views", 0)
    generators = (generator_for(drawn, 0, number) for number in (0, 1))
    views = [make_random_views(pixels, SETTINGS.views, each) for each in generators]
    pixels, affines = (torch.cat(both) for both in zip(*views, strict=True))
    _, records = predict_in_batches(model, pixels, 80)
    for layer, record in enumerate(records, 1):
        ratios = match_ratios(*paired(record.probs, affines, model.layout, False))
        names = ("match_top1_layer", "match_top2_ordered_layer", "match_top2_sets_layer")
        matches = [number(results["vmoe"], name, layer=layer) for name in names]
        assert matches == pytest.approx(list(ratios))


def test_the_sweep_at_the_trained_setting_is_the_model_itself(data, models, results):
    where = evenly_spaced_indices(60, 40)[evenly_spaced_indices(40, 20)]
    logits, records = predict_in_batches(models["ermoe"], data.test.images[where], 20)
    labels = torch.from_numpy(data.test.labels[where])
    score = float((logits.argmax(1) == labels).double().mean())
    layers = [layer_metrics.measure_layer_use(record, 0.5, 2) for record in records]
    for over, at in (("k", {"k": 2}), ("threshold", {"threshold": 0.5})):
        assert number(results["ermoe"], f"score_{over}", **at) == score
        for metric in ("load_cv2", "fallback", "tail_mass"):
            mean = sum(layer[metric] for layer in layers) / 2
            assert number(results["ermoe"], f"{metric}_{over}", **at) == pytest.approx(mean)


def test_an_augmentation_does_not_depend_on_the_others(models, images, results):
    settings = Routing(augmentations=("flip",), augmentation_images=15, batch=8)
    alone = Values(Routing.metrics, models["vmoe"].image.task, compute_without_cache)
    routing.put_augmented_matches(models["vmoe"], images, settings, alone)
    views = {"metric": "match_top1_augmented", "augmentation": "flip"}
    flipped = (number(one, **views) for one in (alone.found(), results["vmoe"]))
    assert next(flipped) == pytest.approx(next(flipped))


def test_two_crops_and_their_corresponding_patches(images):
    layout = TokenLayout(1, (4, 4), (12, 12))
    found = draw_crop_pair(images[:8], layout, 3)
    assert found == draw_crop_pair(images[:8], layout, 3)
    first, second = (parse_expert_grid(rows).flatten().tolist() for rows in found.numbers)
    assert found.views.shape == (2, 1, 12, 12)
    shared = {number for number in first if number >= 0}
    assert shared and shared == {number for number in second if number >= 0}
    assert all(number in (-1, place) for place, number in enumerate(second))
    pixels = (draw_two_views(images[:8], TWO_CROPS, 3).images.numpy() * 255).round()
    pairs = [sorted(pixels[[view, 8 + view]].tolist()) for view in range(8)]
    assert pairs.count(sorted(found.views.array().tolist())) == 1
    assert draw_crop_pair(images, TokenLayout(0, (1, 1), (12, 12)), 3) is None
    assert draw_crop_pair(images[..., None], TokenLayout(0, (2, 2, 1), (12, 12, 1)), 3) is None


@pytest.mark.parametrize("name", NAMES)
def test_items_are_one_value_an_image_whose_mean_is_the_metric(results, name):
    found = results[name]
    having = {(one.metric, *one.at.values()): one for one in found.values if one.items}
    assert {"match_top1", "load_cv2", "entropy", "token_entropy"} <= {key[0] for key in having}
    for metric in ("fallback", "tail_mass", "teacher_agreement"):
        assert ((metric,) in having) == (found.find(metric) is not None)
    for one in having.values():
        assert one.item_values.shape == (15 if "augmentation" in one.at else 40,)
        assert one.item_values.mean() == pytest.approx(one.value, abs=1e-6), one.metric
    for layer in (1, 2):
        assert {("match_top1_layer", layer), ("confidence_others_layer", layer)} <= having.keys()


@pytest.mark.parametrize("name", ["vmoe", "ermoe"])
def test_items_tell_what_leaving_an_image_out_does(models, images, name):
    """A value that is no mean over images: n·f − (n − 1)·f without it (Tukey's pseudo-value)."""
    _, records = predict_in_batches(models[name], images, 40)
    router = models[name].experts_and_router.router
    asked = (getattr(router, "threshold", None), router.k)
    for record in records:
        by_image = layer_metrics.measure_layer_use_by_image(record, *asked)
        whole = layer_metrics.measure_layer_use(record, *asked)
        left = [np.delete(np.arange(40), place) for place in range(40)]
        without = [
            layer_metrics.measure_layer_use(record.map_tensors(itemgetter(rows)), *asked)
            for rows in left
        ]
        for metric in ("load_cv2", "entropy", "token_entropy", "fallback"):
            if metric not in whole:
                continue
            pseudo = [40 * whole[metric] - 39 * less[metric] for less in without]
            spread = np.std(by_image[metric].numpy())
            assert np.allclose(by_image[metric], pseudo, atol=0.25 * spread + 1e-9), metric
