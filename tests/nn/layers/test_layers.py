import pytest
import torch
from torch.func import functional_call, functionalize, grad, jacrev, jvp, linearize, vjp, vmap
from torch.nn.functional import scaled_dot_product_attention

from moecore.core.files import UserError
from moecore.experts import Eigen, Mlp
from moecore.nn.layers import block
from moecore.nn.layers.lipschitz_lemma import soften_model
from moecore.nn.layers.moe import MoELayer, MoESettings
from moecore.nn.layers.patch_embed import resize_positions
from moecore.nn.routing_collection import routing_collector
from moecore.routers import Dynamic, Eigenbasis, FrozenCopy, Hash, NoisyTopK, Relu, TeacherRouted
from moecore.training.teachers.timm import define_missing_operators
from tests.attacks.models import vit
from tests.nn.routers import reference

KINDS = ("soft_slots", "expert_choice", "hash", "top_k_softmax", "eigenbasis")
ROUTERS = [{"kind": kind} for kind in KINDS]
CAPPED = {"k": 2, "capacity_factor": 0.5}
SETTINGS = [{"k": 1}, {"k": 4}, CAPPED, CAPPED | {"batch_priority": True, "group_size": 2}]
EXPERTS = Mlp(number=4, hidden_ratio=1.0)


def test_explicit_attention_equals_the_fused_kernel_with_gradients():
    query, key, value = (torch.randn(2, 3, 7, 5, requires_grad=True) for _ in range(3))
    ours = block.softmax_attention(query, key, value)
    theirs = scaled_dot_product_attention(query, key, value)
    torch.testing.assert_close(ours, theirs)
    found = (torch.autograd.grad(one.square().sum(), (query, key, value)) for one in (ours, theirs))
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_special_tokens_stay_and_a_constant_grid_stays_constant(mode):
    positions = torch.cat([torch.full((1, 2, 4), 7.0), torch.full((1, 9, 4), 3.0)], dim=1)
    resized = resize_positions(positions, prefix=2, size=(5, 5), mode=mode)
    assert resized.shape == (1, 27, 4)
    torch.testing.assert_close(resized[:, :2], positions[:, :2])
    torch.testing.assert_close(resized[:, 2:], torch.full((1, 25, 4), 3.0))


def test_a_row_gradient_runs_along_rows():
    # a 2×2 grid holding 0, 0 / 1, 1; bilinear to 4×4 with half-pixel centres: rows at 0, 1/4, 3/4,
    # 1
    positions = torch.tensor([0.0, 0.0, 1.0, 1.0]).view(1, 4, 1)
    resized = resize_positions(positions, prefix=0, size=(4, 4)).view(4, 4)
    expected = torch.tensor([0.0, 0.25, 0.75, 1.0]).view(4, 1).expand(4, 4)
    torch.testing.assert_close(resized, expected)
    # the same size is untouched, and no square is refused
    positions = torch.randn(1, 5, 3)
    assert resize_positions(positions, prefix=1, size=(2, 2)) is positions
    with pytest.raises(ValueError, match="5 position embeddings do not form a grid"):
        resize_positions(torch.randn(1, 6, 3), prefix=1, size=(2, 2))


def images(number: int = 3) -> torch.Tensor:
    return torch.rand(number, 1, 8, 8, generator=torch.Generator().manual_seed(1))


def test_equals_the_true_model_where_all_experts_are_chosen():
    for k, atol in ((3, 1e-5), (1, 1e-2)):
        model = vit({"kind": "noisy_top_k", "k": k})
        soft, hard = soften_model(model)(images()).prediction, model(images()).prediction
        assert torch.allclose(soft, hard, atol=atol) == (k == 3)


def test_a_layer_is_the_weighted_sum_of_all_experts():
    model = vit({"kind": "noisy_top_k", "k": 1})
    layer = soften_model(model).blocks[0].mlp
    tokens = torch.randn(2, 5, 16)
    found, (record,) = layer(tokens)
    probs = torch.softmax(tokens @ model.blocks[0].mlp.router.weight.T, dim=-1)
    expected = reference.weighted_sum(layer, tokens, probs)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert record.chosen.all() and torch.equal(record.combine, record.probs)
    (gradient,) = torch.autograd.grad(found.square().sum(), layer.experts.up)
    assert gradient.flatten(1).any(dim=1).all(), "it goes through every expert"


@pytest.mark.parametrize("router", ROUTERS, ids=lambda router: router["kind"])
def test_every_router_has_a_surrogate(router):
    model = vit(router)
    found = soften_model(model)(images()).prediction
    assert torch.isfinite(found).all()
    if router["kind"] == "soft_slots":
        assert torch.equal(found, model(images()).prediction)


def test_a_dropped_branch_keeps_its_expectation_its_scale_and_timms_rates():
    torch.manual_seed(0)
    found = block.DropPath(0.25).train()(torch.ones(20_000, 3, 2))
    each = found[:, :1, :1]
    assert torch.equal(found, each.expand_as(found))  # one draw a sample
    assert torch.equal(each.unique(), torch.tensor([0.0, 1 / 0.75]))
    assert found.mean().item() == pytest.approx(1, abs=0.02)  # standard error 0.004
    # 1 / 0.9 in bfloat16 would be 1.109375
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = block.DropPath(0.1).train()(torch.ones(100, 1, 1, dtype=torch.bfloat16))
    assert found.max().item() == pytest.approx(1 / 0.9, rel=1e-6)
    assert block.drop_path_rates(0.3, 4) == pytest.approx([0, 0.1, 0.2, 0.3])
    for depth in (1, 2, 12):
        assert block.drop_path_rates(0.1, depth) == pytest.approx(
            torch.linspace(0, 0.1, depth).tolist()
        )


def test_both_branches_of_a_block_drop_as_timms_do():
    ours = block.Block(8, block.Attention(8, 2), block.DenseMlp(8, 16), drop_path=0.5).train()
    define_missing_operators()
    from timm.models.vision_transformer import Block as Theirs

    theirs = Theirs(8, 2, mlp_ratio=2, qkv_bias=True, drop_path=0.5).train()
    theirs.norm1.eps = theirs.norm2.eps = 1e-6
    theirs.load_state_dict(ours.state_dict())
    tokens = torch.randn(64, 3, 8)
    torch.manual_seed(3)
    found = ours(tokens)[0]
    torch.manual_seed(3)
    torch.testing.assert_close(found, theirs(tokens))
    untouched = (found == tokens).flatten(1).all(dim=1)
    assert 0 < untouched.sum() < 64  # where both branches were left out


def mask_loop(layer, tokens):
    """Every expert computes the tokens that a boolean mask picks; weights from the record."""
    combine = layer.router(tokens)[1].combine
    outputs = torch.zeros_like(tokens)
    for expert in range(combine.shape[-1]):
        chosen = combine[..., expert] > 0
        answer = reference.expert_output(layer, expert, tokens[chosen])
        outputs[chosen] = outputs[chosen] + combine[..., expert][chosen].unsqueeze(-1) * answer
    return outputs


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("width", [8, 6])  # grouped_mm, and the fallback
def test_outputs_and_all_gradients_agree_with_the_mask_loop(settings, width):
    layer = reference.layer_of(NoisyTopK(**settings), width).train()
    tokens = torch.randn(3, 7, width, requires_grad=True)
    reference.assert_like(layer, tokens, lambda values: mask_loop(layer, values))


def test_bf16_autocast_stays_close_to_fp32_and_routes_alike():
    layer = reference.layer_of(NoisyTopK(), 32).eval()
    tokens = torch.randn(4, 20, 32, requires_grad=True)
    inputs = [tokens, *layer.parameters()]
    expected, theirs = reference.outputs_and_gradients(lambda: layer(tokens)[0], inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        combine = layer(tokens)[1][0].combine
        actual, ours = reference.outputs_and_gradients(lambda: layer(tokens)[0], inputs)
    assert actual.dtype == torch.bfloat16 and torch.equal(combine, layer(tokens)[1][0].combine)
    assert (actual - expected).norm() < 0.02 * expected.norm()
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == torch.float32 and (mine - other).norm() < 0.03 * other.norm()


def test_functional_transforms_see_the_same_gradient():
    layer = reference.layer_of(NoisyTopK()).eval()
    tokens = torch.randn(2, 5, 8)
    parameters = dict(layer.named_parameters())
    loss = lambda parameters: functional_call(layer, parameters, (tokens,))[0].square().mean()
    expected = torch.autograd.grad(loss(parameters), list(parameters.values()))
    for ours, theirs in zip(grad(loss)(parameters).values(), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def moe(blocks):
    return MoESettings(router=NoisyTopK(), experts=Mlp(), blocks=blocks)


def test_blocks():
    assert moe("every_2").indices(6) == (1, 3, 5)
    assert moe("last_2").indices(8) == (5, 7)  # "6, 8" of 8 blocks, counted from 1
    assert moe("last_2").indices(7) == (3, 5) and moe([7, 9, 11]).indices(12) == (7, 9, 11)
    assert moe([3, 1]).indices(4) == (1, 3)


@pytest.mark.parametrize(
    "blocks, depth", [("last_2", 3), ("every_2", 1), ([4], 4), ([-1], 4), ([1, 1], 4), ([], 4)]
)
def test_blocks_that_a_model_lacks_are_refused(blocks, depth):
    with pytest.raises(UserError, match=f"{depth} blocks"):
        moe(blocks).indices(depth)


def alone(**router) -> MoELayer:
    torch.manual_seed(0)
    return MoELayer(8, NoisyTopK(**router), EXPERTS)


@pytest.mark.parametrize(
    ("shape", "recorded"), [((6, 8), (1, 6)), ((2, 3, 8), (2, 3)), ((2, 3, 5, 8), (2, 15))]
)
def test_tokens_keep_their_shape_and_leave_a_record(shape, recorded):
    layer = alone(k=4, renormalise=True).eval()
    tokens = torch.randn(shape)
    with routing_collector(layer) as records:
        output = layer(tokens)
    assert output.shape == shape
    (record,) = records
    assert record.probs.shape == (*recorded, 4)
    # all four are chosen: each token is the weighted sum of all experts on it
    weights = record.combine.reshape(*shape[:-1], 4)
    torch.testing.assert_close(output, reference.weighted_sum(layer.feed_forward, tokens, weights))


def test_of_torch_func_gradients_work_and_other_transforms_are_refused():
    layer, tokens = alone(k=2).eval(), torch.randn(3, 8)
    loss = lambda tokens: layer(tokens).square().sum()
    expected = torch.autograd.functional.jacobian(layer, tokens)
    torch.testing.assert_close(jacrev(layer)(tokens), expected)
    output, pull_back = vjp(layer, tokens)
    torch.testing.assert_close(pull_back(2 * output)[0], grad(loss)(tokens))
    refused = {
        "Vmap": lambda: vmap(grad(loss))(tokens[None]),
        "Jvp": lambda: jvp(layer, (tokens,), (tokens,)),
        "Trace": lambda: linearize(layer, tokens),
        "Functionalize": lambda: functionalize(layer)(tokens),
    }
    for name, transform in refused.items():
        with pytest.raises(UserError, match=f"^MoELayer: found {name} of torch.func; allowed: "):
            transform()


@pytest.mark.parametrize(
    ("tokens", "problem"),
    [
        (torch.randn(8), r"found torch.float32 of shape \(8,\)"),
        (torch.randn(2, 3, 7), r"of shape \(2, 3, 7\); allowed: .* \(B, T, 8\)"),
        (torch.zeros(2, 8, dtype=torch.uint8), "found torch.uint8"),
    ],
)
def test_other_tokens_are_refused_in_one_line(tokens, problem):
    with pytest.raises(UserError, match=f"^tokens: .*{problem}"):
        alone()(tokens)


@pytest.mark.parametrize(
    ("router", "reads"),
    [
        (Hash(), "which reads patches;"),
        (Eigenbasis(), "which reads attention, basis;"),
        (TeacherRouted(), "which reads teacher;"),
        (FrozenCopy(), "which reads the training's progress;"),
        (Relu(), "whose loss adaptive_l1 reads"),
        (Dynamic(), "whose loss diversity_simplicity reads"),
    ],
)
def test_a_router_that_reads_more_than_tokens_or_records_is_refused(router, reads):
    with pytest.raises(UserError, match=f"^router: found {router.kind}, {reads}"):
        MoELayer(8, router, EXPERTS)


def test_experts_lend_their_bases():
    layer = MoELayer(8, Eigenbasis(context="learned"), Eigen(number=4))
    with routing_collector(layer) as records:
        layer(torch.randn(5, 8)).sum().backward()
    assert records[0].probs.shape == (1, 5, 4) and layer.feed_forward.experts.basis.grad.any()


def test_records_are_collected_inside_the_with_in_the_order_of_the_calls():
    model = torch.nn.Sequential(alone(k=1), alone(k=2))
    with routing_collector(model) as records:
        model(torch.randn(5, 8))
        with routing_collector(model[1]) as inner:
            model(torch.randn(3, 8))
    model(torch.randn(5, 8))
    chosen = [(len(one.chosen[0]), int(one.chosen[0, 0].sum())) for one in (*records, *inner)]
    assert chosen == [(5, 1), (5, 2), (3, 1), (3, 2)]
    assert all(layer.records is None for layer in model)


def test_a_compiled_model_leaves_records_too():
    compiled = torch.compile(torch.nn.Sequential(torch.nn.Linear(8, 8), alone()), backend="eager")
    compiled(torch.randn(5, 8))
    for _ in range(2):
        with routing_collector(compiled) as records:
            compiled(torch.randn(5, 8))
        assert len(records) == 1 and records[0].probs.requires_grad


def test_a_model_of_ours_is_traced_and_a_dense_one_is_not():
    images = torch.rand(2, 1, 8, 8)
    model = vit({"kind": "noisy_top_k"}).eval()
    with routing_collector(model) as records:
        output = model(images)
    assert len(records) == len(output.routing) > 0
    assert all(ours is theirs for ours, theirs in zip(records, output.routing, strict=True))
    for model in (torch.nn.Linear(8, 8), vit(None)):
        with pytest.raises(UserError, match="^trace: .* has no known router; allowed: "):
            with routing_collector(model):
                pass


def test_images_of_bytes_are_refused():
    with pytest.raises(UserError, match="^images: found torch.uint8; allowed: .*divide .* by 255"):
        vit(None)(torch.zeros(2, 1, 8, 8, dtype=torch.uint8))
    with pytest.raises(UserError, match=r"^images: found values up to 255; allowed: .*\[0, 1\]"):
        vit(None)(torch.full((2, 1, 8, 8), 255.0))
