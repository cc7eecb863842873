"""The stage ``stability``: hand-made models whose jumps are known, and end to end on the digits for MoE and dense models."""

import json

import numpy as np
import pytest
import torch
from torch import nn

from moecore.artifacts import load_model, save_model
from moecore.backbones.image import ImageSpec
from moecore.backbones.single_layer import SingleLayer
from moecore.backbones.vit import Vit
from moecore.data.corrupt_draws import directions, with_noise
from moecore.data.digits import Digits
from moecore.data.prepared import Prepared, spread
from moecore.evaluation.overlays import grid_of, pixels_of
from moecore.evaluation.predict import predictions
from moecore.evaluation.routing import agreement, change_of_choice
from moecore.layers.moe import MoE
from moecore.records import ModelOutput
from stages import stability as stage

PARAMS = "stability: {images: 30, overlays: 3, sigmas: [0.2, 0.05], sigma_max: 0.3, steps: 6, jump: 0.02, batch: %d, seed: 5}\n"
MOE = {"router": {"kind": "noisy_top_k", "k": 2}, "experts": {"kind": "mlp", "number": 4, "hidden_ratio": 1}}
VIT = Vit(patch=4, width=16, depth=2, heads=2)
MODELS = {"vit": (VIT, MoE(**MOE, blocks=[0, 1])), "other": (VIT, MoE(**MOE, blocks=[1])), "dense": (SingleLayer(), None)}


class Staircase(nn.Module):
    """Class 0 with probability 0.9, and 0.1 once the first pixel has passed an odd number of thresholds."""

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


def ramp_of(model: nn.Module, number: int = 1) -> dict:
    """The ramp of ``number`` images whose first pixel starts at 0.4 and grows by 0.01 a step, 30 steps."""
    images, drawn = np.full((number, 1, 8, 8), 102, np.uint8), torch.ones(number, 1, 8, 8)
    sigmas = [0.01 * i for i in range(31)]
    probs = stage.ramp_probs(model, images, drawn, sigmas, 7)
    return stage.ramp(probs, torch.zeros(number, dtype=torch.int64), np.arange(number), sigmas, stage.Stability(images=number))


@pytest.mark.parametrize("thresholds", [(0.455,), (0.455, 0.535), (0.455, 0.535, 0.615)])
def test_every_step_of_a_staircase_is_one_jump(thresholds):
    found, number = ramp_of(Staircase(*thresholds)), len(thresholds)
    assert found["class_changes"]["value"] == found["jumps_mean"]["value"] == number
    assert found["total_variation"]["value"] == pytest.approx(0.8 * number, abs=1e-5) and found["largest_step"]["value"] == pytest.approx(0.8, abs=1e-5)
    curve = found["shown"][0]["probability"]
    assert curve[:6] == pytest.approx([0.9] * 6, abs=1e-5) and curve[6] == pytest.approx(0.1, abs=1e-5), "0.45 is below, 0.46 above"
    assert found["accuracy"] == [float(label == 0) for label in found["shown"][0]["predicted"]]


def test_a_slope_has_no_jump():
    found = ramp_of(Slope())
    assert found["jumps_mean"]["value"] == 0 and found["class_changes"]["value"] == 1, "0.4 … 0.7 passes 0.5 once"
    assert found["total_variation"]["value"] == pytest.approx(0.3, abs=1e-5) and found["largest_step"]["value"] == pytest.approx(0.01, abs=1e-5)


def test_more_images_than_a_chunk_keep_their_order():
    images = np.linspace(60, 200, 40).astype(np.uint8)[:, None, None, None] * np.ones((1, 1, 8, 8), np.uint8)
    drawn = torch.linspace(-1, 1, 40)[:, None, None, None].expand(40, 1, 8, 8)
    probs = stage.ramp_probs(Slope(), images, drawn, [0.0, 0.1], 13)
    expected = torch.from_numpy(images[:, 0, 0, 0] / 255) + torch.tensor([[0.0], [0.1]]) * torch.linspace(-1, 1, 40)
    torch.testing.assert_close(probs[:, :, 0], expected.T.double(), atol=1e-6, rtol=1e-6)


def loaded(folder):
    """Building a model draws its first weights; what is tested is that the measuring draws nothing."""
    with torch.random.fork_rng():
        return load_model(folder)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The stage ran for every model, in this folder."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("stability")
        patch.chdir(folder)
        patch.setenv("MOECORE_TRACKING", "off")
        patch.delenv("MOECORE_PARAMS", raising=False)
        patch.setenv("MOECORE_THREADS", "1")
        patch.setattr(stage, "load_model", loaded)
        (folder / "artifacts/data/pretrain").mkdir(parents=True)
        image = ImageSpec.from_card(Digits(size=12, train_limit=50, test_limit=60).prepare(folder / "artifacts/data/pretrain"))
        for name, (backbone, moe) in MODELS.items():
            for seed, batch in ((0, 256), (1, 7)):  # the same model twice, measured in other batches
                (folder / "params.yaml").write_text(PARAMS % batch)
                target = folder / "artifacts/pretrain" / name / str(seed)
                target.mkdir(parents=True)
                torch.manual_seed(1)
                model = backbone.build(image, moe)
                for parameter in model.parameters():
                    parameter.data *= 3  # a router that prefers some experts
                save_model(target, model)
                before = torch.get_rng_state()
                stage.stability("pretrain", name, seed)
                assert torch.equal(torch.get_rng_state(), before)
        yield folder


def measured(folder, name: str, seed: int = 0) -> dict:
    return json.loads((folder / f"artifacts/measured/stability/pretrain/{name}/{seed}.json").read_text())


@pytest.mark.parametrize(("name", "layers"), [("vit", 2), ("other", 1), ("dense", 0)])
def test_each_sigma_has_accuracy_and_each_moe_layer_its_change(results, name, layers):
    found = measured(results, name)
    assert found["images"] == 30 and [row["sigma"] for row in found["noise"]] == [0.05, 0.2]
    for row in found["noise"]:
        assert row["low"] <= row["accuracy"] == row["correct"] / 30 <= row["high"]
        assert len(row["selection_change"]) == len(row["selection_low"]) == len(row["agreement_by_layer"]) == layers
        for value, low, high in zip(row["selection_change"], row["selection_low"], row["selection_high"], strict=True):
            assert 0 < value < 1 and low <= value <= high
    weak, strong = found["noise"]
    assert all(a < b for a, b in zip(weak["selection_change"], strong["selection_change"], strict=True))


def test_a_dense_model_has_a_ramp_and_no_routing(results):
    found = measured(results, "dense")
    assert found["overlays"] == [] and all(row["agreement"] is None and row["selection_change"] == [] for row in found["noise"])
    assert len(found["ramp"]["sigmas"]) == 7 and found["ramp"]["total_variation"]["value"] > 0
    figures = results / "artifacts/history/stability/pretrain/dense/0/figures"
    assert [file.name for file in figures.iterdir()] == ["noise_ramp.png"]


def test_routing_values_are_those_of_the_records(results):
    model = load_model(results / "artifacts/pretrain/vit/0")
    test, where = Prepared.open(results / "artifacts/data/pretrain").test, spread(60, 30)
    _, clean = predictions(model, test.images[where], 30)
    _, noisy = predictions(model, with_noise(test.images[where], directions(where, (1, 12, 12), 5), 0.05), 30)
    row = measured(results, "vit")["noise"][0]
    assert row["selection_change"] == pytest.approx(change_of_choice(clean, noisy))
    same = [agreement(a.probs, b.probs) for a, b in zip(clean, noisy, strict=True)]
    assert row["agreement_by_layer"] == pytest.approx(same) and row["agreement"] == pytest.approx(sum(same) / 2)


@pytest.mark.parametrize("name", list(MODELS))
def test_ramps_are_sums_over_their_steps(results, name):
    ramp = measured(results, name)["ramp"]
    assert ramp["sigmas"] == pytest.approx([0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3]) and ramp["threshold"] == 0.02
    assert [row["index"] for row in ramp["shown"]] == [0, 28, 59] and len(ramp["mean_probability"]) == len(ramp["accuracy"]) == 7
    for measure in ("jumps_mean", "class_changes", "total_variation", "largest_step"):
        assert ramp[measure]["low"] <= ramp[measure]["value"] <= ramp[measure]["high"]
    assert 0 < ramp["largest_step"]["value"] <= ramp["total_variation"]["value"] and ramp["jumps_mean"]["value"] <= 6


@pytest.mark.parametrize("name", list(MODELS))
def test_the_batch_changes_nothing(results, name):
    one, other = measured(results, name, 0), measured(results, name, 1)
    assert one["overlays"] == other["overlays"]
    for a, b in zip(one["noise"], other["noise"], strict=True):
        assert a["correct"] == b["correct"] and a["selection_change"] == pytest.approx(b["selection_change"], abs=1e-9)
    assert one["ramp"]["mean_probability"] == pytest.approx(other["ramp"]["mean_probability"], abs=1e-5)
    assert one["ramp"]["class_changes"] == other["ramp"]["class_changes"]


def test_every_method_saw_the_same_noisy_images(results):
    vit, other = measured(results, "vit")["overlays"], measured(results, "other")["overlays"]
    assert [row["sigma"] for row in vit] == [0, 0.05, 0.2] and [row["pixels"] for row in vit] == [row["pixels"] for row in other]
    clean, noisy = pixels_of(vit[0]), pixels_of(vit[2])
    assert clean.shape == noisy.shape == (3, 1, 12, 12) and 10 < np.abs(clean.astype(int) - noisy).mean() < 60
    assert len(vit[0]["grids"]) == 2 and grid_of(vit[0]["grids"][0][0]).shape == (3, 3)
    assert np.array_equal(clean, Prepared.open(results / "artifacts/data/pretrain").test.images[[0, 28, 59]])


def test_figures_and_scalars(results):
    figures = results / "artifacts/history/stability/pretrain/vit/0/figures"
    assert {file.name for file in figures.iterdir()} == {"noise_ramp.png", "noise_overlays.png"}
    kept = json.loads((results / "results/stability/pretrain/vit/0.json").read_text())
    assert kept["images"] == 30 and kept["ramp"]["jumps_mean"]["value"] == measured(results, "vit")["ramp"]["jumps_mean"]["value"]


def test_no_overlays_where_none_are_wanted():
    probs = torch.full((4, 3, 2), 0.5, dtype=torch.float64)
    settings = stage.Stability(overlays=0)
    assert stage.ramp(probs, torch.zeros(4, dtype=torch.int64), np.arange(4), [0, 0.1, 0.2], settings)["shown"] == []
