import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from moecore.core.files import UserError
from moecore.measure.cost import whole_and_routing_flops
from moecore.nn.backbones.vit import Vit
from moecore.nn.experts.mlp import Mlp
from moecore.nn.routers.expert_choice import ExpertChoice, ExpertChoicePlan, top_tokens_per_expert
from moecore.nn.routers.soft_slots import SlotsPlan, SoftSlots, unit_vectors
from moecore.parts import MoESettings, RoutingContext
from moecore.routers import Depth, FrozenCopy, NoisyTopK
from moecore.testing.check_helpers import IMAGE
from tests.nn.routers import reference

SHARES = [Fraction(share) for share in ("0.1", "0.7", "1", "1.1", "2", "9")]
NUMBER = st.integers(1, 6)
SCORES = torch.tensor([0.3, -0.2, 1.5, 0.1, -1, 0.8, 0.2, -0.4])
ALONE = NoisyTopK(k=1, renormalise=True, noise_std=0.0)  # one expert, weight 1
EARLY = RoutingContext(progress=0.49)
LATE = RoutingContext(progress=0.5)
SETTINGS = [{"k": 1, "noise_std": 3.0}, {"k": 2, "capacity_factor": 0.5}]


def test_evaluation_by_hand():
    # Identity router, two experts, one image of four tokens whose logits (ln a, ln b) give gates
    # (a, b)/(a + b): (0.75, 0.25), (0.5, 0.5), (0.25, 0.75), (0.5, 0.5). k = 1:
    # C = ceil(4·1·1/2) = 2.
    # Expert 0 takes tokens 0 and, of the tie of 1 and 3, the lower: 1. Expert 1 takes 2 and 1.
    # Token 3 gets nobody, 1 both.
    router = ExpertChoice(k=1).build(2, 2).eval()
    router.weight.data = torch.eye(2)
    tokens = torch.tensor([[[3.0, 1], [1, 1], [1, 3], [2, 2]]]).log()
    plan, record = router(tokens)
    assert plan.order.tolist() == [[0, 1], [1, 2]]
    torch.testing.assert_close(plan.weights, torch.tensor([[0.75, 0.5], [0.5, 0.75]]))
    torch.testing.assert_close(record.logits, tokens)
    expected = torch.tensor([[0.75, 0.25], [0.5, 0.5], [0.25, 0.75], [0.5, 0.5]])
    torch.testing.assert_close(record.probs[0], expected)
    expected = torch.tensor([[0.75, 0], [0.5, 0.5], [0, 0.75], [0, 0]])
    torch.testing.assert_close(record.combine[0], expected)
    assert record.chosen[0].tolist() == [[True, False], [True, True], [False, True], [False, False]]
    assert torch.equal(record.load, record.chosen.float())
    rows = plan.dispatch(tokens)
    torch.testing.assert_close(rows.values, tokens[0, [0, 1, 1, 2]])
    assert rows.offsets.tolist() == [2, 4] and rows.offsets.dtype == torch.int32
    assert not rows.projected
    # Row r is worth (r, 10): tokens get 0.75·0, 0.5·1 + 0.5·2, 0.75·3, nothing.
    outputs = plan.combine(torch.tensor([[0.0, 10], [1, 10], [2, 10], [3, 10]]))
    torch.testing.assert_close(outputs, torch.tensor([[[0, 7.5], [1.5, 10], [2.25, 7.5], [0, 0]]]))


def slow_taken(gates, share, group_size):
    """Expert by expert, group by group: a stable sort of Python, then the first C."""
    batch, tokens, experts = gates.shape
    found = []
    for of_expert in gates.flatten(0, 1).t().tolist():
        mine = []
        for start in range(0, batch, group_size):
            places = range(start * tokens, min(batch, start + group_size) * tokens)
            seats = min(len(places), math.ceil(len(places) * share / experts))
            mine += sorted(sorted(places, key=lambda place: -of_expert[place])[:seats])
        found.append(mine)
    return found


@given(NUMBER, NUMBER, st.integers(2, 4), NUMBER, st.sampled_from(SHARES), st.integers(0, 999))
@settings(max_examples=80, deadline=None)
def test_taken_agrees_with_sorting_one_by_one(batch, tokens, experts, group_size, share, seed):
    generator = torch.Generator().manual_seed(seed)
    gates = torch.randint(0, 4, (batch, tokens, experts), generator=generator) / 4  # with ties
    found = top_tokens_per_expert(gates, share, group_size)
    assert found.tolist() == slow_taken(gates, share, group_size)


def test_the_number_taken_is_exact_in_decimals_and_not_rounded_up_further():
    router = ExpertChoice(k=1, capacity_factor=1.1).build(4, 4).eval()
    # binary 160·1.1/4 is 44.000000000000007
    assert router(torch.randn(1, 160, 4))[0].order.shape == (4, 44)
    # ceil(1·1.1/4) = 1 of each of two images
    assert router(torch.randn(2, 1, 4))[0].order.shape == (4, 2)
    generous = ExpertChoice(k=4, capacity_factor=3.0).build(4, 4).eval()
    assert generous(torch.randn(2, 5, 4))[0].order.shape == (4, 10)  # never more than all


def test_training_gates_are_noisy_and_losses_see_clean_probs():
    layer = reference.layer_of(ExpertChoice(k=2, noise_std=3.0)).train()
    tokens = torch.randn(3, 6, 8)
    torch.manual_seed(7)
    _, record = layer.router(tokens)
    torch.manual_seed(7)
    logits = tokens @ layer.router.weight.t()
    gates = (logits + torch.randn_like(logits) * 3 / 4).softmax(-1)  # σ = noise_std / E
    torch.testing.assert_close(record.logits, logits)
    torch.testing.assert_close(record.probs, logits.softmax(-1))
    torch.testing.assert_close(record.combine, gates * record.chosen)
    taken = [column.nonzero().flatten().tolist() for column in record.chosen.flatten(0, 1).t()]
    assert taken == slow_taken(gates, 2, 1)
    first = layer.eval().router(tokens)[1]
    second = layer.router(tokens)[1]
    assert all(torch.equal(a, b) for a, b in zip(first[:-1], second[:-1], strict=True))


def test_the_plans_gradients_in_fp64():
    order = torch.tensor([[0, 2, 3], [0, 3, 5], [1, 2, 3]])  # token 4 nowhere, token 3 everywhere
    tokens = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(3, 3, dtype=torch.float64, requires_grad=True)
    scale = torch.randn(9, 1, dtype=torch.float64)

    def there_and_back(tokens, weights):
        plan = ExpertChoicePlan(order, weights, (2, 3))
        return plan.combine((plan.dispatch(tokens).values * scale).sin())

    assert torch.autograd.gradcheck(there_and_back, (tokens, weights))


def test_bf16_rows_are_added_up_in_fp32():
    # 256 + 1 + 1 is 258 in fp32 and after rounding; in bf16 256 + 1 rounds back to 256 each time.
    plan = ExpertChoicePlan(torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1), (1, 1))
    rows = torch.tensor([[256.0], [1], [1]], dtype=torch.bfloat16)
    assert plan.combine(rows).item() == 258 and plan.combine(rows).dtype == torch.bfloat16
    token = torch.zeros(1, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    (gradient,) = torch.autograd.grad(plan.dispatch(token).values, token, rows)
    assert gradient.item() == 258 and gradient.dtype == torch.bfloat16


def test_a_token_that_nobody_takes_comes_back_as_zero_without_gradient():
    layer = reference.layer_of(ExpertChoice(k=1, capacity_factor=0.5)).eval()
    tokens = torch.randn(2, 12, 8, requires_grad=True)
    outputs, (record,) = layer(tokens)
    left = ~record.chosen.any(-1)
    assert left.any() and not outputs[left].any() and outputs[~left].any(-1).all()
    (gradient,) = torch.autograd.grad(outputs.square().sum(), tokens)
    assert not gradient[left].any()


def router_of(**settings):
    """A router of tokens (r, v) of two numbers, and as many experts."""
    router = Depth(share=0.25, router=ALONE, **settings).build(2, 2)
    router.weight.data = torch.tensor([[1.0, 0.0]])
    return router


def pass_tokens(plan, tokens):
    """What comes back if every expert gives the token as it is."""
    return plan.combine(plan.dispatch(tokens).values)


def test_the_largest_scores_take_part_by_hand():
    # Two of eight: 1.5 · 2 and .8 · (−1).
    tokens = torch.stack([SCORES, torch.tensor([1.0, 1, 2, 1, 1, -1, 1, 1])], dim=-1)[None]
    expected = torch.tensor([[0, 0, 3, 0, 0, -0.8, 0, 0]])
    for training in (True, False):
        plan, record = router_of().train(training)(tokens)
        torch.testing.assert_close(pass_tokens(plan, tokens)[..., 1], expected)
        takes_part = record.chosen.any(dim=-1)
        assert torch.equal(takes_part, expected != 0)
        assert (record.probs[~takes_part] == 0.5).all() and not record.logits[~takes_part].any()
    sampled = router_of(sampling="bce", sampling_weight=1)
    _, record = sampled.train()(tokens)
    assert record.penalty.mean().item() == pytest.approx(0.549228, abs=1e-6)
    _, record = sampled.eval()(tokens)
    assert record.chosen.any(dim=-1).int().tolist() == [[1, 0, 1, 1, 0, 1, 1, 0]]
    nobody, _ = sampled(-tokens.abs())
    assert not pass_tokens(nobody, tokens).any()
    _, record = router_of()(torch.zeros(2, 3, 2))  # ties go to the first, and one takes part
    assert record.chosen.any(dim=-1).tolist() == [[True, False, False]] * 2


def test_padding_takes_no_place_of_a_caption_by_hand():
    # Of captions of 8, 5 and 2 own tokens a quarter takes part: 2, 1 and, as one always does, 1.
    # The padding behind has the largest scores of all; the two places of eight that are left go to
    # it, so that as many tokens as ever pass the experts.
    scores = SCORES.repeat(3, 1)
    padding = torch.arange(8) >= torch.tensor([[8], [5], [2]])
    scores[padding] += 9
    tokens = torch.stack([scores, torch.ones(3, 8)], dim=-1)
    for training in (True, False):
        router = router_of().train(training)
        plan, record = router(tokens, RoutingContext(padding=padding))
        takes_part = record.chosen.any(dim=-1) & ~padding
        assert [row.nonzero().flatten().tolist() for row in takes_part] == [[2, 5], [2], [0]]
        assert plan.places.shape == (3, 2)
    _, alone = router(tokens[:1, :, :], RoutingContext(padding=padding[:1]))
    assert torch.equal(alone.combine, router(tokens[:1])[1].combine)  # without any it is as ever


def test_the_layer_is_the_inner_one_of_those_that_take_part_times_their_scores():
    layer = reference.layer_of(Depth(share=0.4, router=NoisyTopK(noise_std=0.0)))
    tokens = torch.randn(3, 10, 8, requires_grad=True)

    def slow(values):
        scores = values @ layer.router.weight[0]
        takes_part = torch.zeros_like(scores).scatter(-1, scores.topk(4, dim=-1).indices, 1)
        gates = (values @ layer.router.router.weight.T).softmax(dim=-1)
        top = gates.topk(2, dim=-1)
        combine = torch.zeros_like(gates).scatter(-1, top.indices, top.values)
        return reference.weighted_sum(layer, values, combine * (scores * takes_part).unsqueeze(-1))

    reference.assert_like(layer, tokens, slow)


def test_the_predictor_learns_from_its_loss_alone_and_nothing_else_does():
    router = router_of(sampling="predictor", sampling_weight=1)
    torch.nn.init.normal_(router.outer)
    tokens = torch.randn(2, 8, 2, requires_grad=True)
    plan, record = router.train()(tokens)
    leaves = [tokens, router.weight, router.router.weight, router.inner, router.outer]

    def reached(value):
        gradients = torch.autograd.grad(value, leaves, retain_graph=True, materialize_grads=True)
        return [bool((one.abs() > 1e-6).any()) for one in gradients]

    assert reached(record.penalty.sum()) == [False, False, False, True, True]
    assert reached(pass_tokens(plan, tokens).sum()) == [True, True, False, False, False]


def test_skipped_tokens_cost_nothing():
    images = torch.rand(2, 1, 8, 8)  # 17 tokens, of which 4 take part, each with 2 experts
    costs = []
    for share in (0.25, 1.0):
        moe = MoESettings(router=Depth(share=share), experts=Mlp(hidden_ratio=2.0), blocks="all")
        model = Vit(patch=2, width=8, depth=1, heads=2).build(IMAGE, moe)
        whole, routing = whole_and_routing_flops(model, images)
        costs.append(whole - routing)
    assert costs[1] - costs[0] == pytest.approx((17 - 4) * 2 * 4 * 8 * 16)
    assert moe.active_share == 2 / 8 and Depth().active(8) == 0.25


def test_what_cannot_be_is_refused():
    inner = {"balance": {"kind": "sinkhorn"}, "residual": True, "eval_capacity_factor": 1.0}
    for key, value in inner.items():
        with pytest.raises(ValidationError, match=f"router.{key}: found one, .*; allowed: none"):
            Depth(sampling="bce", router=NoisyTopK(**{key: value}))
    with pytest.raises(UserError, match="^router.router.k is 9, with 8 experts"):
        Depth().with_k(9).build(4, 8)


def test_slots_by_hand_in_evaluation():
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
    """Cosine of token (d,) and slot (d,), 1e-6 beside both squared lengths, times the scale."""
    lengths = torch.sqrt((token @ token + 1e-6) * (slot @ slot + 1e-6))
    return router.scale[0] * (token @ slot) / lengths


def slow_layer(layer, tokens, number):
    slots = layer.router.slots.flatten(1).unbind(1)  # expert by expert, ``number`` each
    outputs = []
    for image in tokens:
        scores = [slow_score(layer.router, token, slot) for token in image for slot in slots]
        exponents = torch.stack(scores).exp().view(len(image), -1)  # (T, E·p)
        weights = exponents / exponents.sum(dim=1, keepdim=True)
        mixing = exponents / exponents.sum(dim=0, keepdim=True)
        total = 0
        for column in range(len(slots)):
            answer = reference.expert_output(layer, column // number, mixing[:, column] @ image)
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
    plan, record = layer.router(torch.randn(2, 5, 8))
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


def test_the_slots_gradients_in_fp64():
    mixing, weights = (torch.rand(2, 3, 2, 2).double().requires_grad_() for _ in range(2))
    tokens = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    scale = torch.randn(8, 1, dtype=torch.float64)

    def there_and_back(mixing, weights, tokens):
        plan = SlotsPlan(mixing, weights)
        return plan.combine((plan.dispatch(tokens).values * scale).sin())

    assert torch.autograd.gradcheck(there_and_back, (mixing, weights, tokens))


def both(**settings):
    inner = NoisyTopK(**settings)
    return reference.layer_of(FrozenCopy(router=inner)), reference.layer_of(inner)


def equal(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


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
    layer, _ = both(k=1, noise_std=0.0, balance={"kind": "sinkhorn", "group_size": 2})
    tokens = torch.randn(2, 30, 8) + 1  # alike, so that the logits prefer one expert
    chosen_by = lambda mode, context: layer.train(mode)(tokens, context)[1][0].chosen
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
