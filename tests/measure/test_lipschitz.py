"""Slopes and Lemma 1 on the digits, for a dense model and for every way of routing."""

import numpy as np
import pytest
import torch

from moecore.core.streams import seed_of
from moecore.data.prepared import evenly_spread
from moecore.measure import lipschitz
from moecore.measure.base import Subject
from moecore.measure.lipschitz import Lipschitz, summarised
from moecore.measure.theory.lemma import lemma_terms, tokens_of
from moecore.measure.theory.slopes import slopes_at
from moecore.nn.backbones.single_layer import SingleLayer
from moecore.nn.backbones.vit import Vit
from moecore.nn.layers.moe import MoE
from moecore.nn.predict import batches
from tests.measure.subjects import built, digits, measured_twice

SETTINGS = Lipschitz(images=6, lemma_tokens=5, batch=4, seed=5, radius=0.3, steps=2, halvings=3)
MLP = {"kind": "mlp", "number": 4, "hidden_ratio": 0.5}
EIGEN = {"kind": "eigen", "number": 4, "hidden_ratio": 0.5}
VIT = Vit(patch=6, width=16, depth=2, heads=2)
LINEAR = {"kind": "noisy_top_k", "k": 1}
MODELS = {
    "dense": (VIT, None),
    "vmoe": (VIT, MoE(router=LINEAR, experts=MLP, blocks=[0, 1])),
    "frozen": (
        VIT,
        MoE(
            router={"kind": "frozen_copy", "router": LINEAR, "until": 0.5}, experts=MLP, blocks=[1]
        ),
    ),
    "smoe": (VIT, MoE(router={"kind": "top_k_softmax", "k": 2}, experts=MLP, blocks=[1])),
    "eigen": (VIT, MoE(router=LINEAR, experts=EIGEN, blocks=[1])),
    "ermoe": (
        VIT,
        MoE(router={"kind": "eigenbasis", "k": 2, "threshold": 0.5}, experts=EIGEN, blocks=[1]),
    ),
    "hash": (VIT, MoE(router={"kind": "hash", "k": 1, "by": "patch"}, experts=MLP, blocks=[1])),
    "soft": (VIT, MoE(router={"kind": "soft_slots", "slots": 2}, experts=MLP, blocks=[1])),
    "choice": (VIT, MoE(router={"kind": "expert_choice", "k": 2}, experts=MLP, blocks=[1])),
    "single": (SingleLayer(), MoE(router=LINEAR, experts=MLP, blocks=[0])),
}
DEFINED = {"vmoe": 2, "frozen": 1, "smoe": 1, "eigen": 1, "single": 1}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return digits(tmp_path_factory.mktemp("lipschitz"))


@pytest.fixture(scope="module")
def models(data):
    return {name: built(*parts, data, 4) for name, parts in MODELS.items()}


@pytest.fixture(scope="module")
def results(data, models):
    return {
        name: measured_twice(lipschitz.measure, Subject(model, data), SETTINGS)
        for name, model in models.items()
    }


@pytest.mark.parametrize("name", MODELS)
def test_every_model_has_its_slopes(results, name):
    found = results[name]
    assert found.images == 6 and found.radius == 0.3 and found.resolution == 0.3 / 8
    for part in ("local", "margin", "reached"):
        mean = getattr(found, f"{part}_mean")
        assert 0 <= mean.low <= mean.value <= mean.high
        assert mean.value < getattr(found, f"{part}_max")
    assert (
        found.reached_max <= found.lower_bound * (1 + 1e-12) and 0 <= found.at_boundary.value <= 1
    )
    assert (found.jump_max > 0) == (found.at_boundary.value > 0)


def test_dense_and_soft_models_never_change_experts(results):
    assert all(results[name].at_boundary.value == 0 for name in ("dense", "soft"))


@pytest.mark.parametrize(("name", "layers"), DEFINED.items())
def test_the_lemma_where_it_is_defined(results, name, layers):
    found = results[name]
    assert len(found.layers) == len(found.lemma_terms) == layers
    assert found.lemma1.reason is None
    assert found.lemma1.tokens == 5 * layers and found.lemma1.violations == 0
    for layer in found.layers:
        assert layer.tokens == 5 and layer.violations == 0 and 0 < layer.router_share < 1
        assert layer.bound.value == pytest.approx(layer.experts.value + layer.router.value)
        assert 0 < layer.jacobian.value <= layer.bound.value and layer.slack.value > 0
        assert list(layer.router.quantiles) == ["0.05", "0.25", "0.5", "0.75", "0.95"]
        assert layer.router.quantiles["0.95"] <= layer.router.max
    assert found.lemma1.slack == pytest.approx(
        np.mean([layer.slack.value for layer in found.layers])
    )
    for layer, points in zip(found.layers, found.lemma_terms, strict=True):
        assert len(points.bound) == len(points.jacobian) == len(points.router) == 5
        assert max(points.bound) == layer.bound.max


@pytest.mark.parametrize("name", sorted(MODELS.keys() - DEFINED.keys()))
def test_the_lemma_is_null_with_a_reason_elsewhere(results, name):
    found = results[name]
    kinds = {
        "dense": "dense",
        "ermoe": "eigenbasis",
        "hash": "hash",
        "soft": "soft_slots",
        "choice": "expert_choice",
    }
    assert found.layers == found.lemma_terms == ()
    assert kinds[name] in found.lemma1.reason
    assert set(found.lemma1.model_dump(exclude={"reason"}).values()) == {None}


@pytest.fixture(scope="module")
def images(data):
    return data.test.images[evenly_spread(60, 6)]


def test_the_result_does_not_depend_on_the_batch(data, models, images, results):
    model = models["vmoe"]
    labels = torch.from_numpy(data.test.labels[evenly_spread(60, 6)])
    found = results["vmoe"]
    for batch in (1, 6):
        again = summarised(slopes_at(model, images, labels, batch, 0.3, 2, 3), SETTINGS)
        assert again.local_mean.value == pytest.approx(found.local_mean.value, rel=1e-9)
        assert again.margin_max == pytest.approx(found.margin_max, rel=1e-9)
        assert again.lower_bound == pytest.approx(found.lower_bound, rel=1e-6)
        terms = lemma_terms(model, images, 5, batch, 5, "cpu")
        assert [float(each.router.mean()) for each in terms] == pytest.approx(
            [layer.router.value for layer in found.layers], rel=1e-4
        )


def test_the_tokens_are_what_the_layers_get(models, images):
    model = models["vmoe"]
    found = tokens_of(model, images, 7, 4, 2, "cpu")
    seen = []
    hooks = [
        block.mlp.register_forward_pre_hook(lambda _, args: seen.append(args[0].flatten(0, 1)))
        for block in model.blocks
    ]
    with torch.no_grad():
        model(next(batches(images, 6)))
    for hook in hooks:
        hook.remove()
    chosen = np.sort(
        np.random.default_rng(seed_of("measured_tokens", 2)).permutation(len(seen[0]))[:7]
    )
    for tokens, whole in zip(found, seen, strict=True):
        assert tokens.shape == (7, 16)
        torch.testing.assert_close(tokens, whole[chosen], rtol=1e-4, atol=1e-5)
    other = tokens_of(model, images, 7, 4, 3, "cpu")
    assert not torch.equal(found[0], other[0])
