"""Steadiness under noise: hand-made models whose jumps are known, and models of the digits."""

import numpy as np
import pytest
import torch
from torch import nn

from moecore.core.records import ModelOutput
from moecore.data.corruptions.draws import directions, with_noise
from moecore.data.prepared import evenly_spread
from moecore.measure import stability
from moecore.measure.base import Subject, at_once
from moecore.measure.noisy.noise import Ramp, ramp, ramp_probs
from moecore.measure.routing_metrics.expert_use import agreement, change_of_choice
from moecore.measure.routing_metrics.overlays import grid_of
from moecore.measure.stability import Stability
from moecore.nn.backbones.single_layer import SingleLayer
from moecore.nn.backbones.vit import Vit
from moecore.nn.layers.moe import MoE
from moecore.nn.predict import predictions
from tests.measure.subjects import built, digits, measured_twice

SETTINGS = Stability(
    images=30, overlays=3, sigmas=(0.2, 0.05), sigma_max=0.3, steps=6, jump=0.02, seed=5
)
MOE = {
    "router": {"kind": "noisy_top_k", "k": 2},
    "experts": {"kind": "mlp", "number": 4, "hidden_ratio": 1},
}
VIT = Vit(patch=4, width=16, depth=2, heads=2)
MODELS = {
    "vit": (VIT, MoE(**MOE, blocks=[0, 1])),
    "other": (VIT, MoE(**MOE, blocks=[1])),
    "dense": (SingleLayer(), None),
}


class Staircase(nn.Module):
    """Class 0 with probability 0.9; 0.1 once the first pixel passed an odd number of thresholds."""

    def __init__(self, *thresholds: float) -> None:
        super().__init__()
        self.thresholds = torch.tensor(thresholds)

    def forward(self, images: torch.Tensor) -> ModelOutput:
        passed = (images[:, 0, 0, :1] > self.thresholds).sum(1) % 2
        p = torch.where(passed == 0, 0.9, 0.1)
        return ModelOutput(torch.stack([p, 1 - p], 1).log())


class Slope(nn.Module):
    """A probability of class 0 that is a line in the first pixel: no jump at all."""

    def forward(self, images: torch.Tensor) -> ModelOutput:
        p = images[:, 0, 0, 0]
        return ModelOutput(torch.stack([p, 1 - p], 1).log())


def ramp_of(model: nn.Module, number: int = 1) -> Ramp:
    """Of ``number`` images whose first pixel starts at 0.4 and grows by 0.01 a step, 30 steps."""
    images = np.full((number, 1, 8, 8), 102, np.uint8)
    sigmas = [0.01 * i for i in range(31)]
    probs = ramp_probs(model, images, torch.ones(number, 1, 8, 8), sigmas, 7)
    labels = torch.zeros(number, dtype=torch.int64)
    return ramp(probs, labels, np.arange(number), sigmas, 0.1, range(number))


@pytest.mark.parametrize("thresholds", [(0.455,), (0.455, 0.535), (0.455, 0.535, 0.615)])
def test_every_step_of_a_staircase_is_one_jump(thresholds):
    found, number = ramp_of(Staircase(*thresholds)), len(thresholds)
    assert found.class_changes.value == found.jumps_mean.value == number
    assert found.total_variation.value == pytest.approx(
        0.8 * number, abs=1e-5
    ) and found.largest_step.value == pytest.approx(0.8, abs=1e-5)
    curve = found.shown[0].probability
    assert curve[:6] == pytest.approx([0.9] * 6, abs=1e-5) and curve[6] == pytest.approx(
        0.1, abs=1e-5
    ), "0.45 is below, 0.46 above"
    assert found.score == tuple(float(label == 0) for label in found.shown[0].predicted)


def test_a_slope_has_no_jump():
    found = ramp_of(Slope())
    assert found.jumps_mean.value == 0 and found.class_changes.value == 1, (
        "0.4 … 0.7 passes 0.5 once"
    )
    assert found.total_variation.value == pytest.approx(
        0.3, abs=1e-5
    ) and found.largest_step.value == pytest.approx(0.01, abs=1e-5)


def test_more_images_than_a_chunk_keep_their_order():
    images = np.linspace(60, 200, 40).astype(np.uint8)[:, None, None, None] * np.ones(
        (1, 1, 8, 8), np.uint8
    )
    drawn = torch.linspace(-1, 1, 40)[:, None, None, None].expand(40, 1, 8, 8)
    probs = ramp_probs(Slope(), images, drawn, [0.0, 0.1], 13)
    expected = torch.from_numpy(images[:, 0, 0, 0] / 255) + torch.tensor(
        [[0.0], [0.1]]
    ) * torch.linspace(-1, 1, 40)
    torch.testing.assert_close(probs[:, :, 0], expected.T.double(), atol=1e-6, rtol=1e-6)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return digits(tmp_path_factory.mktemp("stability"))


@pytest.fixture(scope="module")
def models(data):
    return {name: built(*parts, data, 3) for name, parts in MODELS.items()}


@pytest.fixture(scope="module")
def results(data, models):
    """The same models twice, measured in other batches."""
    return {
        (name, batch): measured_twice(
            stability.measure, Subject(model, data), SETTINGS.model_copy(update={"batch": batch})
        )
        for name, model in models.items()
        for batch in (256, 7)
    }


@pytest.mark.parametrize(("name", "layers"), [("vit", 2), ("other", 1), ("dense", 0)])
def test_each_sigma_has_a_score_and_each_moe_layer_its_change(results, name, layers):
    found = results[name, 256]
    assert found.images == 30 and [row.sigma for row in found.noise] == [0.05, 0.2]
    for row in found.noise:
        assert row.low <= row.score == row.correct / 30 <= row.high
        assert (
            len(row.selection_change)
            == len(row.selection_low)
            == len(row.agreement_by_layer)
            == layers
        )
        for value, low, high in zip(
            row.selection_change, row.selection_low, row.selection_high, strict=True
        ):
            assert 0 < value < 1 and low <= value <= high
    weak, strong = found.noise
    assert all(a < b for a, b in zip(weak.selection_change, strong.selection_change, strict=True))


def test_a_dense_model_has_a_ramp_and_no_routing(results):
    found = results["dense", 256]
    assert found.overlays == ()
    assert all(row.agreement is None and row.selection_change == () for row in found.noise)
    assert len(found.ramp.sigmas) == 7 and found.ramp.total_variation.value > 0
    assert len(found.ramp.shown) == 3


def test_routing_values_are_those_of_the_records(data, models, results):
    where = evenly_spread(60, 30)
    images = data.test.images[where]
    _, clean = predictions(models["vit"], images, 30)
    pixels = with_noise(images, directions(where, (1, 12, 12), 5), 0.05)
    _, noisy = predictions(models["vit"], pixels, 30)
    row = results["vit", 256].noise[0]
    assert row.selection_change == pytest.approx(change_of_choice(clean, noisy))
    same = [agreement(a.probs, b.probs) for a, b in zip(clean, noisy, strict=True)]
    assert row.agreement_by_layer == pytest.approx(same) and row.agreement == pytest.approx(
        sum(same) / 2
    )


@pytest.mark.parametrize("name", list(MODELS))
def test_ramps_are_sums_over_their_steps(results, name):
    ramp = results[name, 256].ramp
    assert (
        ramp.sigmas == pytest.approx([0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3])
        and ramp.threshold == 0.02
    )
    assert [row.index for row in ramp.shown] == [0, 28, 59] and len(ramp.mean_probability) == len(
        ramp.score
    ) == 7
    for measure in ("jumps_mean", "class_changes", "total_variation", "largest_step"):
        found = getattr(ramp, measure)
        assert found.low <= found.value <= found.high
    assert 0 < ramp.largest_step.value <= ramp.total_variation.value and ramp.jumps_mean.value <= 6


@pytest.mark.parametrize("name", list(MODELS))
def test_the_batch_changes_nothing(results, name):
    one, other = results[name, 256], results[name, 7]
    assert one.overlays == other.overlays
    for a, b in zip(one.noise, other.noise, strict=True):
        assert a.correct == b.correct and a.selection_change == pytest.approx(
            b.selection_change, abs=1e-9
        )
    assert one.ramp.mean_probability == pytest.approx(other.ramp.mean_probability, abs=1e-5)
    assert one.ramp.class_changes == other.ramp.class_changes


def test_every_method_saw_the_same_noisy_images(data, results):
    vit, other = results["vit", 256].overlays, results["other", 256].overlays
    assert [row.sigma for row in vit] == [0, 0.05, 0.2] and [row.pixels for row in vit] == [
        row.pixels for row in other
    ]
    clean, noisy = vit[0].images(), vit[2].images()
    assert (
        clean.shape == noisy.shape == (3, 1, 12, 12)
        and 10 < np.abs(clean.astype(int) - noisy).mean() < 60
    )
    assert len(vit[0].grids) == 2 and grid_of(vit[0].grids[0][0]).shape == (3, 3)
    assert np.array_equal(clean, data.test.images[[0, 28, 59]])


def test_no_overlays_where_none_are_wanted(data, models):
    settings = SETTINGS.model_copy(update={"overlays": 0})
    found = stability.measure(Subject(models["vit"], data), settings, at_once)
    assert found.overlays == ()
    assert found.ramp.shown == ()
