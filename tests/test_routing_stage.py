"""The stage ``routing`` end to end on the digits, for routers of every kind and a dense model."""

import json

import numpy as np
import pytest
import torch

from moecore.artifacts import save_model, save_no_guide
from moecore.backbones.image import ImageSpec
from moecore.correspondence import paired
from moecore.data.digits import Digits
from moecore.data.loader import generator_for
from moecore.data.prepared import Prepared, spread
from moecore.data.views import make_views
from moecore.evaluation.consistency import match_ratios
from moecore.evaluation.predict import predictions
from moecore.kept import Kept
from moecore.sweeps import Sweeps
from stages import routing as stage
from tests.routed import tiny

PARAMS = """\
routing:
  images: 40
  batch: 30
  overlays: 1
  seed: 4
  views: {crop: {scale: [0.7, 1.0]}}
  augmentations: [noise, flip, {name: mine, views: {shift: 1}, noise: 0.02}]
  augmentation_images: 15
  sweeps: {k: [1, 2, 9], threshold: [0.3, 0.5], images: 20}
"""
NAMES = ("vmoe", "ermoe", "soft_moe", "expert_choice", "teacher_routed", "hash_moe", "dense")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The stage ran for every model, in this folder."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("routing")
        patch.chdir(folder)
        patch.setenv("MOECORE_TRACKING", "off")
        patch.delenv("MOECORE_PARAMS", raising=False)
        patch.setenv("MOECORE_THREADS", "1")
        (folder / "params.yaml").write_text(PARAMS)
        (folder / "artifacts/data/pretrain").mkdir(parents=True)
        image = ImageSpec.from_card(Digits(size=12, train_limit=50, test_limit=60).prepare(folder / "artifacts/data/pretrain"))
        for name in NAMES:
            for target in (folder / f"artifacts/pretrain/{name}/0", folder / f"artifacts/teacher_router/{name}"):
                target.mkdir(parents=True)
            save_no_guide(folder / "artifacts/teacher_router" / name)
            save_model(folder / "artifacts/pretrain" / name / "0", tiny(name, image))
            stage.routing("pretrain", name, 0)
        yield folder


def measured(folder, name: str) -> dict:
    return json.loads((folder / f"artifacts/measured/routing/pretrain/{name}/0.json").read_text())


@pytest.mark.parametrize("name", NAMES[:-1])
def test_every_method_has_every_measurement(results, name):
    found = measured(results, name)
    assert found["images"] == 40 and len(found["layers"]) == 2
    assert [row["name"] for row in found["augmentations"]] == ["noise", "flip", "mine"]
    for row in (*found["layers"], found, *found["augmentations"]):
        assert 0 <= row["match_top2_ordered"] <= min(row["match_top1"], row["match_top2_sets"]) <= 1 and 0 <= row["chosen_iou"] <= 1
        assert 0 < row["chance_iou"] <= 1 and 0 < row["independent_top1"] <= 1
    for layer in found["layers"]:
        assert 0 <= layer["load_cv2"] <= 7 and 0 <= layer["entropy"] <= 1 and sum(layer["load"]) == pytest.approx(1)
        assert layer["processed_load_cv2"] == layer["load_cv2"] and layer["processed_share"] == 1, "evaluation drops nothing"
        if name not in ("expert_choice", "teacher_routed"):  # where others decide, a token need not get its best experts
            assert 0 <= layer["unchosen_mass"] <= 1 - layer["experts_per_token"] / 8 + 1e-6
    assert found["chance"]["match_top1"] == 1 / 8 and found["chance"]["match_top2_sets"] == pytest.approx(1 / 28)
    sweeps = found["sweeps"]
    assert [row["k"] for row in sweeps["k"]] == ([] if name == "soft_moe" else [1, 2])
    assert [row["threshold"] for row in sweeps["threshold"]] == ([0.3, 0.5] if name == "ermoe" else [])


def test_the_teacher_decides_and_is_compared(results):
    assert 0 <= measured(results, "teacher_routed")["teacher_agreement"] <= 1 and "teacher_agreement" not in measured(results, "vmoe")


def test_numbers_by_kind(results):
    assert measured(results, "vmoe")["experts_per_token"] == 2 and measured(results, "soft_moe")["experts_per_token"] == 8
    assert measured(results, "soft_moe")["chosen_iou"] == 1 == measured(results, "soft_moe")["chance_iou"] and "tail_of_probs" not in measured(results, "soft_moe")
    assert 1 <= measured(results, "ermoe")["experts_per_token"] <= 2 and "fallback" in measured(results, "ermoe")
    assert measured(results, "hash_moe")["tail_of_probs"] == 0 and measured(results, "vmoe")["chance"]["chosen_iou"] == pytest.approx(5 / 28)
    vmoe = measured(results, "vmoe")
    assert vmoe["tail_of_probs"] == pytest.approx(vmoe["unchosen_mass"]), "noisy top-k chooses the best k"


def test_all_models_saw_the_same_views(results):
    draws = {tuple(row["draws"] for row in measured(results, name)["augmentations"]) for name in NAMES[:-1]}
    assert len(draws) == 1 and len(set(*draws)) == 3


def test_a_dense_model_has_empty_lists(results):
    found = measured(results, "dense")
    assert found.pop("overlays")["grids"] == []
    assert found == {"images": 40, "layers": [], "augmentations": [], "sweeps": {"k": [], "threshold": []}}


def test_numbers_outside_of_lists_go_to_the_results(results):
    kept, found = json.loads((results / "results/routing/pretrain/ermoe/0.json").read_text()), measured(results, "ermoe")
    assert {"images", "load_cv2", "fallback", "match_top1", "chosen_iou", "chance"} <= set(kept) and not {"layers", "augmentations"} & set(kept)
    assert kept["match_top1"] == found["match_top1"] == pytest.approx(sum(layer["match_top1"] for layer in found["layers"]) / 2)


def test_the_matches_of_the_views_by_hand(results):
    model = stage.load_model(results / "artifacts/pretrain/vmoe/0")
    images = Prepared.open(results / "artifacts/data/pretrain").test.images[spread(60, 40)]
    settings = stage.Routing.model_validate({"views": {"crop": {"scale": [0.7, 1.0]}}}).views
    views = [make_views(torch.from_numpy(np.array(images)), settings, generator_for(4, 0, number)) for number in (0, 1)]
    pixels, affines = (torch.cat(both) for both in zip(*views, strict=True))
    _, records = predictions(model, pixels, 80)
    for record, layer in zip(records, measured(results, "vmoe")["layers"], strict=True):
        ratios = match_ratios(*paired(record.probs, affines, model.layout, False))
        assert [layer[f"match_{name}"] for name in ratios._fields] == pytest.approx(list(ratios))


def test_the_sweep_at_the_trained_setting_is_the_model_itself(results):
    model, data = stage.load_model(results / "artifacts/pretrain/ermoe/0"), Prepared.open(results / "artifacts/data/pretrain").test
    where = spread(60, 40)[spread(40, 20)]
    logits, records = predictions(model, data.images[where], 20)
    found = measured(results, "ermoe")["sweeps"]
    for own in (found["k"][1], found["threshold"][1]):
        assert own["own"] and own["accuracy"] == float((logits.argmax(1) == torch.from_numpy(data.labels[where])).double().mean())
        assert own["layers"][0]["load_cv2"] == pytest.approx(stage.measure(records[0], 0.5, 2)["load_cv2"])
        assert own["fallback"] == pytest.approx(sum(stage.measure(record, 0.5, 2)["fallback"] for record in records) / 2)


def test_an_augmentation_does_not_depend_on_the_others(results, tmp_path):
    model = stage.load_model(results / "artifacts/pretrain/vmoe/0")
    images = Prepared.open(results / "artifacts/data/pretrain").test.images[spread(60, 40)]
    (alone,) = stage.augmented(model, images, stage.Routing(augmentations=("flip",), augmentation_images=15, seed=4, batch=8), Kept(tmp_path))
    assert alone["draws"] == measured(results, "vmoe")["augmentations"][1]["draws"]
    assert alone["match_top1"] == pytest.approx(measured(results, "vmoe")["augmentations"][1]["match_top1"])


def test_processed_and_chosen_experts_are_told_apart():
    record = predictions(tiny("vmoe"), np.zeros((2, 1, 8, 8), np.uint8) + np.arange(64, dtype=np.uint8).reshape(8, 8), 2)[1][0]
    first = record.combine.argmax(-1, keepdim=True)
    dropped = record._replace(combine=torch.zeros_like(record.combine).scatter(-1, first, 1.0))  # each token lost its second expert
    found, whole = stage.measure(dropped, None, 2), stage.measure(record, None, 2)
    assert found["processed_share"] == 0.5 and found["load"] == whole["load"] and found["experts_per_token"] == 2
    assert found["processed_load_cv2"] != found["load_cv2"] == whole["processed_load_cv2"]


def test_settings():
    assert stage.Routing().sweeps == Sweeps() and "identity" not in stage.PRESETS
    with pytest.raises(ValueError, match="flip stands there twice"):
        stage.Routing(augmentations=("flip", {"name": "flip"}))
    with pytest.raises(ValueError, match="augmentations"):
        stage.Routing(augmentations=("spin",))
