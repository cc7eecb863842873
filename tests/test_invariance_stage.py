"""The stage ``invariance`` end to end on the digits, for models of one token and of many, and for a dense one."""

import base64
import json

import numpy as np
import pytest
import torch

from moecore.artifacts import save_model
from moecore.backbones.image import ImageSpec
from moecore.backbones.single_layer import SingleLayer
from moecore.backbones.vit import Vit
from moecore.data.digits import Digits
from moecore.data.prepared import Prepared, spread
from moecore.data.transforms import TRANSFORMS, drawn_affines
from moecore.evaluation.imed import mean_imed
from moecore.evaluation.predict import predictions
from moecore.kept import Kept
from moecore.layers.moe import MoE
from moecore.routers.hash import Hash
from stages import invariance as stage
from tests.routed import KINDS, METHODS, tiny

PARAMS = "invariance: {images: 40, batch: 30, seed: 5}\n"
MOE = {"router": {"kind": "noisy_top_k", "k": 1}, "experts": {"kind": "mlp", "number": 6, "hidden_ratio": 0.1}}
MODELS = {
    "single": (SingleLayer(), MoE(**MOE, blocks=[0])),
    "vit": (Vit(patch=6, width=16, depth=2, heads=2), MoE(**MOE, blocks=[0, 1])),
    "dense": (SingleLayer(), None),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The stage ran for every model, in this folder."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("invariance")
        patch.chdir(folder)
        patch.setenv("MOECORE_TRACKING", "off")
        patch.delenv("MOECORE_PARAMS", raising=False)
        patch.setenv("MOECORE_THREADS", "1")
        (folder / "params.yaml").write_text(PARAMS)
        (folder / "artifacts/data/pretrain").mkdir(parents=True)
        image = ImageSpec.from_card(Digits(size=12, train_limit=50, test_limit=60).prepare(folder / "artifacts/data/pretrain"))
        for name, (backbone, moe) in MODELS.items():
            target = folder / "artifacts/pretrain" / name / "0"
            target.mkdir(parents=True)
            torch.manual_seed(1)
            model = backbone.build(image, moe)
            for parameter in model.parameters():
                parameter.data *= 5  # a router that prefers some experts
            save_model(target, model)
            stage.invariance("pretrain", name, 0)
        yield folder


def measured(folder, name: str) -> dict:
    return json.loads((folder / f"artifacts/measured/invariance/pretrain/{name}/0.json").read_text())


@pytest.mark.parametrize(("name", "layers"), [("single", 1), ("vit", 2)])
def test_every_transform_has_its_distances_and_every_class_its_map(results, name, layers):
    found = measured(results, name)
    assert found["images"] == 40 and [row["name"] for row in found["transforms"]] == list(TRANSFORMS) and found["grid"] == [2, 3]
    for row in found["transforms"]:
        assert 0 <= row["d_low"] < row["d"] < row["d_high"] and 0 <= row["d2_low"] < row["d2"] < row["d2_high"]
        assert 0 < row["d"] ** 2 <= row["d2"] <= 1 / np.pi, "the mean's square is at most the mean of squares"
    maps = np.array(found["class_maps"])
    assert maps.shape == (10, layers, 6)
    np.testing.assert_allclose(maps.sum(-1), 1, atol=1e-6)


def test_numbers_alone_go_to_the_results(results):
    kept = json.loads((results / "results/invariance/pretrain/single/0.json").read_text())
    found = measured(results, "single")["transforms"]
    assert set(kept) == {"images", "d", "d2"} and list(kept["d"].values()) == [row["d"] for row in found]
    assert list(kept["d2"].values()) == [row["d2"] for row in found]
    assert list(kept["d2"])[2:7:2] == ["rotation_15", "scaling_0_8", "translation_0_0_1"]


def test_both_models_saw_the_same_draws_and_they_are_kept(results):
    single, vit = measured(results, "single")["affines"], measured(results, "vit")["affines"]
    assert single == vit and list(single) == list(TRANSFORMS)
    kept = np.frombuffer(base64.b64decode(single["rotation 10"]), "<f8").reshape(40, 2, 3)
    assert np.array_equal(kept, drawn_affines("rotation 10", 40, (12, 12), 5)[:, :2].numpy())


def test_a_stronger_shear_moves_the_routing_further(results):
    d = measured(results, "single")["d"]
    assert d["shear_5"] < d["shear_15"] < d["scaling_0_5"]


def test_a_dense_model_has_an_empty_result(results):
    assert measured(results, "dense") == {"images": 40, "transforms": []}
    assert json.loads((results / "results/invariance/pretrain/dense/0.json").read_text()) == {"images": 40}
    assert not (results / "artifacts/history/invariance/pretrain/dense/0/figures").exists()


def test_the_maps_are_drawn_and_the_distances_listed(results):
    history = results / "artifacts/history/invariance/pretrain/vit/0"
    assert (history / "figures/expert_maps.png").stat().st_size > 2000
    rows = json.loads((history / "tables/imed.json").read_text())
    assert rows == measured(results, "vit")["transforms"]


def _model_and_images(results):
    model = stage.load_model(results / "artifacts/pretrain/vit/0")
    test = Prepared.open(results / "artifacts/data/pretrain").test
    where = spread(len(test.labels), 40)
    return model, test.images[where], test.labels[where]


def test_the_identity_moves_nothing(results, tmp_path):
    model, images, _ = _model_and_images(results)
    _, clean = predictions(model, images, 16)
    (still,) = stage.distances(model, images, stage.probs(clean), {"still": torch.eye(3, dtype=torch.float64).expand(40, 3, 3)}, 16, Kept(tmp_path))
    assert still.pop("name") == "still" and set(still.values()) == {0.0}


def test_the_result_is_the_mean_over_images_and_does_not_depend_on_the_batch(results):
    model, images, _ = _model_and_images(results)
    _, before = predictions(model, images, 40)
    drawn = drawn_affines("translation (0.1, 0.1)", 40, (12, 12), 5)
    _, after = predictions(model, stage.moved(images, drawn, 7), 40)
    d, d2 = mean_imed(stage.probs(before), stage.probs(after))
    found = measured(results, "vit")
    assert found["d"]["translation_0_1_0_1"] == pytest.approx(float(d.mean()), rel=1e-4)
    assert found["d2"]["translation_0_1_0_1"] == pytest.approx(float(d2.mean()), rel=1e-4)


@pytest.mark.parametrize(("number", "expected"), [(40, 40), (None, 60), (1000, 60), (1, 1)])
def test_images_are_spread_over_the_split(number, expected):
    where = spread(60, number)
    assert len(where) == expected and (np.diff(where) > 0).all() and where[0] == 0
    assert where[-1] == (59 if expected > 1 else 0) and (expected < 2 or np.ptp(np.diff(where)) <= 1)


@pytest.mark.parametrize("name", KINDS)
def test_it_runs_for_the_layer_of_every_method(results, name):
    data = Prepared.open(results / "artifacts/data/pretrain")
    target = results / "artifacts/pretrain" / f"kind_{name}" / "0"
    target.mkdir(parents=True)
    save_model(target, tiny(name, ImageSpec.from_card(data.card)))
    stage.invariance("pretrain", f"kind_{name}", 0)
    found = measured(results, f"kind_{name}")
    assert [row["name"] for row in found["transforms"]] == list(TRANSFORMS) and np.array(found["class_maps"]).shape == (10, 2, 8)
    for row in found["transforms"]:
        assert 0 <= row["d_low"] <= row["d"] <= row["d_high"] and 0 < row["d"] ** 2 <= row["d2"] <= 1 / np.pi
    router = METHODS[name].router
    assert ("note" in found) == (router.kind in ("hash", "teacher_routed", "expert_choice", "soft_slots"))
    assert found.get("note") == stage.NOTES.get(router.kind)
    assert (results / f"artifacts/measured/invariance/pretrain/kind_{name}/0.json").stat().st_size < 100_000


def test_every_method_has_one_of_these_layers():
    layers = [METHODS[name].moe for name in KINDS]
    assert all(method.moe in layers for method in METHODS.values() if method.moe) and len(METHODS) >= 22


def test_a_hash_of_the_position_never_moves(results, tmp_path):
    model, images, _ = _model_and_images(results)
    moe = model.moe.model_copy(update={"router": Hash(k=2, by="position")})
    fixed = model.config.build(model.image, moe)
    clean = stage.probs(predictions(fixed, images, 40)[1])
    drawn = {"rotation 15": drawn_affines("rotation 15", 40, (12, 12), 5)}
    assert stage.distances(fixed, images, clean, drawn, 40, Kept(tmp_path))[0]["d_high"] == 0 and "never moves" in stage.note(moe.router)["note"]


def test_a_note_stands_only_where_the_probs_do_not_decide():
    routers = METHODS["teacher_routed"].router, METHODS["vmoe"].router
    assert stage.note(routers[0]) == {"note": stage.NOTES["teacher_routed"]} and stage.note(routers[1]) == {}
    assert stage.note(routers[0].model_copy(update={"inference": "student"})) == {}
