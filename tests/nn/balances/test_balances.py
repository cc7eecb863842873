import copy

import pytest
import torch
from pydantic import ValidationError

from moecore import UserError, update_routers
from moecore.nn.balances import quantile, sinkhorn
from moecore.nn.balances.loss_free import compute_bias_change
from moecore.nn.routers.noisy_top_k import GroupLimitedChoice, NoisyTopK
from moecore.parts import RoutingContext, top_k
from moecore.routers import Competition, FrozenCopy, TopKSoftmax, TopP
from moecore.training.method import Method
from moecore.training.settings import build_optimizer
from tests.nn.routers import reference
from tests.nn.routers.test_noisy_top_k import router_of
from tests.training.small import COMPETITION, SETTINGS, task

BIAS = {"kind": "loss_free", "rate": 0.1}
SIGMOID = {"score": "sigmoid", "renormalise": True, "noise_std": 0.0}
AFFINE = torch.tensor([[2, 0], [1, 0], [0.5, 0], [0, 0.2]])
SCORES = torch.tensor([[[0.9, 0.5, 0.8, 0.3], [0.75, 0.7, 0.6, 0.3], [0.8, 0.2, 0.7, 0.75]]])
RULES = {  # the even share is 1.5; 1 − n / 1.5 = −1, ⅓, ⅓, ⅓
    "sign": [-0.01, 0.01, -0.19, 0.11],
    "recentred": [-0.015, 0.005, -0.195, 0.105],
    "proportional": [-0.01, 0.003333, -0.196667, 0.103333],
}
QUANTILES = [  # of three experts, for six tokens
    [0.91, 0.84, 0.73, 0.66, 0.95, 0.33],
    [0.62, 0.31, 0.65, 0.27, 0.56, 0.45],
    [0.23, 0.52, 0.18, 0.44, 0.47, 0.36],
]
REFUSED = {
    "groups.number": {"groups": {"number": 3, "kept": 1}},
    "groups.kept": {"k": 3, "groups": {"number": 2, "kept": 1}},
    "groups.per_group": {"groups": {"number": 2, "kept": 2, "per_group": 3}},
    "start": {"start": "orthonormal"},
}


def identity_router(experts, **settings):
    router = router_of(experts, experts, **settings)
    router.weight.data = torch.eye(experts)
    return router


def choices(record):
    return [row.nonzero().flatten().tolist() for row in record.chosen.flatten(0, 1)]


def test_sigmoid_gates_are_renormalised_and_scaled():
    # σ(1, −½, ¼, 2) = .731059, .377541, .562177, .880797; of 3 and 0: over 1.611856, times 2.5.
    router = identity_router(4, k=2, scale=2.5, **SIGMOID)
    plan, record = router(torch.tensor([[[1.0, -0.5, 0.25, 2.0]]]))
    torch.testing.assert_close(plan.weights.flatten(), torch.tensor([1.366123, 1.133877]))
    expected = torch.tensor([0.286513, 0.147964, 0.220325, 0.345198])
    torch.testing.assert_close(record.probs.flatten(), expected, atol=1e-6, rtol=0)
    assert choices(record) == [[0, 3]]


@pytest.mark.parametrize("score", ["sigmoid", "sqrt_softplus"])
def test_scores_that_vanish_leave_finite_gradients(score):
    router = identity_router(3, k=2, score=score, renormalise=True)
    router.eval()
    tokens = torch.full((1, 1, 3), -300.0, requires_grad=True)
    _, record = router(tokens)
    assert torch.equal(record.probs.flatten(), torch.full((3,), 1 / 3))
    (gradient,) = torch.autograd.grad((record.combine + record.probs).sum(), tokens)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("rule", RULES)
def test_a_bias_moves_the_choice_against_the_load_and_no_weight(rule):
    balance = {"kind": "loss_free", "rate": 0.01, "rule": rule, "until": 0.5}
    router = identity_router(4, k=2, balance=balance, **SIGMOID)
    router.balance.bias.copy_(torch.tensor([0, 0, -0.2, 0.1]))
    plan, record = router(torch.logit(SCORES))
    assert choices(record) == [[0, 2], [0, 1], [0, 3]]  # the third by its bias; counts 3, 1, 1, 1
    assert torch.equal(record.load, record.chosen.float())
    weights = [[0.529412, 0.470588], [0.517241, 0.482759], [0.483871, 0.516129]]
    torch.testing.assert_close(plan.weights[0], torch.tensor(weights), atol=1e-6, rtol=0)
    before = router.balance.bias.clone()
    router.eval().after_step([record], 0, 0.0)
    router.train().after_step([record], 0, 0.5)
    assert torch.equal(router.balance.bias, before)  # evaluation, and the time after `until`
    router.after_step([record], 0, 0.0)
    torch.testing.assert_close(router.balance.bias, torch.tensor(RULES[rule]), atol=1e-6, rtol=0)
    assert not compute_bias_change(torch.tensor([3, 3, 3]), rule).any(), "an even load moves none"


@pytest.mark.parametrize(
    ("router", "weights"),
    [
        (TopKSoftmax(balance=BIAS), [0, 0.75, 0, 0.25]),
        (Competition(**COMPETITION, balance=BIAS), [0, 0.75, 0, 0.25]),
        (TopP(threshold=0.35, balance=BIAS), [0, 0.3, 0, 0.1]),  # .1, then .3: .4 > .35
    ],
    ids=lambda one: getattr(one, "kind", ""),
)
def test_other_routers_choose_by_a_bias_too(router, weights):
    # .4 .3 .2 .1 and the bias: .15 .3 .2 .35, so 3 and 1 come first. They have more than half a
    # token each, the others less.
    module = router.build(4, 4).train()
    module.weight.data = torch.eye(4)
    if isinstance(router, TopKSoftmax):
        module.bias.data.zero_()
    module.balance.bias.copy_(torch.tensor([-0.25, 0, 0, 0.25]))
    _, record = module(torch.tensor([[[0.4, 0.3, 0.2, 0.1]]]).log())
    torch.testing.assert_close(record.combine.flatten(), torch.tensor(weights))
    module.after_step([record], 0, 0.0)
    torch.testing.assert_close(module.balance.bias, torch.tensor([-0.15, -0.1, 0.1, 0.15]))


def test_a_step_of_competition_teaches_the_bias_who_won():
    router = Competition(**COMPETITION | {"k": 1, "diversity_weight": 0.0}, balance=BIAS)
    module = router.build(2, 3).train()
    outputs = torch.tensor([[[[0.0, 0], [1, 1], [5, 5]]]])
    _, record = module(torch.zeros(1, 1, 2), RoutingContext(outputs=outputs))
    module.after_step([record], 0, 0.0)
    torch.testing.assert_close(module.balance.bias, torch.tensor([0.1, 0.1, -0.1]))
    with pytest.raises(UserError, match="^router.balance.kind: found sinkhorn"):
        Competition(**COMPETITION, balance={"kind": "sinkhorn"}).check_causal()


def test_quantiles_give_each_expert_its_share_at_the_tokens_cuts():
    # The second largest of score + bias: .62 .42 .65 .34 .56 .43. An even share is 2 tokens, so the
    # place is 2.5: expert 0 needs −.39 and −.32 at places 2 and 3, their middle is −.355.
    scores, bias = torch.tensor(QUANTILES).T, torch.tensor([0.1, 0, -0.1])
    needed = quantile.quantile_biases(scores, bias, 1)
    torch.testing.assert_close(needed, torch.tensor([-0.355, 0, -0.015]))
    router = identity_router(3, k=1, balance={"kind": "quantile"}, **SIGMOID)
    router.balance.bias.copy_(bias)
    _, record = router.train()(torch.logit(scores)[None])
    assert record.chosen.sum(dim=(0, 1)).tolist() == [5, 1, 0]
    router.after_step([record], 0, 0.0)
    new = torch.tensor([-0.231667, 0.123333, 0.108333])  # less their mean
    torch.testing.assert_close(router.balance.bias, new, atol=1e-6, rtol=0)
    assert router(torch.logit(scores)[None])[1].chosen.sum(dim=(0, 1)).tolist() == [1, 3, 2]
    cut = torch.tensor([0.62, 0.42, 0.65, 0.34, 0.56, 0.43])[:, None]
    at_cut = (scores + needed > cut + 1e-6).sum(dim=0)
    assert at_cut.tolist() == [2, 1, 2]  # expert 1's tokens have the cut at itself: a tie
    # a share of the old bias, 0 at first, may stay
    router = identity_router(3, k=1, balance={"kind": "quantile", "decay": 0.75}, **SIGMOID)
    needed = quantile.quantile_biases(scores, torch.zeros(3), 1)
    router.train().after_step([router(torch.logit(scores)[None])[1]], 0, 0.0)
    torch.testing.assert_close(router.balance.bias, 0.25 * (needed - needed.mean()))


def test_a_plan_chooses_in_training_and_logits_in_evaluation():
    # The plan's experts have ½ each: factors e^−.407418 and e^.407418 up to one for both.
    factors = sinkhorn.expert_factors(AFFINE[None].double(), 1e-4, 100)[0].log()
    centred = (factors - factors.mean()).float()
    torch.testing.assert_close(centred, torch.tensor([-0.407418, 0.407418]), atol=1e-6, rtol=0)
    plan = (AFFINE + factors).softmax(dim=-1).float() / 4
    of_first = torch.tensor([0.191467, 0.13654, 0.105484, 0.066509])
    expected = torch.stack([of_first, 0.25 - of_first], dim=-1)
    torch.testing.assert_close(plan, expected, atol=1e-5, rtol=0)
    router = identity_router(2, k=1, score="sigmoid", noise_std=0.0, balance={"kind": "sinkhorn"})
    plan, record = router.train()(AFFINE[None])
    assert choices(record) == [[0], [0], [1], [1]]
    weights = torch.tensor([0.880797, 0.731059, 0.5, 0.549834])
    torch.testing.assert_close(plan.weights.flatten(), weights, atol=1e-6, rtol=0)
    assert choices(router.eval()(AFFINE[None])[1]) == [[0], [0], [0], [1]]


def test_each_group_of_images_has_a_plan_and_ends_by_itself():
    router = router_of(4, k=1, noise_std=0.0, balance={"kind": "sinkhorn", "group_size": 2})
    tokens = torch.randn(5, 12, 4) * torch.tensor([1.0, 1, 3, 3, 5])[:, None, None]
    whole = router.train()(tokens)[1].chosen
    for part in (slice(0, 2), slice(2, 4), slice(4, 5)):
        assert torch.equal(router(tokens[part])[1].chosen, whole[part])
    used = whole[:4].unflatten(0, (2, 2)).sum(dim=(1, 2)) / 24
    assert (used - 0.25).abs().max() < 0.13  # rounded to whole choices; without a plan 0.3


@pytest.mark.parametrize(
    ("per_group", "groups", "chosen"), [(2, [2, 0], [0, 5, 4]), (1, [0, 1], [0, 3, 2])]
)
def test_a_token_chooses_within_its_best_groups(per_group, groups, chosen):
    # Sums of a pair's two best: 1, .8, 1.05; the best alone: .9, .6, .55. Without groups 0, 3, 5.
    scores = torch.tensor([[[0.9, 0.1, 0.2, 0.6, 0.5, 0.55]]])
    limited = GroupLimitedChoice(number=3, kept=2, per_group=per_group).limit_scores(scores, 3)
    assert top_k(limited, 3).flatten().tolist() == chosen
    inside = {place // 2 for place in limited.isfinite().flatten().nonzero().flatten().tolist()}
    assert inside == set(groups) and top_k(scores, 3).flatten().tolist() == [0, 3, 5]


def test_groups_are_of_biased_scores_and_the_layer_is_their_weighted_sum():
    balance = {"kind": "loss_free"}
    layer = reference.layer_of(NoisyTopK(groups={"number": 2, "kept": 1}, balance=balance)).train()
    layer.router.balance.bias.copy_(torch.tensor([0.0, 0, 0.3, 0.3]))
    tokens = torch.randn(3, 7, 8, requires_grad=True)
    _, (record,) = layer(tokens)
    assert all(row in ([0, 1], [2, 3]) for row in choices(record))
    slow = lambda values: reference.weighted_sum(layer, values, layer(values)[1][0].combine)
    layer.eval()  # no noise: both calls choose alike
    reference.assert_like(layer, tokens, slow)


def test_jitter_moves_what_the_router_sees_and_no_loss():
    # (1, −2) times (.95, 1.08) by rows (½, ¼), (−¼, 1): −.065 and −2.3975; clean 0 and −2.25.
    router = router_of(2, 2, k=1, noise_std=0.0, input_jitter=0.1)
    router.weight.data = torch.tensor([[0.5, 0.25], [-0.25, 1.0]])
    moved = router.logits(torch.tensor([[[1.0, -2.0]]]) * torch.tensor([0.95, 1.08]))
    torch.testing.assert_close(moved, torch.tensor([[[-0.065, -2.3975]]]))
    tokens = torch.randn(4, 50, 2)
    torch.manual_seed(5)
    plan, record = router.train()(tokens)
    torch.manual_seed(5)
    jittered = router.logits(tokens * (1 + 0.1 * (2 * torch.rand_like(tokens) - 1)))
    torch.testing.assert_close(record.logits, router.logits(tokens))
    torch.testing.assert_close(record.probs, router.logits(tokens).softmax(dim=-1))
    torch.testing.assert_close(plan.weights, jittered.softmax(dim=-1).amax(dim=-1, keepdim=True))
    assert torch.equal(router.eval()(tokens)[1].combine.amax(-1), record.probs.amax(-1))


@pytest.mark.parametrize("balance", [{"kind": "loss_free", "rate": 0.01}, {"kind": "quantile"}])
def test_a_load_of_unlike_experts_becomes_even_by_steps(balance):
    layer = reference.layer_of(NoisyTopK(k=2, balance=balance, **SIGMOID)).train()
    with torch.no_grad():
        layer.router.weight[0] += 0.7
    tokens = torch.randn(16, 32, 8) + 0.5
    uneven = []
    for _ in range(60):
        _, (record,) = layer(tokens)
        counts = record.chosen.sum(dim=(0, 1))
        uneven.append(float(counts.max() / 256 - 1))  # the field's MaxVio
        update_routers(layer, [record])
    assert uneven[0] > 0.4 and uneven[-1] < 0.1
    with pytest.raises(UserError, match="^records: found 0 for 1 MoE layers; allowed: "):
        update_routers(layer, [])


@pytest.mark.parametrize("balance", [{"kind": "loss_free", "rate": 0.01}, {"kind": "quantile"}])
def test_accumulated_passes_teach_routers_what_one_batch_does(balance):
    layer = reference.layer_of(NoisyTopK(k=2, balance=balance, **SIGMOID)).train()
    model = torch.nn.ModuleList([layer, copy.deepcopy(layer)])  # two layers of one model
    tokens = torch.randn(2, 12, 5, 8) + 0.5

    def records_of(part):
        return [layer(inputs[part])[1][0] for layer, inputs in zip(model, tokens, strict=True)]

    twin = copy.deepcopy(model)
    update_routers(twin, records_of(slice(None)))
    update_routers(model, [records_of(slice(0, 4)), records_of(slice(4, 12))])
    for ours, theirs in zip(model, twin, strict=True):
        assert ours.router.balance.bias.any()
        torch.testing.assert_close(ours.router.balance.bias, theirs.router.balance.bias)
    with pytest.raises(UserError, match="^records: found 1 for 2 MoE layers; allowed: .* a list"):
        update_routers(model, [records_of(slice(0, 4)), records_of(slice(4, 12))[:1]])


def test_a_frozen_router_keeps_its_bias():
    inner = NoisyTopK(balance={"kind": "loss_free"})
    router = FrozenCopy(router=inner, until=0.5).build(4, 4).train()
    for progress, moves in ((0.0, True), (0.5, False)):
        before = router.balance.bias.clone()
        _, record = router(torch.randn(2, 9, 4), RoutingContext(progress=progress))
        router.after_step([record], 0, progress)
        assert torch.equal(router.balance.bias, before) != moves


def test_rows_that_start_orthonormal_have_no_weight_decay():
    method = Method(router=NoisyTopK(start="orthonormal"), experts={"kind": "mlp", "number": 4})
    model = task(method).model
    groups = build_optimizer(model, SETTINGS).param_groups
    for layer in (block.mlp for block in model.blocks if hasattr(block.mlp, "router")):
        rows = layer.router.weight
        torch.testing.assert_close(rows @ rows.T, torch.eye(4), atol=1e-6, rtol=0)
        (of_rows,) = (one for one in groups if any(rows is each for each in one["params"]))
        assert of_rows["weight_decay"] == 0.0


@pytest.mark.parametrize("key", REFUSED)
def test_what_does_not_fit_the_experts_is_refused(key):
    with pytest.raises(UserError, match=rf"^router\.{key}: found .*; allowed: "):
        NoisyTopK(**REFUSED[key]).build(3, 4)
    with pytest.raises(UserError, match=rf"^router\.router\.{key}: found .*; allowed: "):
        FrozenCopy(router=NoisyTopK(**REFUSED[key])).build(3, 4)


def test_what_cannot_stand_together_is_refused():
    groups = {"number": 2, "kept": 2}
    for kind in ("quantile", "sinkhorn"):
        with pytest.raises(ValidationError, match=f"found a balance of kind {kind} with"):
            NoisyTopK(balance={"kind": kind}, groups=groups)
    with pytest.raises(UserError, match=r"^router\.balance\.kind: found sinkhorn"):
        NoisyTopK(balance={"kind": "sinkhorn"}).check_causal()
    few = router_of(4, k=1, balance={"kind": "quantile"})
    with pytest.raises(UserError, match="^router.balance: found a step of 3 tokens"):
        few.after_step([few.train()(torch.randn(1, 3, 4))[1]], 0, 0.0)
    all_chosen = router_of(4, k=4, balance={"kind": "quantile"})
    with pytest.raises(UserError, match="^router.k: found 4, .*; allowed: 1 to 3"):
        all_chosen.after_step([all_chosen.train()(torch.randn(1, 3, 4))[1]], 0, 0.0)
