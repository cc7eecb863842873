"""The stage ``lipschitz`` end to end on the digits, for a dense model and for every way of routing."""

import json

import numpy as np
import pytest
import torch

from moecore.artifacts import load_model, save_model
from moecore.backbones.image import ImageSpec
from moecore.backbones.single_layer import SingleLayer
from moecore.backbones.vit import Vit
from moecore.data.digits import Digits
from moecore.data.prepared import Prepared, spread
from moecore.evaluation.predict import batches
from moecore.layers.moe import MoE
from stages import lipschitz as stage

PARAMS = "lipschitz: {images: 6, lemma_tokens: 5, batch: 4, seed: 5, radius: 0.3, steps: 2, halvings: 3}\n"
MLP = {"kind": "mlp", "number": 4, "hidden_ratio": 0.5}
EIGEN = {"kind": "eigen", "number": 4, "hidden_ratio": 0.5}
VIT = Vit(patch=6, width=16, depth=2, heads=2)
LINEAR = {"kind": "noisy_top_k", "k": 1}
MODELS = {
    "dense": (VIT, None),
    "vmoe": (VIT, MoE(router=LINEAR, experts=MLP, blocks=[0, 1])),
    "frozen": (VIT, MoE(router={"kind": "frozen_copy", "router": LINEAR, "until": 0.5}, experts=MLP, blocks=[1])),
    "smoe": (VIT, MoE(router={"kind": "top_k_softmax", "k": 2}, experts=MLP, blocks=[1])),
    "eigen": (VIT, MoE(router=LINEAR, experts=EIGEN, blocks=[1])),
    "ermoe": (VIT, MoE(router={"kind": "eigenbasis", "k": 2, "threshold": 0.5}, experts=EIGEN, blocks=[1])),
    "hash": (VIT, MoE(router={"kind": "hash", "k": 1, "by": "patch"}, experts=MLP, blocks=[1])),
    "soft": (VIT, MoE(router={"kind": "soft_slots", "slots": 2}, experts=MLP, blocks=[1])),
    "choice": (VIT, MoE(router={"kind": "expert_choice", "k": 2}, experts=MLP, blocks=[1])),
    "single": (SingleLayer(), MoE(router=LINEAR, experts=MLP, blocks=[0])),
}
DEFINED = {"vmoe": 2, "frozen": 1, "smoe": 1, "eigen": 1, "single": 1}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The stage ran for every model, in this folder."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("lipschitz")
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
                parameter.data *= 4
            save_model(target, model)
            stage.lipschitz("pretrain", name, 0)
        yield folder


def measured(folder, name: str) -> dict:
    return json.loads((folder / f"artifacts/measured/lipschitz/pretrain/{name}/0.json").read_text())


@pytest.mark.parametrize("name", MODELS)
def test_every_model_has_its_slopes(results, name):
    found = measured(results, name)
    assert found["images"] == 6 and found["radius"] == 0.3 and found["resolution"] == 0.3 / 8
    for part in ("local", "margin", "reached"):
        mean = found[f"{part}_mean"]
        assert 0 <= mean["low"] <= mean["value"] <= mean["high"] and mean["value"] < found[f"{part}_max"]
    assert found["reached_max"] <= found["lower_bound"] * (1 + 1e-12) and 0 <= found["at_boundary"]["value"] <= 1
    assert (found["jump_max"] > 0) == (found["at_boundary"]["value"] > 0)


def test_dense_and_soft_models_never_change_experts(results):
    assert all(measured(results, name)["at_boundary"]["value"] == 0 for name in ("dense", "soft"))


@pytest.mark.parametrize(("name", "layers"), DEFINED.items())
def test_the_lemma_where_it_is_defined(results, name, layers):
    found = measured(results, name)
    assert len(found["layers"]) == layers and found["lemma1"]["reason"] is None
    assert found["lemma1"]["tokens"] == 5 * layers and found["lemma1"]["violations"] == 0
    for layer in found["layers"]:
        assert layer["tokens"] == 5 and layer["violations"] == 0 and 0 < layer["router_share"] < 1
        assert layer["bound"]["value"] == pytest.approx(layer["experts"]["value"] + layer["router"]["value"])
        assert 0 < layer["jacobian"]["value"] <= layer["bound"]["value"] and layer["slack"]["value"] > 0
        assert list(layer["router"]["quantiles"]) == ["0.05", "0.25", "0.5", "0.75", "0.95"]
        assert layer["router"]["quantiles"]["0.95"] <= layer["router"]["max"]
    assert found["lemma1"]["slack"] == pytest.approx(np.mean([layer["slack"]["value"] for layer in found["layers"]]))
    assert (results / f"artifacts/history/lipschitz/pretrain/{name}/0/figures/lemma_terms.png").stat().st_size > 2000


@pytest.mark.parametrize("name", sorted(MODELS.keys() - DEFINED.keys()))
def test_the_lemma_is_null_with_a_reason_elsewhere(results, name):
    found = measured(results, name)
    kinds = {"dense": "dense", "ermoe": "eigenbasis", "hash": "hash", "soft": "soft_slots", "choice": "expert_choice"}
    assert found["layers"] == [] and kinds[name] in found["lemma1"].pop("reason")
    assert found["lemma1"] == {"tokens": None, "violations": None, "router_share": None, "slack": None}
    assert not (results / f"artifacts/history/lipschitz/pretrain/{name}/0/figures").exists()


def test_numbers_alone_go_to_the_results(results):
    kept = json.loads((results / "results/lipschitz/pretrain/vmoe/0.json").read_text())
    found = measured(results, "vmoe")
    assert kept["local_mean"] == found["local_mean"] and kept["lemma1"]["violations"] == 0 and "layers" not in kept


def _inputs(results, name="vmoe"):
    model = load_model(results / "artifacts/pretrain" / name / "0")
    test = Prepared.open(results / "artifacts/data/pretrain").test
    where = spread(len(test.labels), 6)
    return model, test.images[where], torch.from_numpy(test.labels[where])


def test_the_result_does_not_depend_on_the_batch(results):
    model, images, labels = _inputs(results)
    found = measured(results, "vmoe")
    for batch in (1, 6):
        settings = stage.LipschitzSettings(images=6, lemma_tokens=5, batch=batch, seed=5, radius=0.3, steps=2, halvings=3)
        again = stage.lipschitz_estimates(model, images, labels, batch, 0.3, 2, 3)
        summary = stage.summarised(again, settings)
        assert summary["local_mean"].value == pytest.approx(found["local_mean"]["value"], rel=1e-9)
        assert summary["margin_max"] == pytest.approx(found["margin_max"], rel=1e-9)
        assert summary["lower_bound"] == pytest.approx(found["lower_bound"], rel=1e-6)
        _, terms = stage.lemma_of(model, images, settings, "cpu")
        assert [float(each.router.mean()) for each in terms] == pytest.approx([layer["router"]["value"] for layer in found["layers"]], rel=1e-4)


def test_the_tokens_are_what_the_layers_get(results):
    model, images, _ = _inputs(results)
    settings = stage.LipschitzSettings(lemma_tokens=7, batch=4, seed=2)
    found = stage.tokens_of(model, images, settings, "cpu")
    seen = []
    hooks = [block.mlp.register_forward_pre_hook(lambda _, args: seen.append(args[0].flatten(0, 1))) for block in model.blocks]
    with torch.no_grad():
        model(next(batches(images, 6)))
    for hook in hooks:
        hook.remove()
    chosen = np.sort(np.random.default_rng(2).permutation(len(seen[0]))[:7])
    for tokens, whole in zip(found, seen, strict=True):
        assert tokens.shape == (7, 16)
        torch.testing.assert_close(tokens, whole[chosen], rtol=1e-4, atol=1e-5)
    other = stage.tokens_of(model, images, settings.model_copy(update={"seed": 3}), "cpu")
    assert not torch.equal(found[0], other[0])
