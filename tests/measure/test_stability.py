import numpy as np
import pytest
import torch
from torch import nn

from moecore import ModelOutput, Target, UserError, predict_in_batches
from moecore.backbones import SingleLayer, Vit
from moecore.core.arrays_as_text import decode_base64_zlib
from moecore.data.corruptions import add_noise, standard_normal_noise
from moecore.data.prepared import evenly_spaced_indices
from moecore.measure import explorer, stability, values
from moecore.measure.routing_metrics import epoch_routing, layer_metrics
from moecore.measure.routing_metrics.expert_profiles import Overlays, parse_expert_grid
from moecore.measure.routing_metrics.two_view_agreement import TwoViewAugmentation, draw_two_views
from moecore.testing import check_measurement
from moecore.testing.check_helpers import CLASSES
from tests.measure import subjects
from tests.measure.subjects import FEW, MOVED, OF_VOLUMES, compute_without_cache, images, moe

SETTINGS = stability.Stability(images=30, overlays=3, sigmas=(0.2, 0.05), steps=4)
VIT = Vit(patch=4, width=16, depth=2, heads=2)
MODELS = {"vit": (VIT, subjects.top_k_mlps(k=2))}
MODELS |= {"other": (VIT, subjects.top_k_mlps(k=2, blocks=(1,))), "dense": (SingleLayer(), None)}


class Staircase(nn.Module):
    """Class 0 with probability 0.9; 0.1 once the first pixel passed an odd number of thresholds."""

    def __init__(self, *thresholds: float) -> None:
        super().__init__()
        self.thresholds = torch.tensor(thresholds)

    def forward(self, images: torch.Tensor) -> ModelOutput:
        p = torch.where(((images[:, 0, 0, :1] > self.thresholds).sum(1) % 2) == 0, 0.9, 0.1)
        return ModelOutput(torch.stack([p, 1 - p], 1).log())


class Slope(nn.Module):
    """A probability of class 0 that is a line in the first pixel: no jump at all."""

    def forward(self, images: torch.Tensor) -> ModelOutput:
        p = images[:, 0, 0, 0]
        return ModelOutput(torch.stack([p, 1 - p], 1).log())


def ramp_of(model: nn.Module, number: int = 1) -> values.Found:
    """Of ``number`` images whose first pixel starts at 0.4 and grows by 0.01 a step, 30 steps."""
    images = np.full((number, 1, 8, 8), 102, np.uint8)
    sigmas = [0.01 * i for i in range(31)]
    probs = stability.class_probs_by_sigma(model, images, torch.ones(number, 1, 8, 8), sigmas, 7)
    labels = torch.zeros(number, dtype=torch.int64)
    out = values.Values(stability.Stability.metrics, CLASSES, compute_without_cache)
    stability.put_ramps(probs, labels, np.arange(number), sigmas, range(number), out)
    return out.found()


@pytest.mark.parametrize("thresholds", [(0.455,), (0.455, 0.535), (0.455, 0.535, 0.615)])
def test_every_step_of_a_staircase_is_one_jump(thresholds):
    found, number = ramp_of(Staircase(*thresholds)), len(thresholds)
    assert found.find("jumps").value == number
    curve = found.facts["ramp"]["shown"][0]["probability"]
    assert curve[:7] == pytest.approx([0.9] * 6 + [0.1], abs=1e-5), "0.45 is below, 0.46 above"


def test_a_slope_has_no_jump_and_chunks_keep_their_order():
    found = ramp_of(Slope())
    assert found.find("jumps").value == 0
    predicted = found.facts["ramp"]["shown"][0]["predicted"]
    assert np.abs(np.diff(predicted)).sum() == 1, "0.4 … 0.7 passes 0.5 once"
    grey, noise = np.linspace(60, 200, 40).astype(np.uint8), torch.linspace(-1, 1, 40)
    images = np.broadcast_to(grey[:, None, None, None], (40, 1, 8, 8))
    drawn = noise[:, None, None, None].expand(40, 1, 8, 8)
    probs = stability.class_probs_by_sigma(Slope(), images, drawn, [0.0, 0.1], 13)
    expected = torch.from_numpy(grey / 255) + torch.tensor([[0.0], [0.1]]) * noise
    torch.testing.assert_close(probs[:, :, 0], expected.T.double(), atol=1e-6, rtol=1e-6)


@pytest.fixture(scope="module")
def models(data):
    return {name: subjects.built(*parts, data, 3) for name, parts in MODELS.items()}


@pytest.mark.parametrize("name", ["vit", "other", "dense"])
def test_each_sigma_has_a_score_and_a_change(results, name):
    found = results[name]
    assert list(found.curve("noise_score", "sigma")) == [0.05, 0.2]
    for value in found.all("noise_score"):
        assert value.low <= value.value <= value.high
    assert len(found.find("noise_score").item_values) == 30
    changes = list(found.curve("noise_selection_change", "sigma").values())
    assert changes == sorted(changes) and all(0 < value < 1 for value in changes)
    has_routing = name != "dense"
    assert bool(changes) == bool(found.all("noise_agreement")) == has_routing
    assert bool(found.facts["overlays"]) == has_routing
    ramp, jumps = found.facts["ramp"], found.find("jumps")
    assert ramp["sigmas"] == pytest.approx([0, 0.05, 0.1, 0.15, 0.2])
    assert [row["index"] for row in ramp["shown"]] == [0, 28, 59]
    assert jumps.low <= jumps.value <= jumps.high <= 4


def test_routing_values_are_those_of_the_records(data, models, results):
    where = evenly_spaced_indices(60, 30)
    images = data.test.images[where]
    _, clean = predict_in_batches(models["vit"], images, 30)
    pixels = add_noise(images, standard_normal_noise(where, (1, 12, 12), 0), 0.05)
    _, noisy = predict_in_batches(models["vit"], pixels, 30)
    names = ("noise_selection_change", "noise_agreement")
    change, agreement = (results["vit"].find(name, sigma=0.05).value for name in names)
    layers = layer_metrics.compute_choice_iou_drop(clean, noisy)
    assert change == pytest.approx(np.mean([float(layer.mean()) for layer in layers]))
    same = [float(layer.mean()) for layer in layer_metrics.expert_agreement(clean, noisy)]
    assert agreement == pytest.approx(sum(same) / 2)


def test_every_method_saw_the_same_noisy_images(data, results):
    rows = [[row["overlays"] for row in results[n].facts["overlays"]] for n in ("vit", "other")]
    vit, other = (list(map(Overlays.model_validate, one)) for one in rows)
    assert [row["sigma"] for row in results["vit"].facts["overlays"]] == [0, 0.05, 0.2]
    assert [row.pixels for row in vit] == [row.pixels for row in other]
    clean, noisy = vit[0].images(), vit[2].images()
    assert clean.shape == noisy.shape == (3, 1, 12, 12)
    assert 10 < np.abs(clean.astype(int) - noisy).mean() < 60
    assert len(vit[0].grids) == 2 and parse_expert_grid(vit[0].grids[0][0]).shape == (3, 3)
    assert np.array_equal(clean, data.test.images[[0, 28, 59]])


@pytest.fixture(scope="module")
def model():
    return subjects.subject(images(), moe())


@pytest.fixture(scope="module")
def found(model):
    return explorer.ExplorerData.model_validate(check_measurement(FEW, model).facts)


def arrays(text: str, images: int, tokens: int, experts: int) -> tuple[np.ndarray, ...]:
    """The three arrays of a layer, read one number at a time."""
    data = decode_base64_zlib(text)
    size = 1 if experts <= 255 else 2
    kept = min(experts, 8)
    all = images * tokens
    end = all * size * (kept + 1)
    numbers = [int.from_bytes(data[i : i + size], "little") for i in range(0, end, size)]
    shape = (images, tokens, kept)
    first, second = np.array(numbers[:all]), np.array(numbers[all:])
    third = np.array(list(data[end:])).reshape(shape)
    return first.reshape(images, tokens), second.reshape(shape), third


def test_the_clean_images_are_those_of_the_records(model, found):
    where = epoch_routing.explorer_image_indices(model.data, 5)
    assert found.images == tuple(where) == (0, 25, 12, 37, 6)
    assert found.labels == tuple((float(model.data.test.labels[place]),) for place in where)
    assert (found.special, found.grid) == (1, (3, 3))
    clean = found.shown[0]
    assert np.array_equal(clean.picture.array(), model.data.test.images[where])
    prediction, records = predict_in_batches(model.model, model.data.test.images[where], 5)
    probs = prediction.softmax(-1)
    for image in range(5):
        assert clean.trace.answers[image][0] == int(probs[image].argmax())
        assert sum(clean.trace.values[image]) == pytest.approx(1, abs=2e-4), "all three classes"
    for text, record in zip(clean.trace.layers, records, strict=True):
        check_layer(text, record)


def check_layer(text, record):
    number, tokens, experts = record.probs.shape
    best, ranked, marks = arrays(text, number, tokens, experts)
    for image in range(number):
        for token in range(tokens):
            assert best[image, token] == int(record.combine[image, token].argmax())
            assert ranked[image, token, 0] == best[image, token]
            assert sorted(ranked[image, token]) == list(range(experts))
            for expert, mark in zip(ranked[image, token], marks[image, token], strict=True):
                share = float(record.probs[image, token, expert])
                assert mark % 128 == pytest.approx(127 * share, abs=0.5001)
                assert (mark >= 128) == bool(record.chosen[image, token, expert])


def test_noise_and_attacks_are_those_of_the_other_measurements(model, found):
    where = epoch_routing.explorer_image_indices(model.data, 5)
    clean = model.data.test.images[where]
    labels = torch.from_numpy(model.data.test.labels[where])
    by_label = {one.label: one for one in found.shown}
    noisy = add_noise(clean, standard_normal_noise(np.array(where), (1, 12, 12), 0), 0.4)
    attacked = Target(model.model, model.data.task, clean, labels, 3).attacked(FEW.attack, 0.1)
    for label, pixels in (("σ = 0.4", noisy), ("ε = 25.5/255", attacked)):
        _, records = predict_in_batches(model.model, pixels, 5)
        for text, record in zip(by_label[label].trace.layers, records, strict=True):
            check_layer(text, record)
    kinds = [one.kind for one in found.shown]
    assert kinds == ["clean", *["noise"] * 4, *["attack"] * 2, *["augmentation"] * 3]
    assert 0 < np.abs(by_label["ε = 25.5/255"].picture.array().astype(int) - clean).max() <= 26


def test_patches_of_moved_images_know_where_they_were(model, found):
    by_label = {one.label: one for one in found.shown}
    assert by_label["brightness"].origins is None and by_label["σ = 0.4"].origins is None
    moved = np.frombuffer(decode_base64_zlib(by_label["moved"].origins), "<u2").reshape(5, 9)
    clean = model.data.test.images[list(found.images)]
    views = draw_two_views(clean, TwoViewAugmentation.model_validate(MOVED), 0, *b"moved")
    outside = 0
    for image in range(5):
        back = np.linalg.inv(views.affines[image].numpy())
        for patch in range(9):
            row, column = divmod(patch, 3)
            y, x, _ = back @ [4 * row + 2, 4 * column + 2, 1]
            inside = 0 <= y < 12 and 0 <= x < 12
            assert moved[image, patch] == 3 * int(y // 4) + int(x // 4) if inside else 65535
            outside += not inside
    assert 0 < outside < 30


def test_load_classes_and_favourites_by_slow_counts(model, found):
    test = model.data.test
    where = np.unique(np.linspace(0, 49, 40).astype(int))
    _, records = predict_in_batches(model.model, test.images[where], 50)
    for layer, record in zip(found.layers, records, strict=True):
        choices = record.chosen.sum(dim=(0, 1))
        for expert, use in enumerate(layer.experts):
            assert use.load == pytest.approx(float(choices[expert] / choices.sum()), abs=1e-5)
            shares = dict(use.classes)
            for name in range(3):
                rows = np.flatnonzero(test.labels[where] == name)
                own = int(record.chosen[rows][..., expert].sum())
                assert shares.get(name, 0) == pytest.approx(own / int(choices[expert]), abs=1e-4)
            check_favourites(use, expert, record, where)
        assert layer.crops.shape == (sum(len(use.favourites) for use in layer.experts), 1, 8, 8)


def check_favourites(use, expert, record, where):
    every = []
    for row, place in enumerate(where):
        chosen = [patch for patch in range(9) if record.chosen[row, 1 + patch, expert]]
        patches = [(float(record.probs[row, 1 + patch, expert]), patch) for patch in chosen]
        if patches:
            share, patch = max(patches, key=lambda one: one[0])
            every.append((-share, row, int(place), patch))
    expected = [(place, patch, -share) for share, _, place, patch in sorted(every)[:12]]
    assert [(one.image, one.patch) for one in use.favourites] == [one[:2] for one in expected]
    for one, (_, _, share) in zip(use.favourites, expected, strict=True):
        assert one.probability == pytest.approx(share, abs=1e-4)


def test_a_crop_shows_the_patch_in_its_middle(model, found):
    layer = found.layers[0]
    crops = layer.crops.array()
    first = layer.experts[0].favourites[0]
    row, column = divmod(first.patch, 3)
    own = model.data.test.images[first.image, 0][4 * row : 4 * row + 4, 4 * column : 4 * column + 4]
    assert np.array_equal(crops[0, 0, 2:6, 2:6], own)


def test_four_hundred_experts_keep_the_first_eight():
    model = subjects.subject(images(), moe(400))
    found = FEW.explore(model, compute_without_cache)
    _, records = predict_in_batches(model.model, model.data.test.images[list(found.images)], 5)
    for text, record in zip(found.shown[0].trace.layers, records, strict=True):
        best, ranked, marks = arrays(text, 5, 10, 400)
        assert np.array_equal(best, record.combine.argmax(-1).numpy())
        assert np.array_equal(ranked[..., 0], best)
        assert (np.array(marks) >= 128).sum() == 5 * 10 * 2, "both chosen ones are among them"
    layer = found.layers[0]
    assert len(layer.experts) == 400
    assert max(len(use.favourites) for use in layer.experts) <= 2, "800 crops a layer at most"
    idle = [use for use in layer.experts if not use.load]
    assert idle and all(use.favourites == () and use.classes == () for use in idle)


def test_large_images_are_shown_smaller_and_of_a_thousand_classes_the_largest():
    data = images(1000, size=200, channels=3, number=6)
    found = FEW.explore(subjects.subject(data, moe(), patch=50), compute_without_cache)
    assert found.shown[0].picture.shape == (5, 3, 96, 96)
    assert found.layers[0].crops.shape[1:] == (3, 24, 24)
    assert found.shown[0].picture.array().mean() == pytest.approx(data.test.images[:].mean(), abs=2)
    assert all(len(row) == 3 for row in found.shown[0].trace.answers)
    assert all(len(use.classes) <= 5 for layer in found.layers for use in layer.experts)


def test_volumes(tmp_path):
    model = subjects.volumes(tmp_path)
    with pytest.raises(UserError, match="explorer.augmentations: found brightness"):
        FEW.explore(model, compute_without_cache)
    asked = OF_VOLUMES.model_copy(update={"images": 24})
    found = explorer.ExplorerData.model_validate(check_measurement(asked, model).facts)
    assert len(found.images) == 6 and found.grid == (4, 4, 4)
    assert found.shown[0].picture.shape == (6, 1, 16, 16, 16)
    assert [one.picture for one in found.shown[1:]] == [None] * 8
    ages = model.data.test.labels[list(found.images)]
    assert found.labels == tuple((float(age),) for age in ages)
    prediction, _ = predict_in_batches(model.model, model.data.test.images[list(found.images)], 6)
    expected = tuple((pytest.approx(float(value), abs=1e-3),) for value in prediction)
    assert found.shown[0].trace.values == expected
    assert all(use.classes == () for layer in found.layers for use in layer.experts)
    assert found.layers[0].crops.shape[1:] == (1, 8, 8)
