"""The stage ``corruptions`` end to end on the digits, for a MoE and a dense model."""

import json

import numpy as np
import pytest
import torch

from moecore.artifacts import load_model, save_model
from moecore.backbones.image import ImageSpec
from moecore.backbones.single_layer import SingleLayer
from moecore.backbones.vit import Vit
from moecore.data.corruptions import CORRUPTIONS, corrupted
from moecore.data.digits import Digits
from moecore.data.prepared import Prepared, spread
from moecore.evaluation.corruption_error import errors_of, mean_corruption_error
from moecore.evaluation.intervals import wilson
from moecore.evaluation.predict import predictions
from moecore.files import StageError
from moecore.kept import Kept
from moecore.layers.moe import MoE
from moecore.params import check
from stages import corruptions as stage

PARAMS = "corruptions: {images: 40, severities: [5, 1], names: [gaussian_noise, contrast, fog], batch: 16, seed: 5}\n"
MOE = {"router": {"kind": "noisy_top_k", "k": 2}, "experts": {"kind": "mlp", "number": 4, "hidden_ratio": 1}}
MODELS = {"vit": (Vit(patch=6, width=16, depth=2, heads=2), MoE(**MOE, blocks=[1])), "dense": (SingleLayer(), None)}


def loaded(folder):
    """Building a model draws its first weights; what is tested is that the measuring draws nothing."""
    with torch.random.fork_rng():
        return load_model(folder)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The stage ran for every model, in this folder."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("corruptions")
        patch.chdir(folder)
        patch.setenv("MOECORE_TRACKING", "off")
        patch.delenv("MOECORE_PARAMS", raising=False)
        patch.setenv("MOECORE_THREADS", "1")
        patch.setattr(stage, "load_model", loaded)
        (folder / "params.yaml").write_text(PARAMS)
        (folder / "artifacts/data/pretrain").mkdir(parents=True)
        image = ImageSpec.from_card(Digits(size=12, train_limit=50, test_limit=60).prepare(folder / "artifacts/data/pretrain"))
        for name, (backbone, moe) in MODELS.items():
            target = folder / "artifacts/pretrain" / name / "0"
            target.mkdir(parents=True)
            torch.manual_seed(1)
            model = backbone.build(image, moe)
            for parameter in model.parameters():
                parameter.data *= 3  # untrained, but its classes differ from image to image
            save_model(target, model)
            before = torch.get_rng_state()
            stage.corruptions("pretrain", name, 0)
            assert torch.equal(torch.get_rng_state(), before)
        yield folder


def measured(folder, name: str) -> dict:
    return json.loads((folder / f"artifacts/measured/corruptions/pretrain/{name}/0.json").read_text())


@pytest.mark.parametrize("name", list(MODELS))
def test_every_corruption_and_severity_has_a_row(results, name):
    found = measured(results, name)
    expected = [(corruption, severity) for corruption in ("gaussian_noise", "contrast", "fog") for severity in (1, 5)]
    assert found["images"] == 40 and [(row["name"], row["severity"]) for row in found["corruptions"]] == expected
    for row in found["corruptions"]:
        error, low, high = wilson(40 - row["correct"], 40)
        assert (row["error"], row["low"], row["high"]) == (error, low, high) and error == 1 - row["correct"] / 40


@pytest.mark.parametrize("name", list(MODELS))
def test_means_are_over_severities_then_over_corruptions(results, name):
    found = measured(results, name)
    for corruption, mean in found["by_corruption"].items():
        assert mean == pytest.approx(sum(row["error"] for row in found["corruptions"] if row["name"] == corruption) / 2)
    assert found["mean_error"] == pytest.approx(sum(found["by_corruption"].values()) / 3)
    assert found["mean_low"] < found["mean_error"] < found["mean_high"] and found["clean_low"] <= found["clean_error"] <= found["clean_high"]


@pytest.mark.parametrize("name", list(MODELS))
def test_errors_are_those_of_the_images_at_their_places_in_the_split(results, name):
    model = load_model(results / f"artifacts/pretrain/{name}/0")
    test, where = Prepared.open(results / "artifacts/data/pretrain").test, spread(60, 40)
    found = measured(results, name)
    for row in found["corruptions"]:
        whole = corrupted(test.images, row["name"], row["severity"], 5, range(60))
        hits = predictions(model, whole[where], 40)[0].argmax(1).numpy() == test.labels[where]
        assert row["correct"] == hits.sum()
    clean = predictions(model, test.images[where], 40)[0].argmax(1).numpy() != test.labels[where]
    assert found["clean_error"] == pytest.approx(clean.mean())


def test_numbers_alone_go_to_the_results_and_the_ratio_to_dense_can_be_made(results):
    kept = json.loads((results / "results/corruptions/pretrain/vit/0.json").read_text())
    assert set(kept) == {"images", "clean_error", "clean_low", "clean_high", "mean_error", "mean_low", "mean_high", "by_corruption"}
    vit, dense = (errors_of(measured(results, name)["corruptions"]) for name in MODELS)
    expected = np.mean([sum(vit[name].values()) / sum(dense[name].values()) for name in vit])
    assert mean_corruption_error(vit, dense) == pytest.approx(expected)


def test_figures_are_drawn(results):
    figures = results / "artifacts/history/corruptions/pretrain/dense/0/figures"
    assert (figures / "corruption_errors.png").stat().st_size > 2000 and (figures / "corruption_samples.png").stat().st_size > 2000


def test_images_of_one_picture_belong_together(tmp_path):
    """20 pictures of which one is always wrong, in 30 rows: the mean is 1/20, its limits those of 20 images and not of 600."""
    images = np.arange(20, dtype=np.uint8)[:, None, None, None] * np.ones((1, 1, 8, 8), np.uint8)
    rows, wrong = stage.measured(lambda pixels: torch.arange(len(pixels)) != 3, images, np.arange(20), stage.Corruptions(severities=(1, 2)), Kept(tmp_path))
    assert len(rows) == 30 and wrong.tolist() == [float(i == 3) for i in range(20)] and list(stage.by_corruption(rows)) == list(CORRUPTIONS)
    mean = stage.mean_of(wrong)
    assert mean.value == pytest.approx(0.05) and mean.high - mean.low >= 0.1


def test_settings_know_all_names():
    assert set(stage.Name.__args__) == set(CORRUPTIONS)


@pytest.mark.parametrize(
    ("settings", "message"),
    [("{severities: [1, 6]}", "severities"), ("{names: [rain]}", "rain"), ("{names: [fog, fog]}", "twice"), ("{severities: []}", "severities")],
)
def test_wrong_settings_are_refused(settings, message):
    with pytest.raises(StageError, match=message):
        check(stage.Params, f"corruptions: {settings}\n")
