"""Expert Choice: which tokens an expert takes, and the way there and back."""

import math
from fractions import Fraction

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moecore.nn.routers.expert_choice import ExpertChoice, ExpertChoicePlan, top_tokens_per_expert
from tests.nn.routers import reference


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
    torch.testing.assert_close(
        record.probs[0], torch.tensor([[0.75, 0.25], [0.5, 0.5], [0.25, 0.75], [0.5, 0.5]])
    )
    torch.testing.assert_close(
        record.combine[0], torch.tensor([[0.75, 0], [0.5, 0.5], [0, 0.75], [0, 0]])
    )
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


SHARES = [Fraction(share) for share in ("0.1", "0.7", "1", "1.1", "2", "9")]
NUMBER = st.integers(1, 6)


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
