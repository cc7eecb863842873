import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from moecore.nn.routers.base import exact_fraction, expert_capacity, within_capacity
from moecore.nn.routers.token_choice import top_k
from moecore.routers import NoisyTopK, TopKSoftmax
from tests.nn.routers import reference


def router_of(width=6, experts=4, seed=0, **settings):
    torch.manual_seed(seed)
    router = NoisyTopK(**settings).build(width, experts)
    torch.nn.init.normal_(router.weight)
    return router


def test_evaluation_by_hand():
    # Identity router: logits = token = (ln 4, ln 2, ln 1, ln 1).
    # softmax = (4, 2, 1, 1)/8 = (0.5, 0.25, 0.125, 0.125). k = 2: experts 0 and 1 with 0.5 and
    # 0.25, not renormalised. τ = ln 2, σ = 1/4:
    # load = Φ((logit − ln 2)·4) = Φ(4 ln 2), Φ(0) = 0.5, Φ(−4 ln 2), Φ(−4 ln 2).
    router = NoisyTopK(k=2).build(4, 4).eval()
    router.weight.data = torch.eye(4)
    token = torch.tensor([4.0, 2, 1, 1]).log().view(1, 1, 4)
    plan, record = router(token)
    torch.testing.assert_close(record.logits, token)
    torch.testing.assert_close(record.probs.flatten(), torch.tensor([0.5, 0.25, 0.125, 0.125]))
    torch.testing.assert_close(record.combine.flatten(), torch.tensor([0.5, 0.25, 0, 0]))
    assert record.chosen.flatten().tolist() == [True, True, False, False]
    far = reference.phi(4 * math.log(2))
    torch.testing.assert_close(record.load.flatten(), torch.tensor([far, 0.5, 1 - far, 1 - far]))
    assert plan.offsets.tolist() == [1, 2, 2, 2]
    torch.testing.assert_close(plan.weights.flatten(), torch.tensor([0.5, 0.25]))


def test_training_gates_are_noisy_and_losses_see_clean_probs():
    router = router_of(k=2).train()
    tokens = torch.randn(3, 5, 6)
    torch.manual_seed(7)
    plan, record = router(tokens)
    torch.manual_seed(7)
    logits = tokens @ router.weight.t()
    noisy = logits + torch.randn_like(logits) / 4  # σ = noise_std / E
    gates, order = noisy.softmax(-1).sort(dim=-1, descending=True)
    torch.testing.assert_close(record.logits, logits)
    torch.testing.assert_close(record.probs, logits.softmax(-1))
    torch.testing.assert_close(plan.weights, gates[..., :2])
    expected = torch.zeros_like(record.chosen).scatter(-1, order[..., :2], True)
    assert torch.equal(record.chosen, expected) and torch.equal(record.combine > 0, expected)
    # the chance to pass the threshold if noise is drawn again
    threshold = noisy.topk(2).values[..., 1:]
    load = torch.distributions.Normal(0, 0.25).cdf(logits - threshold)
    torch.testing.assert_close(record.load, load)
    again = logits + torch.randn(20000, 1, 1, 4) / 4
    torch.testing.assert_close((again > threshold).float().mean(0), load, atol=0.02, rtol=0)


@pytest.mark.parametrize("training", [True, False])
def test_without_noise_load_is_smooth_and_finite(training):
    router = router_of(k=1, noise_std=0.0).train(training)
    _, record = router(torch.randn(2, 4, 6))
    (gradient,) = torch.autograd.grad(record.load.square().sum(), router.weight)
    assert record.load.isfinite().all() and gradient.isfinite().all() and gradient.any()
    threshold = record.logits.max(dim=-1, keepdim=True).values
    # σ = 1/E
    torch.testing.assert_close(record.load, torch.special.ndtr((record.logits - threshold) * 4))


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=7), st.data())
@settings(max_examples=60, deadline=None)
def test_top_k_is_a_stable_sort(scores, data):
    k = data.draw(st.integers(1, len(scores)))
    # Python's sort is stable
    expected = sorted(range(len(scores)), key=lambda index: -scores[index])[:k]
    assert top_k(torch.tensor(scores, dtype=torch.float32), k).tolist() == expected


def slow_seats(experts, priority, number, factor, group_size):
    """Seat by seat: group after group, choice after choice, tokens in order of priority."""
    kept = torch.zeros_like(experts, dtype=torch.bool)
    for start in range(0, len(experts), group_size):
        images = range(start, min(start + group_size, len(experts)))
        tokens = [(image, token) for image in images for token in range(experts.shape[1])]
        seats = math.ceil(round(len(tokens) * experts.shape[2] * factor / number, 9))
        free = [seats + (-seats % 4)] * number
        if priority is not None:
            tokens.sort(key=lambda place: -priority[place].item())
        for choice in range(experts.shape[2]):
            for image, token in tokens:
                expert = experts[image, token, choice].item()
                kept[image, token, choice] = free[expert] > 0
                free[expert] -= 1
    return kept


@given(
    st.integers(1, 5),
    st.integers(1, 6),
    st.integers(2, 4),
    st.integers(1, 3),
    st.sampled_from([0.1, 0.5, 1.0, 1.1]),
    st.booleans(),
    st.data(),
)
@settings(max_examples=80, deadline=None)
def test_seats_agree_with_seating_one_by_one(batch, tokens, number, group, factor, by_rank, data):
    k = data.draw(st.integers(1, number))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    # low experts are crowded
    scores = torch.rand(batch, tokens, number, generator=generator) * torch.linspace(2, 1, number)
    experts = top_k(scores, k)
    ties = torch.randint(0, 4, (batch, tokens), generator=generator) / 4
    priority = ties if by_rank else None
    expected = slow_seats(experts, priority, number, factor, group)
    kept = within_capacity(experts, priority, number, exact_fraction(factor), group)
    assert torch.equal(kept, expected)


def test_first_choices_sit_before_second_ones():
    # Six tokens, two experts, factor 0.5: C = ceil(6·2·0.5/2) = 3, rounded up to 4. Tokens 0 and 1
    # prefer expert 1, 2 to 5 expert 0.
    # Expert 0: first choices of 2..5 fill its four seats, so the second choices of 0 and 1 find
    # none, though those tokens come first.
    experts = torch.tensor([[[1, 0], [1, 0], [0, 1], [0, 1], [0, 1], [0, 1]]])
    kept = within_capacity(experts, None, 2, exact_fraction(0.5), 8)
    assert kept[0, :, 0].all()
    assert kept[0, :, 1].tolist() == [False, False, True, True, False, False]


def test_seats_by_priority_are_multiples_of_four_and_exact_in_decimals():
    # Six tokens want expert 0, which has C = 4 seats (6·1·1/2 = 3, rounded up): the last ones have
    # the largest gates.
    experts = torch.zeros(1, 6, 1, dtype=torch.int64)
    for rank, sits in ((None, [1, 1, 1, 1, 0, 0]), (torch.arange(6.0)[None], [0, 0, 1, 1, 1, 1])):
        kept = within_capacity(experts, rank, 2, exact_fraction(1.0), 8)
        assert kept.flatten().tolist() == sits
    assert expert_capacity(8 * 197, 2, exact_fraction(1.05), 8) == 416  # 413.7 -> 414 -> 416
    # binary 160·1.1/4 is 44.000000000000007
    assert expert_capacity(160, 1, exact_fraction(1.1), 4) == 44
    assert expert_capacity(1, 1, exact_fraction(0.01), 8) == 4
    with pytest.raises(ValidationError, match="give `capacity_factor` too"):
        NoisyTopK(batch_priority=True)


@pytest.mark.parametrize("prioritised", [True, False])
def test_a_dropped_choice_has_weight_0_in_training_and_none_is_dropped_in_evaluation(prioritised):
    router = router_of(k=2, capacity_factor=0.5, batch_priority=prioritised, group_size=2)
    tokens = torch.randn(3, 10, 6)
    plan, record = router.train()(tokens)
    processed = record.combine > 0
    assert record.chosen.sum() == 3 * 10 * 2  # before capacity
    assert (processed & ~record.chosen).sum() == 0 and 0 < processed.sum() < record.chosen.sum()
    assert processed[:2].sum(dim=(0, 1)).max() <= expert_capacity(20, 2, exact_fraction(0.5), 4)
    assert torch.equal((plan.weights > 0).sum(-1), processed.sum(-1))
    assert torch.equal(router.eval()(tokens)[1].combine > 0, router(tokens)[1].chosen)


def test_priority_is_the_largest_gate():
    limited = {"capacity_factor": 1.0, "batch_priority": True}
    router = router_of(width=2, experts=2, k=1, noise_std=0.0, **limited)
    router.weight.data = torch.eye(2)
    strength = torch.tensor([1.0, 6, 2, 5, 3, 4])  # six tokens for expert 0, which has four seats
    _, record = router(torch.stack([strength, torch.zeros(6)], dim=-1)[None])
    assert (record.combine[0, :, 0] > 0).tolist() == [False, True, False, True, True, True]


def test_straight_weights_sum_to_1_and_have_the_gradient_of_gates_over_a_constant():
    tokens = torch.randn(2, 5, 6)
    for k in (1, 2):
        router = router_of(k=k, renormalise="straight").eval()
        plan, record = router(tokens)
        torch.testing.assert_close(plan.weights.sum(dim=-1), torch.ones(2, 5))
        towards = torch.randn(plan.weights.shape)
        (mine,) = torch.autograd.grad((plan.weights * towards).sum(), router.weight)
        gates = (tokens @ router.weight.t()).softmax(dim=-1).topk(k).values
        constant = gates.detach().sum(dim=-1, keepdim=True)
        (slow,) = torch.autograd.grad((gates * towards / constant).sum(), router.weight)
        torch.testing.assert_close(mine, slow)
        assert mine.abs().max() > 1e-3 and record.combine.max() > 0
    # With k = 1 weights that are renormalised as usual are 1 whatever the router does.
    usual = router_of(k=1, renormalise=True).eval()
    plan, _ = usual(tokens)
    (none,) = torch.autograd.grad((plan.weights * towards[..., :1]).sum(), usual.weight)
    assert not none.any()


def test_capacity_holds_in_evaluation_where_it_is_asked_for():
    tokens = torch.randn(5, 10, 6)
    asked = router_of(k=2, eval_capacity_factor=0.5, batch_priority=True, group_size=2)
    trained = router_of(k=2, capacity_factor=0.5, batch_priority=True, group_size=2, noise_std=0.0)
    assert asked.images_coupled_in_eval == 2 and trained.images_coupled_in_eval == 1
    in_evaluation = asked.eval()(tokens)[1].combine
    torch.testing.assert_close(in_evaluation, trained.train()(tokens)[1].combine)
    assert 0 < (in_evaluation > 0).sum() < 100
    assert (asked.train()(tokens)[1].combine > 0).sum() == 100  # training has a factor of its own
    # Groups of two images: the others of the batch play no part.
    torch.testing.assert_close(asked.eval()(tokens[2:4])[1].combine, in_evaluation[2:4])


# `top_k_softmax`: top-k first, then a softmax over the chosen


def test_softmax_over_the_chosen_evaluation_by_hand():
    # Token (ln 4, ln 2, 0, 0) by the identity, plus bias (0, 0, ln 8, 0): logits (ln 4, ln 2, ln 8,
    # 0), probs (4, 2, 8, 1)/15. k = 2 takes experts 2 and 0; over these alone 8/12 and 4/12. τ = ln
    # 4, σ = 1/4:
    # load = Φ(4·ln(4/4)), Φ(4·ln(2/4)), Φ(4·ln(8/4)), Φ(4·ln(1/4)).
    router = TopKSoftmax().build(4, 4).eval()
    router.weight.data = torch.eye(4)
    router.bias.data = torch.tensor([0, 0, math.log(8), 0])
    plan, record = router(torch.tensor([4.0, 2, 1, 1]).log().view(1, 1, 4))
    torch.testing.assert_close(record.logits.flatten(), torch.tensor([4.0, 2, 8, 1]).log())
    torch.testing.assert_close(record.probs.flatten(), torch.tensor([4.0, 2, 8, 1]) / 15)
    torch.testing.assert_close(plan.weights.flatten(), torch.tensor([2 / 3, 1 / 3]))
    torch.testing.assert_close(record.combine.flatten(), torch.tensor([1 / 3, 0, 2 / 3, 0]))
    assert record.chosen.flatten().tolist() == [True, False, True, False]
    load = [reference.phi(4 * math.log(ratio)) for ratio in (1, 1 / 2, 2, 1 / 4)]
    torch.testing.assert_close(record.load.flatten(), torch.tensor(load))


def test_softmax_over_the_chosen_training_noise_decides_and_losses_see_clean_probs():
    layer = reference.layer_of(TopKSoftmax(noise_std=3.0)).train()
    tokens = torch.randn(3, 5, 8)
    torch.manual_seed(7)
    _, record = layer.router(tokens)
    torch.manual_seed(7)
    logits = tokens @ layer.router.weight.t() + layer.router.bias
    noisy = logits + torch.randn_like(logits) * 3 / 4  # σ = noise_std / E
    best, order = noisy.sort(dim=-1, descending=True)
    torch.testing.assert_close(record.logits, logits)
    torch.testing.assert_close(record.probs, logits.softmax(-1))
    expected = torch.zeros_like(logits).scatter(-1, order[..., :2], best[..., :2].softmax(-1))
    torch.testing.assert_close(record.combine, expected)
    load = torch.distributions.Normal(0, 0.75).cdf(logits - best[..., 1:2])
    torch.testing.assert_close(record.load, load)


def test_softmax_over_one_chosen_has_weight_1_and_gives_the_router_no_task_gradient():
    layer = reference.layer_of(TopKSoftmax(k=1)).train()
    outputs, (record,) = layer(torch.randn(3, 7, 8))
    assert torch.equal(record.combine, record.chosen.float())
    # what regularizers look at still teaches it
    for values, teaches in ((outputs, False), (record.probs, True), (record.load, True)):
        loss, parameters = values.square().sum(), list(layer.router.parameters())
        for gradient in torch.autograd.grad(loss, parameters, retain_graph=True):
            assert gradient.any() == teaches
