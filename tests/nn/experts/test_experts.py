import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch.nn.functional import gelu, linear, relu

from moecore.backbones import MoESettings, Swin, Vit
from moecore.conformance.targets import draw_weights
from moecore.core.files import UserError
from moecore.core.routing_records import RoutingContext, RoutingRecord
from moecore.experts import Eigen, Mlp
from moecore.measure.cost import whole_and_routing_flops
from moecore.nn.dispatch import Rows, SparsePlan, single_expert_rows
from moecore.nn.experts.base import ZeroComputation, default_rank
from moecore.nn.predict import meta_device_context
from moecore.routers import Competition, ExpertChoice, FrozenCopy, NoisyTopK, SoftSlots
from moecore.testing.check_helpers import IMAGE
from moecore.training.regularizers import zero_computation_balance
from moecore.training.regularizers.zero_computation_balance import ZeroComputationBalance
from tests.training.small import step

# expert 0 has rows 0 and 1, expert 1 none, expert 2 the others
OFFSETS = torch.tensor([2, 2, 6], dtype=torch.int32)
OF_ROW = [0, 0, 2, 2, 2, 2]
VIT = Vit(patch=2, width=8, depth=2, heads=2)


def experts_of(width=8, seed=0, **settings):
    """Experts in fp64 with every parameter drawn, so that none is 0 or 1 by chance of the start."""
    torch.manual_seed(seed)
    experts = Eigen(number=3, **settings).build(width).double()
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    return experts


def first_map(experts):
    """W1 (E, h, d), as the paper writes it: U diag(s) Bᵀ."""
    return experts.up.mT @ torch.diag_embed(experts.scale) @ experts.basis.mT


def off_orthonormal(basis):
    return (basis.mT @ basis - torch.eye(basis.shape[-1]).to(basis)).abs().max().item()


@pytest.mark.parametrize("factored", [False, True])
def test_each_expert_is_its_own_mlp_of_w1_and_w2(factored):
    experts = experts_of(rank=4, hidden_ratio=2.0, factored_output=factored)
    rows = torch.randn(6, 8, dtype=torch.float64)
    outputs = experts(Rows(rows, OFFSETS))
    for row, e in enumerate(OF_ROW):
        hidden = gelu(first_map(experts)[e] @ rows[row] + experts.up_bias[e])
        if factored:
            hidden = experts.down_inner[e].T @ hidden
        torch.testing.assert_close(outputs[row], experts.down[e].T @ hidden + experts.down_bias[e])


def test_start():
    # Entries of both maps have std 0.02, as the plain mlp's; B has orthonormal columns; s is 1,
    # biases are 0.
    for factored in (False, True):
        experts = Eigen(number=4, rank=32, hidden_ratio=3.0, factored_output=factored).build(96)
        second = experts.down_inner @ experts.down if factored else experts.down
        for weights in (first_map(experts), second):
            assert weights.std().item() == pytest.approx(0.02, rel=0.05)
        assert off_orthonormal(experts.basis) < 1e-5 and (experts.scale == 1).all()
        assert not experts.up_bias.any() and not experts.down_bias.any()
        assert not torch.equal(experts.basis[0], experts.basis[1])
        assert experts.up.shape == (4, 32, 288) and second.shape == (4, 288, 96)


def test_default_rank_and_its_saving():
    # 768·2/3 = 512 exactly; 64·2/3 = 42.7 down to 40; 12·2/3 = 8; never below 8, above 512 or above
    # the width.
    assert [default_rank(width) for width in (768, 64, 12, 8, 5, 1024)] == [512, 40, 8, 8, 5, 512]
    # V-MoE of table S2: 6 layers of 8 experts, 284.9 million parameters. With both maps factored at
    # rank 512 each map of an expert has 512·(768 + 3072) instead of 768·3072 weights, so
    # 48·2·393216 = 37.7 million fewer (and 48·512 scales): 247.2.
    count = lambda experts: sum(parameter.numel() for parameter in experts.parameters())
    with torch.device("meta"):
        plain = Mlp().build(768)
        eigen = Eigen(factored_output=True).build(768)
    saved = 6 * (count(plain) - count(eigen))
    assert saved == 48 * (2 * 393216 - 512) and round(284.9 - saved / 1e6, 1) == 247.2
    with pytest.raises(UserError, match="experts.rank is 9, but tokens are 8 wide"):
        Eigen(rank=9).build(8)
    assert Eigen(rank=8).build(8).basis.shape == (8, 8, 8)


def test_reorthonormalising_by_hand():
    # B = [[2, 2], [0, 1]]: Q = I and R = [[2, 2], [0, 1]], both with positive diagonal. With
    # s = (1, −3), Uᵀ = [[3, 0], [0, 4]] the new diag(s)Uᵀ is R [[3, 0], [0, −12]] = [[6, −24], [0,
    # −12]]. Its rows have lengths 6·sqrt(17) and 12, U's had 3 and 4: s = (2·sqrt(17), −3), since s
    # keeps its sign, and Uᵀ's rows are the new ones over that: (6, −24)/(2·sqrt(17)), (0, 4).
    experts = Eigen(number=2, rank=2, hidden_ratio=1.0).build(2)
    root = 17**0.5
    expected = {
        "basis": ([[2.0, 2], [0, 1]], [[1.0, 0], [0, 1]]),
        "scale": ([1.0, -3], [2 * root, -3.0]),
        "up": ([[3.0, 0], [0, 4]], [[3 / root, -12 / root], [0.0, 4.0]]),
    }
    for name, (before, _) in expected.items():
        getattr(experts, name).data = torch.tensor([before, before])
    experts.reorthonormalise()
    for name, (_, after) in expected.items():
        torch.testing.assert_close(getattr(experts, name).data, torch.tensor([after, after]))


@given(seed=st.integers(0, 999), rank=st.integers(1, 8), worst=st.floats(0, 8))
@settings(max_examples=40, deadline=None)
def test_reorthonormalising_leaves_the_function_and_is_done_after_once(seed, rank, worst):
    experts = experts_of(rank=rank, seed=seed).float()
    # condition numbers up to 1e8: the columns lean on the first one, at lengths that differ
    with torch.no_grad():
        experts.basis[:] = experts.basis[..., :1] + experts.basis * torch.logspace(0, -worst, rank)
    rows = torch.randn(6, 8)
    old = first_map(experts.double())
    outputs = experts(Rows(rows.double(), OFFSETS))
    experts.float().reorthonormalise()
    once = {name: value.clone() for name, value in experts.state_dict().items()}
    assert off_orthonormal(experts.basis) < 1e-6
    experts.reorthonormalise()
    for name, value in experts.state_dict().items():
        torch.testing.assert_close(value, once[name], atol=1e-5, rtol=1e-5)
    experts.double()
    for now, was in ((first_map(experts), old), (experts(Rows(rows.double(), OFFSETS)), outputs)):
        torch.testing.assert_close(now, was, atol=1e-5 * was.abs().max().item(), rtol=0)


def test_columns_of_zeros():
    # Expert 0: B's last column is 0, so the product's last column is 0 too: s = 0, and U keeps its
    # direction.
    # Expert 1: B's first two columns are equal; QR fills in a direction that nothing uses.
    # Expert 2: U's last column is 0; s stays, or gradients could never leave s = 0 beside U = 0.
    experts = experts_of(rank=3)
    with torch.no_grad():
        experts.basis[0, :, 2] = 0
        experts.basis[1, :, 1] = experts.basis[1, :, 0]
        experts.up[2, 2] = 0
    before = first_map(experts)
    up = experts.up.clone()
    scale = experts.scale.clone()
    experts.reorthonormalise()
    torch.testing.assert_close(first_map(experts), before)
    assert off_orthonormal(experts.basis) < 1e-12
    assert experts.scale[0, 2] == 0 and torch.equal(experts.up[0, 2], up[0, 2])
    assert experts.scale[2, 2] == scale[2, 2] and not experts.up[2, 2].any()
    assert all(parameter.isfinite().all() for parameter in experts.parameters())


def test_a_column_of_u_that_was_zero_and_is_not_any_more():
    # R mixes later columns into earlier ones: U's first column was 0 and gets some of the second.
    experts = experts_of(rank=2)
    with torch.no_grad():
        experts.up[:, 0] = 0
    before = first_map(experts)
    experts.reorthonormalise()
    torch.testing.assert_close(first_map(experts), before)
    torch.testing.assert_close(experts.up[:, 0].norm(dim=-1), torch.ones(3, dtype=torch.float64))


@pytest.mark.parametrize(("name", "activate"), [("gelu", gelu), ("linear", lambda hidden: hidden)])
def test_each_expert_is_its_own_mlp(name, activate):
    experts = Mlp(number=3, activation=name).build(8)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    values = torch.randn(6, 8)
    outputs = experts(Rows(values, OFFSETS))
    for row, expert in enumerate(OF_ROW):
        hidden = activate(linear(values[row], experts.up[expert].t(), experts.up_bias[expert]))
        expected = linear(hidden, experts.down[expert].t(), experts.down_bias[expert])
        torch.testing.assert_close(outputs[row], expected, atol=1e-4, rtol=1e-4)


def test_experts_start_apart_or_identical():
    apart = Mlp(number=3).build(8)
    same = Mlp(number=3, init="identical").build(8)
    assert not torch.equal(apart.up[0], apart.up[1])
    assert torch.equal(same.up[0], same.up[2]) and torch.equal(same.down[0], same.down[1])
    assert same.up.is_contiguous()
    with torch.no_grad():
        same.up[0].zero_()
    assert same.up[1].any()  # the copies do not share memory


def made(**settings):
    torch.manual_seed(0)
    return Mlp(number=3, hidden_ratio=2, activation="relu", init="flat", **settings).build(8)


def test_dropout_is_drawn_for_pairs_in_their_order():
    experts = made(dropout=0.5)
    chosen = torch.tensor([[[0, 2], [2, 1], [0, 1]]])
    plan = SparsePlan.build(chosen, torch.ones(1, 3, 2), None, 3)
    tokens = torch.randn(1, 3, 8)
    for training in (True, False):
        torch.manual_seed(5)
        found = plan.combine(experts.train(training)(plan.dispatch(tokens)))
        torch.manual_seed(5)
        kept = torch.empty(1, 3, 2, 16).bernoulli_(0.5) / 0.5
        expected = torch.zeros(1, 3, 8)
        for (_, token, choice), expert in zip(np.ndindex(1, 3, 2), chosen.flatten(), strict=True):
            hidden = relu(tokens[0, token] @ experts.up[expert] + experts.up_bias[expert])
            hidden = hidden * kept[0, token, choice] if training else hidden
            expected[0, token] += hidden @ experts.down[expert] + experts.down_bias[expert]
        torch.testing.assert_close(found, expected)


def test_flat_weights_lie_within_their_bound():
    experts = made()
    bound = (8 * 16) ** -0.5
    assert experts.up.shape == (3, 8, 16) and experts.down.shape == (3, 16, 8)
    for weight in (experts.up, experts.down):
        assert 0.9 * bound < weight.abs().max() <= bound
        assert abs(float(weight.std()) - bound / 3**0.5) < 0.1 * bound
    assert not experts.up_bias.any() and not experts.down_bias.any()


@pytest.mark.parametrize("router", [SoftSlots(), ExpertChoice(), FrozenCopy()])
def test_dropout_needs_single_choices(router):
    moe = MoESettings(router=router, experts=Mlp(number=3, dropout=0.5), blocks="all")
    if router.chooses_per_token:
        moe.build(8).train()(torch.rand(2, 3, 8))
    else:
        with pytest.raises(UserError, match=f"experts.dropout: found 0.5, .* {router.kind}"):
            moe.build(8)


def test_shared_and_routed_swiglu_experts_by_hand():
    # Token (1, −1). Shared: gates ½ and ½, silu(½) = .31123, times values 0 and 1: .31123 (1, 1).
    # Routed: silu(1) (1, 0) − 2 silu(−1) (0, 1) = (.731059, .537883), and silu(1) (1, −1).
    beside = Mlp(number=2, hidden_ratio=1.0, activation="swiglu", shared=1)
    router = {"kind": "noisy_top_k", "renormalise": True}
    layer = MoESettings(router=router, experts=beside).build(2)
    layer.router.weight.data = torch.tensor([[math.log(1.5), 0], [0, 0]])  # weights .6 and .4
    maps = {  # (E, d, gates and values) and (E, h, d)
        "shared": ([[[0.5, 1, 1, 1], [0, 0.5, 1, 0]]], [[[2.0, 0], [1, 1]]]),
        "experts": (
            [[[1, 0, 1, 0], [0, 1, 0, 2]], [[0, 0, 0.5, 0], [-1, 0, -0.5, 0]]],
            [[[1.0, 0], [0, 1]], [[1, -1], [0, 0]]],
        ),
    }
    for name, (up, down) in maps.items():
        module = layer.get_submodule(name)
        module.up.data, module.down.data = torch.tensor(up), torch.tensor(down)
        assert module.up_bias is None and module.down_bias is None
    output, (record,) = layer.eval()(torch.tensor([[[1.0, -1.0]]]))
    torch.testing.assert_close(record.combine.flatten(), torch.tensor([0.6, 0.4]))
    expected = torch.tensor([1.042288, 0.341536])
    torch.testing.assert_close(output.flatten(), expected, atol=1e-6, rtol=0)


def test_fine_grained_experts_have_the_same_weights():
    # 4 experts of 32 hidden numbers, 2 a token; or 15 and a shared one of 8 numbers, 7 a token.
    counts = []
    for split in ({}, {"fine": 4, "shared": 1}):
        experts = Mlp(number=4, hidden_ratio=4.0, **split)
        moe = MoESettings(router={"kind": "noisy_top_k", "k": 2}, experts=experts, blocks="all")
        layer = moe.build(8)
        number, of_one = len(layer.experts.up), layer.experts.up[0].numel() * 2
        beside = 0 if layer.shared is None else layer.shared.up.numel() * 2
        active = moe.active_share * number * of_one + beside
        counts.append((number * of_one + beside, active, layer.router.weight.numel()))
        _, (record,) = layer(torch.randn(1, 5, 8))
        assert record.chosen.sum(dim=-1).eq(layer.router.config.k).all()
        model = Vit(patch=4, width=8, depth=1, heads=2).build(IMAGE, moe)
        whole, routing = whole_and_routing_flops(model, torch.rand(2, 1, 8, 8))
        counts[-1] += (whole - routing,)
    assert counts[0][:3] == (2048, 1024, 32) and counts[1][:3] == (2048, 1024, 120)
    assert counts[0][3] == counts[1][3]


def test_experts_that_cannot_be_split_are_refused():
    router = NoisyTopK(k=1)
    divided = ({"fine": 3}, r"^experts.fine: found 3; allowed: a divisor of width 32")
    shared = ({"fine": 2, "shared": 2}, "^router.k: found 1, so 2 pieces, 2 of them shared; all")
    for split, message in (divided, shared):
        with pytest.raises(UserError, match=message):
            MoESettings(router=router, experts=Mlp(hidden_ratio=4.0, **split)).build(8)
    with pytest.raises(UserError, match="^experts.fine: found 2, but the router told has no k"):
        MoESettings(router={"kind": "told"}, experts=Mlp(fine=2)).build(8)
    for fine, shared, limit in ((2, 8, 6), (None, 4, 3)):
        with pytest.raises(ValidationError, match=f"shared: found {shared}; allowed: 0 to {limit}"):
            Mlp(number=4, fine=fine, shared=shared)


def test_a_token_that_a_capacity_drops_keeps_its_shared_expert():
    torch.manual_seed(0)
    beside = Mlp(number=2, hidden_ratio=1.0, shared=1)
    router = {"kind": "noisy_top_k", "k": 1, "capacity_factor": 0.2}
    layer = MoESettings(router=router, experts=beside).build(8).train()
    tokens = torch.randn(1, 40, 8)
    output, (record,) = layer(tokens)
    dropped = ~(record.combine > 0).any(dim=-1)
    assert dropped.sum() > 20
    expected = layer.shared(single_expert_rows(tokens))[dropped[0]]
    torch.testing.assert_close(output[dropped], expected)


def moe_of(router, **counts):
    experts = Mlp(number=2, hidden_ratio=2.0, zero_computation=ZeroComputation(**counts))
    return MoESettings(router=router, experts=experts, blocks="all")


def test_one_token_by_hand():
    # Logits (.1, .1, .8, .2, .9) + .1 (1, 0, 0, 0, 2): zero and the constant are chosen, whose
    # shares are softmax(1, −1): .253545 (.880797 (1, −1) + .119203 (.5, .5)).
    layer = moe_of(NoisyTopK(residual=True)).build(2).eval()
    token = torch.tensor([[[1.0, -1.0]]])
    layer.router.weight.data = torch.tensor([[0.1, 0.1, 0.8, 0.2, 0.9], [0.0] * 5]).T
    layer.router.residual.data = 0.1 * torch.eye(5)
    layer.zero_computation.vectors.data = torch.tensor([[0.5, 0.5]])
    layer.zero_computation.mixing.data = torch.eye(2)[None]
    output, (record,) = layer(token, RoutingContext(previous=torch.tensor([[[1.0, 0, 0, 0, 2]]])))
    torch.testing.assert_close(record.logits.flatten(), torch.tensor([0.2, 0.1, 0.8, 0.2, 1.1]))
    weights = torch.tensor([0, 0, 0.253545, 0, 0.34225])
    torch.testing.assert_close(record.combine.flatten(), weights, atol=1e-6, rtol=0)
    expected = torch.tensor([0.238434, -0.20821])
    torch.testing.assert_close(output.flatten(), expected, atol=1e-6, rtol=0)
    layer.router.weight.data[:, 0] = torch.tensor([-1.0, 1, 0, 2, 0])  # expert 1 and the copy
    layer.experts.down.data.zero_()
    layer.experts.down_bias.data = torch.tensor([[2.0, 0], [0, 3]])
    output, (record,) = layer(token)
    both = record.combine[..., 1:2] * torch.tensor([0.0, 3]) + record.combine[..., 3:4] * token
    torch.testing.assert_close(output, both)


def test_balance_by_hand():
    # f = (½, ½, ½, 0, ½) of 2 tokens, P = (.3, .225, .175, .1, .2), τ = ¾:
    # ½ (.3 + .225) + ¾ ½ (.175 + .2) = .403125.
    probs = torch.tensor([[[0.4, 0.1, 0.1, 0.1, 0.3], [0.2, 0.35, 0.25, 0.1, 0.1]]])
    chosen = torch.zeros_like(probs, dtype=torch.bool).scatter(-1, probs.topk(2).indices, True)
    leaf = probs.clone().requires_grad_()
    record = RoutingRecord(leaf, leaf, leaf, chosen, leaf)
    loss = zero_computation_balance.zero_computation_loss(record, 2, 0.75)
    assert loss.item() == pytest.approx(0.403125)
    (gradient,) = torch.autograd.grad(loss, leaf)  # η f / N
    expected = torch.tensor([0.25, 0.25, 0.1875, 0, 0.1875])
    torch.testing.assert_close(gradient, expected.expand(1, 2, 5))
    model = VIT.build(IMAGE, MoESettings(router=NoisyTopK(), experts=Mlp(), blocks="all"))
    with pytest.raises(UserError, match="^zero_computation_balance: all experts are networks; al"):
        ZeroComputationBalance(weight=1)(step(record)._replace(model=model))


@pytest.mark.parametrize("k", [1, 2])
def test_networks_compute_what_chose_them_and_no_more(k):
    torch.manual_seed(0)
    moe = moe_of(NoisyTopK(k=k), zeros=2)
    model = VIT.build(IMAGE, moe)
    draw_weights(model)
    images = torch.rand(3, 1, 8, 8)
    used = [int(one.chosen[..., :2].sum()) for one in model.eval()(images).routing]
    whole, routing = whole_and_routing_flops(model, images)
    with meta_device_context():  # without data a third of the choices: 2 of 6
        blank = VIT.build(IMAGE, moe)
    expected, aside = whole_and_routing_flops(blank, torch.empty(3, 1, 8, 8, device="meta"))
    of_pair = 4 * 8 * 16
    dense = expected - aside - 2 * 17 * k / 3 * of_pair
    assert 0 < sum(used) < 2 * 3 * 17 * k
    assert whole - routing == pytest.approx(dense + sum(used) / 3 * of_pair)
    assert moe.active_share == k / 6


def test_tokens_that_choose_no_network_and_a_compiled_layer():
    torch.manual_seed(0)
    layer = moe_of(NoisyTopK(k=2)).build(8).eval()
    draw_weights(layer)
    tokens = torch.randn(2, 9, 8, requires_grad=True)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)  # every row is computed
    for change in (0.0, -1e9):
        with torch.no_grad():
            layer.router.weight[:2, 0] += change
        outs = [run(tokens.abs())[0] for run in (layer, compiled)]
        leaves = [tokens, *layer.parameters()]
        results = [(one, *torch.autograd.grad(one.square().sum(), leaves)) for one in outs]
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs)
    assert not layer(tokens.abs())[1][0].chosen[..., :2].any() and not results[0][3].any()


def test_logits_go_from_layer_to_layer_of_equal_tokens():
    images = torch.rand(2, 1, 8, 8)
    staged = Swin(patch=1, width=8, depths=(1, 2), heads=(2, 2), window=4)
    for backbone, learns in ((VIT, [False, True]), (staged, [False, False, True])):
        models = []
        for residual in (False, True):
            torch.manual_seed(0)
            models.append(backbone.build(IMAGE, moe_of(NoisyTopK(residual=residual))).eval())
        plain, model = models
        output = model(images)
        assert torch.equal(plain(images).prediction, output.prediction)  # the maps begin at 0
        routers = [module for module in model.modules() if hasattr(module, "residual")]
        routers = [module.residual for module in routers if module.residual is not None]
        loss = output.routing[-1].logits.square().sum() + output.prediction.square().sum()
        gradients = torch.autograd.grad(loss, routers, allow_unused=True)
        assert [one is not None and bool(one.any()) for one in gradients] == learns


def test_what_goes_together_and_what_does_not():
    with pytest.raises(UserError, match="^experts.zero_computation: found .* soft_slots tokens"):
        moe_of(SoftSlots()).build(8)
    competition = Competition(router_weight=0, chosen_weight=0, diversity_weight=0)
    with pytest.raises(UserError, match="^experts.zero_computation: found some, with .* comp"):
        moe_of(competition).build(8)
    with pytest.raises(ValidationError, match="found no expert; allowed: at least one"):
        ZeroComputation(constants=0, copies=0, zeros=0)
    with pytest.raises(ValidationError, match="router.residual: found true, .*; allowed: false"):
        FrozenCopy(router=NoisyTopK(residual=True))
    with pytest.raises(UserError, match=r"^router\.k is 6, with 5"):
        moe_of(NoisyTopK(k=6)).build(8)
