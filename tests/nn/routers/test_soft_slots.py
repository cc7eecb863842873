"""SoftMoE: mixtures of tokens to slots and back. A router that learns and is then frozen."""

import math

import pytest
import torch

from moecore.core.routing_records import RoutingContext
from moecore.nn.routers.frozen_copy import FrozenCopy
from moecore.nn.routers.noisy_top_k import NoisyTopK
from moecore.nn.routers.soft_slots import SlotsPlan, SoftSlots, unit_vectors
from tests.nn.routers import reference


def test_evaluation_by_hand():
    # d = 2, two experts with one slot each: μ = (0, 3) for expert 0 and (2, 0) for expert 1, unit
    # (0, 1) and (1, 0); scale = ln 9. Tokens (5, 0) and (0, 7), unit (1, 0) and (0, 1): scores [[0,
    # ln 9], [ln 9, 0]].
    # Over tokens and over slots alike (1, 9)/10 in that order: token 0 weighs 0.1 in slot 0 and 0.9
    # in slot 1.
    # Rows: slot 0 = 0.1·(5, 0) + 0.9·(0, 7) = (0.5, 6.3); slot 1 = (4.5, 0.7).
    router = SoftSlots().build(2, 2)
    router.slots.data = torch.tensor([[[0.0], [2.0]], [[3.0], [0.0]]])
    router.scale.data.fill_(math.log(9))
    tokens = torch.tensor([[[5.0, 0], [0, 7]]])
    plan, record = router(tokens)
    rows = plan.dispatch(tokens)
    assert rows.offsets.tolist() == [1, 2] and rows.offsets.dtype == torch.int32
    assert record.chosen.all() and (record.load == 1).all() and not rows.projected
    # Slots answer (1, 0) and (0, 10): token 0 gets (0.1, 9), token 1 (0.9, 1).
    outputs = plan.combine(torch.tensor([[1.0, 0], [0, 10]]))
    for found, expected in (
        (rows.values, [[0.5, 6.3], [4.5, 0.7]]),
        (record.probs, [[[0.1, 0.9], [0.9, 0.1]]]),
        (record.combine, [[[0.1, 0.9], [0.9, 0.1]]]),
        (record.logits, [[[0.0, math.log(9)], [math.log(9), 0]]]),
        (outputs, [[[0.1, 9], [0.9, 1]]]),
    ):
        torch.testing.assert_close(found, torch.tensor(expected), atol=1e-5, rtol=1e-5)


def slow_score(router, token, slot):
    """The cosine of a token (d,) and a slot (d,), with 1e-6 beside both squared lengths, times the
    scale.
    """
    lengths = torch.sqrt((token @ token + 1e-6) * (slot @ slot + 1e-6))
    return router.scale[0] * (token @ slot) / lengths


def slow_layer(layer, tokens, number):
    """Image by image, slot by slot."""
    slots = layer.router.slots.flatten(1).unbind(1)  # expert by expert, ``number`` each
    outputs = []
    for image in tokens:
        scores = [slow_score(layer.router, token, slot) for token in image for slot in slots]
        exponents = torch.stack(scores).exp().view(len(image), -1)  # (T, E·p)
        weights = exponents / exponents.sum(dim=1, keepdim=True)
        mixing = exponents / exponents.sum(dim=0, keepdim=True)
        total = 0
        for column in range(len(slots)):
            mixed = mixing[:, column] @ image
            answer = reference.expert_output(layer, column // number, mixed)
            total = total + weights[:, column, None] * answer
        outputs.append(total)
    return torch.stack(outputs)


@pytest.mark.parametrize(("slots", "width"), [(1, 8), (3, 6)])
def test_outputs_and_all_gradients_agree_with_slot_by_slot(slots, width):
    layer = reference.layer_of(SoftSlots(slots=slots), width)
    layer.router.scale.data.fill_(3.0)
    tokens = torch.randn(2, 5, width, requires_grad=True)
    reference.assert_like(layer, tokens, lambda x: slow_layer(layer, x, slots))


def test_the_record_sums_over_an_experts_slots():
    layer = reference.layer_of(SoftSlots(slots=3))
    tokens = torch.randn(2, 5, 8)
    plan, record = layer.router(tokens)
    torch.testing.assert_close(record.probs, plan.weights.sum(-1))
    torch.testing.assert_close(record.combine, record.probs)
    torch.testing.assert_close(plan.mixing.sum(1), torch.ones(2, 4, 3))


def test_neither_the_length_of_a_token_nor_that_of_a_slot_matters_but_the_scale_does():
    router = SoftSlots(slots=2).build(8, 4)
    tokens = torch.randn(2, 5, 8)
    before = router(tokens)[1].probs
    torch.testing.assert_close(router(tokens * 9)[1].probs, before, atol=1e-5, rtol=1e-4)
    router.slots.data *= 7
    torch.testing.assert_close(router(tokens)[1].probs, before, atol=1e-5, rtol=1e-4)
    router.scale.data *= 2
    assert not torch.allclose(router(tokens)[1].probs, before, atol=1e-3)
    # files of before the scale had an axis are read
    router.load_state_dict(router.state_dict() | {"scale": torch.tensor(3.0)})
    assert router.scale.tolist() == [3.0]


def test_a_token_of_zeros_has_a_finite_gradient():
    layer = reference.layer_of(SoftSlots())
    tokens = torch.zeros(1, 3, 8, requires_grad=True)
    outputs, (record,) = layer(tokens)
    (gradient,) = torch.autograd.grad(outputs.sum(), tokens)
    assert gradient.isfinite().all() and torch.equal(record.probs, torch.full((1, 3, 4), 0.25))
    vectors = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda v: unit_vectors(v, dim=-1), vectors)


def test_the_plans_gradients_in_fp64():
    mixing, weights = (
        torch.rand(2, 3, 2, 2, dtype=torch.float64, requires_grad=True) for _ in range(2)
    )
    tokens = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    scale = torch.randn(8, 1, dtype=torch.float64)

    def there_and_back(mixing, weights, tokens):
        plan = SlotsPlan(mixing, weights)
        return plan.combine((plan.dispatch(tokens).values * scale).sin())

    assert torch.autograd.gradcheck(there_and_back, (mixing, weights, tokens))


EARLY = RoutingContext(progress=0.49)
LATE = RoutingContext(progress=0.5)


def both(**settings):
    """The frozen copy's layer and the same layer with its inner router."""
    inner = NoisyTopK(**settings)
    return reference.layer_of(FrozenCopy(router=inner)), reference.layer_of(inner)


def equal(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


SETTINGS = [{"k": 1, "noise_std": 3.0}, {"k": 2, "capacity_factor": 0.5}]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_before_it_is_frozen_it_is_the_inner_router(settings):
    ours, theirs = both(**settings)
    tokens = torch.randn(2, 9, 8)
    results = []
    for layer, context in ((ours, EARLY), (theirs, RoutingContext())):
        torch.manual_seed(4)
        outputs, (record,) = layer.train()(tokens, context)
        gradients = torch.autograd.grad(outputs.square().sum(), list(layer.parameters()))
        results.append([outputs, *record[:-1], *gradients])
    assert equal(*results)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_once_frozen_it_is_the_inner_router_without_noise_and_without_gradient(settings):
    ours, theirs = both(**settings)
    theirs = reference.layer_of(NoisyTopK(**settings | {"noise_std": 0.0}))
    theirs.router.weight.requires_grad_(False)
    tokens = torch.randn(2, 9, 8, requires_grad=True)
    results = []
    for layer, context in ((ours, LATE), (theirs, RoutingContext())):
        outputs, (record,) = layer.train()(tokens, context)
        outputs.square().sum().add(record.load.square().sum()).backward()
        gradients = [value.grad for value in (tokens, *layer.experts.parameters())]
        results.append([outputs, *record[:-1], *gradients])
        tokens.grad = None
        assert layer.router.weight.grad is None
    assert equal(*results)


def test_once_frozen_nothing_is_planned():
    plan = {"kind": "sinkhorn", "group_size": 2}
    layer, _ = both(k=1, noise_std=0.0, balance=plan)
    tokens = torch.randn(2, 30, 8) + 1  # alike, so that the logits prefer one expert

    def chosen_by(mode, context):
        return layer.train(mode)(tokens, context)[1][0].chosen

    by_logits = chosen_by(False, LATE)
    assert torch.equal(chosen_by(True, LATE), by_logits)
    counts = chosen_by(True, EARLY).sum(dim=(0, 1))  # it learns again, from an even plan
    assert counts.max() < 25 < by_logits.sum(dim=(0, 1)).max()


def test_evaluation_does_not_look_at_progress():
    ours, theirs = both(k=2)
    tokens = torch.randn(2, 9, 8, requires_grad=True)
    expected, (record,) = theirs.eval()(tokens)
    for context in (EARLY, LATE):
        outputs, (mine,) = ours.eval()(tokens, context)
        assert torch.equal(outputs, expected) and equal(mine[:-1], record[:-1])
        assert torch.autograd.grad(outputs.square().sum(), ours.router.weight)[0].any()
    ours.train()(tokens, LATE)
    # nothing is left over from the frozen step
    assert equal(ours.eval()(tokens, EARLY)[1][0][:-1], record[:-1])


def test_adamw_with_weight_decay_leaves_a_frozen_router_alone():
    layer = reference.layer_of(FrozenCopy())
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, weight_decay=0.5)
    router = []
    expert = []
    for progress in (0.0, 0.25, 0.5, 0.75):
        optimizer.zero_grad(set_to_none=True)
        context = RoutingContext(progress=progress)
        layer.train()(torch.randn(2, 9, 8), context)[0].square().sum().backward()
        optimizer.step()
        router.append(layer.router.weight.detach().clone())
        expert.append(layer.experts.up.detach().clone())
    assert not torch.equal(router[0], router[1])
    assert torch.equal(router[1], router[2]) and torch.equal(router[2], router[3])
    assert not torch.equal(expert[2], expert[3])


def test_it_stays_frozen_while_its_model_is_fine_tuned():
    router = FrozenCopy(router=NoisyTopK(k=2)).for_finetuning().with_k(1).build(6, 4).train()
    assert router.until == 0 and router.config.k == 1
    _, record = router(torch.randn(2, 3, 6), RoutingContext(progress=0.0))
    assert not record.combine.requires_grad
