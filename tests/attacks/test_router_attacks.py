"""Attacks on routers: objectives and soft choices by hand, and the worst image over all forms."""

import pytest
import torch

from moecore.attacks.apgd import Apgd
from moecore.attacks.base import image_generators
from moecore.attacks.gradient import NO_ROUTING, ModelGradient, make_objective
from moecore.attacks.routing_objectives import MAX_EXCESS, routing_margin_loss
from moecore.attacks.surrogate import RouterAttacks, Surrogate
from moecore.core.routing_records import ModelOutput, RoutingRecord
from moecore.nn.layers.lipschitz_lemma import soft_top_k_weights, soften_model
from tests.attacks.models import CLASSES, Smooth, vit
from tests.nn.layers.test_layers import ROUTERS, images

SPARSE = {"kind": "noisy_top_k", "k": 1}
EPSILON = 0.02


def record(logits: list, chosen: list, combine: list | None = None) -> RoutingRecord:
    """One image; the probs are a softmax of the logits, and the weights of chosen experts."""
    values, mask = torch.tensor([logits]), torch.tensor([chosen]).bool()
    probs = values.softmax(dim=-1)
    weights = probs * mask if combine is None else torch.tensor([combine])
    return RoutingRecord(values, probs, mask.float(), mask, weights)


def test_the_margin_by_hand():
    # Token 0 chose experts 0 and 1: the next exceeds the second by 1 − 2 = −1. Token 1 chose expert
    # 2 and now has expert 0 ahead by 3, which counts as the most. Token 2 chose all: 0.
    layer = record([[3.0, 2, 1], [3.0, 2, 0], [1.0, 1, 1]], [[1, 1, 0], [1, 0, 0], [1, 1, 1]])
    before = torch.tensor([[[1, 1, 0], [0, 0, 1], [1, 1, 1]]]).bool()
    expected = torch.tensor([(-1 + MAX_EXCESS) / 3])
    for layers in (0, 1, 2):
        output = ModelOutput(torch.zeros(1, 3), (layer,) * layers)
        found = routing_margin_loss(output, [before] * layers)
        assert torch.allclose(found, layers * expected)


def test_task_and_routing_add_up():
    model, pixels, labels = Smooth(), torch.rand(5, 1, 4, 4), torch.zeros(5, dtype=torch.long)
    values = {
        name: ModelGradient(model, make_objective(name, 0.3, model, CLASSES, pixels, labels))
        for name in ("task", "routing_margin", "task_and_routing")
    }
    (task, by_task), (margin, by_margin), (joint, by_joint) = (
        at(0.9 * pixels) for at in values.values()
    )
    assert torch.allclose(joint, task + 0.3 * margin)
    assert torch.allclose(by_joint, by_task + 0.3 * by_margin, atol=1e-6)
    assert by_margin.any()


def test_soft_weights_by_hand():
    # The midpoint of the first and the second logit is 1: distances 1, −1, −2 at temperature 2. The
    # gates σ(1/2), σ(−1/2), σ(−1) times the probs, with the sum of the one hard weight.
    layer = record([[2.0, 0, -1]], [[1, 0, 0]])
    gates = torch.sigmoid(torch.tensor([0.5, -0.5, -1])) * layer.probs
    expected = gates * layer.combine.sum() / gates.sum()
    assert torch.allclose(soft_top_k_weights(layer, 2.0), expected)
    # Doubled weights of two chosen experts, the second over capacity: only the first and the last.
    layer = record([[2.0, 1, 0]], [[1, 1, 0]], [[1.4, 0.0, 0.0]])
    found = soft_top_k_weights(layer, 1.0)[0, 0]
    assert found[1] == 0 and found[2] > 0 and found.sum() == pytest.approx(1.4)
    # All experts, or none: as they are. A balance chose the second: it keeps the larger gate.
    for chosen in ([1, 1, 1], [0, 0, 0]):
        layer = record([[2.0, 1, 0]], [chosen])
        assert torch.allclose(soft_top_k_weights(layer, 1.0), layer.combine)
    shifted = soft_top_k_weights(record([[1.0, 0.0]], [[0, 1]]), 0.01)[0, 0]
    assert shifted[1] > 0 and shifted[0] == pytest.approx(0, abs=1e-6)


CAPPED = {"kind": "noisy_top_k", "k": 1, "eval_capacity_factor": 0.5, "group_size": 3}


@pytest.mark.parametrize("router", [*ROUTERS, CAPPED], ids=lambda router: router["kind"])
def test_a_cold_soft_choice_is_the_hard_one(router):
    model, pixels = vit(router), images()
    hard = model(pixels).prediction
    assert torch.allclose(soften_model(model, 1e-6)(pixels).prediction, hard, atol=1e-5)
    leaf = pixels.requires_grad_()
    soft = soften_model(model, 0.1)(leaf).prediction
    (gradient,) = torch.autograd.grad(soft.sum(), leaf)
    assert gradient.isfinite().all()
    if router["kind"] == "noisy_top_k":
        assert not torch.allclose(soft, hard, atol=1e-3)


def attack_images(attack, model, pixels, labels) -> torch.Tensor:
    return attack(model, CLASSES, pixels, labels, EPSILON, image_generators(0, range(len(pixels))))


def test_a_surrogate_is_attacked_and_apgd_goes_on_from_there():
    model = vit(SPARSE)
    pixels = images(8)
    labels = model(pixels).prediction.argmax(dim=1)
    surrogate = Surrogate(steps=4, temperature=0.3)
    soft = attack_images(surrogate, model, pixels, labels)
    apgd = Apgd(steps=4)
    assert torch.equal(soft, attack_images(apgd, soften_model(model, 0.3), pixels, labels))
    direct = attack_images(surrogate.model_copy(update={"direct": True}), model, pixels, labels)
    losses = [
        CLASSES.attack_loss(model(moved).prediction, labels) for moved in (pixels, soft, direct)
    ]
    assert (losses[2] >= losses[1]).all() and losses[2].mean() > losses[1].mean() > losses[0].mean()
    for moved in (soft, direct):
        assert (moved - pixels).abs().max() <= EPSILON + 1e-6


def test_every_form_is_swept():
    forms = RouterAttacks(steps=4, temperatures=(0.2, "probs"), weights=(2.0,)).parts
    soft = ["surrogate-4-0.2", "surrogate-4-probs"]
    names = [*soft, *(f"{name}-direct" for name in soft)]
    names += ["apgd-task_and_routing-2.0-4", "apgd-routing_margin-4"]
    assert [attack.name for attack in forms] == names
    for attack in forms:
        assert attack.does_not_apply(vit(None), CLASSES) == NO_ROUTING
        assert attack.does_not_apply(vit(SPARSE), CLASSES) is None
