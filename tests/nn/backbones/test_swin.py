import itertools
import math

import pytest
import torch
from pydantic import ValidationError

from moecore import Prepared, UserError
from moecore.core.routing_records import RoutingContext, TokenLayout
from moecore.nn.backbones.swin import Swin, SwinSettings
from moecore.nn.backbones.vit import Vit
from moecore.nn.encoded_routing import coarse_patch_indices
from moecore.nn.layers import window_attention
from moecore.parts import Classification, EncodeOptions, ImageSpec, MoESettings
from moecore.training import artifacts, runtime
from moecore.training.method import Method, aligned_teacher_blocks, initialise_guide
from moecore.training.phase_trainings import build_pretraining
from moecore.training.teachers.timm import define_missing_operators
from moecore.training.upcycle import copy_dense_into_moe, inherit_learned_windows
from tests.nn.test_every_method import SHIFTED, SWINS, swin
from tests.training.small import IMAGE, images

SMALL = swin("swin")
TOP_1 = {"kind": "noisy_top_k", "k": 1, "renormalise": "straight"}
EXPERTS = {"kind": "mlp", "number": 4, "hidden_ratio": 4.0}
BUFFERS = ("relative_position_index", "relative_coords_table", "attn_mask", "k_bias")


def spec(size: int) -> ImageSpec:
    classes = Classification(classes=tuple("abcde"))
    mean, std = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)
    return ImageSpec(channels=3, size=size, task=classes, mean=mean, std=std)


def spread(model):
    """The model in evaluation mode; some weights start at 0, where a mistake would not show."""
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model.eval()


def ours_and_timms(kind: str, size: int, config: SwinSettings):
    define_missing_operators()
    from timm.models.swin_transformer import SwinTransformer
    from timm.models.swin_transformer_v2 import SwinTransformerV2

    torch.manual_seed(0)
    sizes = {"img_size": size, "patch_size": config.patch, "window_size": config.window}
    sizes |= {"embed_dim": config.width, "depths": config.depths, "num_heads": config.heads}
    theirs = {"swin": SwinTransformer, "swin_v2": SwinTransformerV2}[kind](**sizes, num_classes=5)
    state = spread(theirs).state_dict()
    kept = [name for name in state if not name.endswith(BUFFERS)]
    names = {name: name.replace("head.fc.", "head.") for name in kept}
    weights = {ours: state[name] for name, ours in names.items()}
    ours = config.build(spec(size)).eval()
    ours.load_state_dict(weights)
    return ours, theirs


@pytest.mark.parametrize(
    ("kind", "size", "window", "patch"),
    [
        ("swin", 112, 7, 4),
        ("swin", 48, 3, 4),  # 12, 6, 3, and 2: an odd grid is merged
        ("swin", 56, 7, 4),  # one window from the second stage on
        ("swin", 32, 4, 2),
        ("swin_v2", 64, 8, 4),
        ("swin_v2", 64, 4, 4),
        ("swin_v2", 32, 4, 2),
    ],
)
def test_it_is_timms_model(kind, size, window, patch):
    shape = {"width": 16, "depths": (2, 2, 3, 2), "heads": (1, 2, 4, 8)}
    ours, theirs = ours_and_timms(kind, size, swin(kind, patch=patch, window=window, **shape))
    pixels = torch.rand(2, 3, size, size, generator=torch.Generator().manual_seed(1))
    pixels.requires_grad_()
    expected, found = theirs(ours.normalised(pixels)), ours(pixels).prediction
    sums = [logits.square().sum() for logits in (expected, found)]
    (expected_gradient,), (gradient,) = (torch.autograd.grad(one, pixels) for one in sums)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradient, expected_gradient, atol=1e-4, rtol=1e-4)


def test_tiny_at_192_with_windows_of_7_is_timms_where_timm_is_right():
    # Grids of 48, 24 and 12, which 7 does not divide: timm shifts, pads then, and looks at the
    # padding, so rows from round the end see far ones. Ours is another function there; it is timm's
    # in the last stage, one window of 6 × 6.
    ours, theirs = ours_and_timms("swin", 192, Swin(window=7))
    pixels, tokens = torch.rand(1, 3, 192, 192), torch.randn(1, 12, 12, 384)
    with torch.no_grad():
        expected = theirs.layers[3](tokens).flatten(1, 2)
        found = ours.layers[3].downsample(tokens.flatten(1, 2))
        for block in ours.layers[3].blocks:
            found = block(found)[0]
        whole = theirs(ours.normalised(pixels)) - ours(pixels).prediction
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    assert whole.abs().max() > 1e-3, "timm pads as we do now: compare the whole model"


def reference_mates(grid, window: int, shifted: bool) -> torch.Tensor:
    """Which tokens (T, T) share a window, by pairs; windows begin ``shift`` before the image."""

    def home(place):
        """The window, and whether the token came round the end, along each axis."""
        found = []
        for at, length in zip(place, grid, strict=True):
            size = min(window, length)
            shift = size // 2 if shifted and size < length else 0
            found.append(((at - shift) % (math.ceil(length / size) * size) // size, at < shift))
        return found

    places = list(itertools.product(*map(range, grid)))
    return torch.tensor([[home(a) == home(b) for b in places] for a in places])


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize(
    ("grid", "window"), [((16, 16), 7), ((5, 5), 3), ((8, 8), 4), ((3, 7), 4), ((4, 4), 7)]
)
def test_windows_hold_what_may_see_each_other(grid, window, shifted):
    windows = window_attention.Windows(grid, window, shifted)
    tokens = math.prod(grid)
    seen = torch.zeros(1, windows.number, windows.length, windows.length)
    if windows.mask is not None:
        seen = seen + windows.mask
    found = windows.expand_attention(seen.exp())[0] > 0
    assert torch.equal(found, reference_mates(grid, window, shifted))
    values = torch.randn(2, tokens, 3, dtype=torch.float64, requires_grad=True)
    assert torch.equal(windows.join(windows.cut(values)), values)
    assert windows.cut(values).count_nonzero() == values.count_nonzero(), "padding is 0"
    assert torch.autograd.gradcheck(windows.cut, values[:1, :, :1].detach().requires_grad_())
    cut = windows.cut(values).detach().requires_grad_()
    (gradient,) = torch.autograd.grad((windows.join(cut) * values).sum(), cut)
    assert torch.equal(gradient, windows.cut(values))


def test_padding_is_never_seen():
    # a grid of 5 with windows of 3: no rows but the real ones have weight
    torch.manual_seed(0)
    windows = window_attention.Windows((5, 5), 3, True)
    attention = window_attention.WindowAttention("swin", 8, 2, windows)
    tokens = torch.randn(2, 25, 8)
    mixed, weights = attention(tokens, weights=True)
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones(2, 25))
    mates = reference_mates((5, 5), 3, True)
    assert not weights[:, ~mates].any() and (weights[:, mates] > 0).all()
    assert torch.equal(mixed, attention(tokens)[0])


def test_positions_of_pairs_and_their_logarithms():
    index = window_attention.index_relative_positions((2, 3))
    assert index.shape == (6, 6) and index[0, 0] == 7  # (0 + 1) · 5 + 0 + 2
    assert index[0, 5] == 0 and index[5, 0] == 14
    found = window_attention.log_relative_positions((3, 3)).view(5, 5, 2)
    farthest = math.log2(9) / math.log2(8)
    assert found[0, 0].tolist() == pytest.approx([-farthest, -farthest])
    assert found[2, 3].tolist() == pytest.approx([0, math.log2(5) / 3])
    wider = window_attention.log_relative_positions((5, 5), (3, 3)).view(9, 9, 2)
    assert torch.equal(wider[2:7, 2:7], found), "places keep the values that were learned"
    assert window_attention.log_relative_positions((1, 1)).tolist() == [[0, 0]]


def test_merging_takes_rows_first_and_pads_odd_grids():
    merge = window_attention.PatchMerging((3, 2), 1, post_norm=True)
    merge.norm = torch.nn.Identity()
    with torch.no_grad():
        merge.reduction.weight.copy_(torch.tensor([[1.0, 10, 100, 1000], [0, 0, 0, 0]]))
    tokens = torch.arange(1.0, 7).view(1, 6, 1)  # 1 2 / 3 4 / 5 6
    assert merge(tokens)[0, :, 0].tolist() == [1 + 30 + 200 + 4000, 5 + 600]
    assert window_attention.merged_grid((3, 2)) == (2, 1)


@pytest.mark.parametrize("kind", SWINS)
def test_other_images_take_its_weights(tmp_path, kind):
    torch.manual_seed(0)
    model = swin(kind, window=8).build(IMAGE).eval()
    artifacts.save_model(tmp_path, model)
    same = artifacts.load_adapted_model(tmp_path, IMAGE, None).eval()
    pixels = torch.rand(2, 1, 8, 8)
    torch.testing.assert_close(same(pixels).prediction, model(pixels).prediction)
    larger = artifacts.load_adapted_model(tmp_path, IMAGE.model_copy(update={"size": 16}), None)
    attention = larger.layers[1].blocks[0].attn
    assert attention.windows.size == (8, 8), "it was 4 × 4, as the grid was"
    before = model.layers[1].blocks[0].attn
    if kind == "swin":
        table = before.relative_position_bias_table.t().view(1, -1, 7, 7)
        wanted = torch.nn.functional.interpolate(table, (15, 15), mode="bicubic")
        found = attention.relative_position_bias_table.t().view(1, -1, 15, 15)
        torch.testing.assert_close(found, wanted)
    else:
        assert larger.config.pretrained_windows == (8, 4)
        inner = attention.bias().view(-1, 8, 8, 8, 8)[:, :4, :4, :4, :4]
        torch.testing.assert_close(inner.flatten(1).flatten(), before.bias().flatten())


@pytest.mark.parametrize("kind", SWINS)
@pytest.mark.parametrize("router", [TOP_1, {"kind": "noisy_top_k", "k": 2, "renormalise": True}])
def test_upcycled_it_computes_what_the_dense_model_does(kind, router):
    torch.manual_seed(0)
    dense = spread(swin(kind).build(IMAGE))
    moe = MoESettings(router=router, experts=EXPERTS)
    sparse = copy_dense_into_moe(swin(kind).build(IMAGE, moe), dense).eval()
    rgb = torch.rand(4, 1, 8, 8)
    torch.testing.assert_close(sparse(rgb).prediction, dense(rgb).prediction, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", SWINS)
@pytest.mark.parametrize(("size", "window"), [(8, 3), (24, 8)])
def test_upcycled_at_another_size_it_is_the_dense_model_at_that_size(tmp_path, kind, size, window):
    """As fine-tuning brings the dense model there: a continuous bias counts in its old windows."""
    torch.manual_seed(0)
    dense = spread(swin(kind, window=8).build(IMAGE.model_copy(update={"size": 16})))
    image = IMAGE.model_copy(update={"size": size})
    config = inherit_learned_windows(swin(kind, window=window), image, dense)
    assert config.trained_on(image).pretrained_windows == (None if kind == "swin" else (8, 8))
    moe = MoESettings(router=TOP_1, experts=EXPERTS)
    sparse = copy_dense_into_moe(config.build(image, moe), dense).eval()
    moved = dense.config.trained_on(dense.image).model_copy(update={"window": window}).build(image)
    moved.load_state_dict(moved.adapt_weights(dict(dense.state_dict()), dense.config, dense.image))
    moved.eval()
    if window == dense.config.window:
        artifacts.save_model(tmp_path, dense)
        moved = artifacts.load_adapted_model(tmp_path, image, None).eval()
    rgb = torch.rand(3, 1, size, size)
    torch.testing.assert_close(sparse(rgb).prediction, moved(rgb).prediction, atol=1e-5, rtol=1e-5)
    if kind != "swin":
        with pytest.raises(UserError, match=r"windows of \(8, 8\), the model has \(5, 5\)"):
            other = swin(kind, window=window, pretrained_windows=(5, 5))
            copy_dense_into_moe(other.build(image, moe), dense)


@pytest.mark.parametrize("kind", ["swin_moe", "swin_v2"])
def test_pretraining_begins_as_its_teacher_of_another_size(tmp_path, kind):
    torch.manual_seed(0)
    dense = swin(kind, window=8).build(IMAGE.model_copy(update={"size": 16})).eval()
    method = Method(router=TOP_1, experts=EXPERTS, upcycle=True)
    artifacts.save_guide(tmp_path, initialise_guide(dense, method, (2, 2)))
    card = {**IMAGE.model_dump(mode="json"), "kind": "drawn"}
    data = Prepared(card, images(4), images(4), images(4))
    config = swin(kind, window=8)
    learned = build_pretraining(method, config, SHIFTED, data, tmp_path, 0, "cpu").model
    artifacts.save_model(tmp_path / "dense", dense)
    moved = artifacts.load_adapted_model(tmp_path / "dense", learned.image, None)
    pixels = torch.rand(3, 1, 8, 8)
    ours, theirs = (model.eval()(pixels).prediction for model in (learned, moved))
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    artifacts.save_model(tmp_path / "student", learned)
    assert artifacts.load_model(tmp_path / "student").config.pretrained_windows == (8, 8)


def test_a_bias_that_was_learned_for_these_windows_is_left_as_it_is():
    """Also of oblong images, whose windows one number cannot say."""
    for size in (8, (4, 8)):
        image = IMAGE.model_copy(update={"size": size})
        config = swin("swin_moe", window=8)
        assert inherit_learned_windows(config, image, config.build(image)) is config


def test_top_1_routing_gets_almost_no_task_gradient_in_v2():
    """Behind a norm, p · E(x) does not depend on p: the reason for kind swin_moe."""
    moe = MoESettings(router={"kind": "noisy_top_k", "k": 1, "renormalise": False}, experts=EXPERTS)
    shares = {}
    for kind in ("swin_moe", "swin_v2"):
        torch.manual_seed(0)
        model = swin(kind).build(IMAGE, moe).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name and name.endswith("weight"):
                    parameter.fill_(1.0)
                if ".experts." in name and name.endswith(("up", "down")):
                    parameter.mul_(10)
        model(torch.rand(8, 1, 8, 8)).prediction.logsumexp(-1).sum().backward()
        routers = [p.grad.norm() for name, p in model.named_parameters() if ".router." in name]
        experts = [p.grad.norm() for name, p in model.named_parameters() if name.endswith("down")]
        shares[kind] = float(torch.stack(routers).norm() / torch.stack(experts).norm())
    assert shares["swin_v2"] < 0.02 * shares["swin_moe"]


def test_a_teachers_blocks_stand_beside_those_of_the_same_stage():
    tiny, small = (2, 2, 6, 2), (2, 2, 18, 2)
    assert aligned_teacher_blocks((9, 11), tiny, tiny) == (9, 11)
    assert aligned_teacher_blocks((5, 9, 11), tiny, small) == (9, 21, 23)
    assert aligned_teacher_blocks((9, 11), tiny, (12,)) == (-1, -1)
    assert aligned_teacher_blocks((0, 3), (2, 2), (1, 1)) == (-1, 1)


def test_routers_see_patches_and_attention_of_their_own_stage():
    torch.manual_seed(0)
    model = Swin(patch=2, width=8, depths=(1, 1), heads=(1, 2), window=3).build(
        IMAGE.model_copy(update={"size": 10}),
        MoESettings(router={"kind": "hash", "by": "patch"}, experts=EXPERTS, blocks="all"),
    )
    pixels = torch.rand(2, 1, 10, 10)
    contexts = model.routing_contexts(pixels, EncodeOptions())
    assert [context.patches.shape for context in contexts.values()] == [(2, 25, 4), (2, 9, 16)]
    corner = contexts[1].patches[0, 8].view(4, 4)
    assert torch.equal(corner[:2, :2], pixels[0, 0, 8:, 8:]) and not corner[2:].any()
    assert model.layouts == (TokenLayout(0, (5, 5), (10, 10)), TokenLayout(0, (3, 3), (12, 12)))
    coarse = coarse_patch_indices(model.layouts[1], model.layouts[0])
    assert coarse.view(5, 5)[0].tolist() == [0, 0, 1, 1, 2]


def test_settings_and_images_that_do_not_fit_are_refused():
    three, two = {"depths": (2, 2, 2)}, {"heads": (3, 3)}
    for wrong, said in ((three, "heads has 2 values"), (two, "heads is 3 in stage 1")):
        with pytest.raises(ValidationError, match=said):
            Swin.model_validate(SMALL.model_dump() | wrong)
    for size, said in ((9, "model.patch: found 2"), ((8, 8, 8), "allowed: vit3d")):
        with pytest.raises(UserError, match=said):
            swin("swin", patch=2).build(IMAGE.model_copy(update={"size": size}))


def test_other_models_weights_are_refused():
    with pytest.raises(UserError, match="upcycle: the teacher is a vit, the model a swin"):
        copy_dense_into_moe(
            SMALL.build(IMAGE), Vit(patch=4, width=32, depth=2, heads=2).build(IMAGE)
        )
    with pytest.raises(UserError, match="upcycle: "):
        copy_dense_into_moe(SMALL.build(IMAGE), swin("swin", width=8).build(IMAGE))


@pytest.mark.parametrize("kind", SWINS)
def test_its_blocks_are_compiled_whole(kind):
    moe = MoESettings(router={"kind": "noisy_top_k", "k": 2}, experts=EXPERTS, blocks=(1, 3))
    torch.manual_seed(0)
    stage = swin(kind, window=3).build(IMAGE, moe).train().layers[0]
    tokens = torch.rand(2, 64, 16)
    for block in stage.blocks:
        compiled = torch.compile(block.forward, fullgraph=True, dynamic=False, backend="aot_eager")
        found = []
        for forward in (block.forward, compiled):
            torch.manual_seed(1)
            found.append(forward(tokens, RoutingContext())[0])
        torch.testing.assert_close(*found)


def test_more_kinds_of_block_than_a_function_is_usually_compiled_for():
    moe = MoESettings(router={"kind": "noisy_top_k", "k": 2}, experts=EXPERTS)
    deep = {"depths": (2, 2, 4, 2), "heads": (1, 2, 4, 8), "window": 4, "patch": 2}
    model = swin("swin", **deep).build(spec(64), moe).train()
    torch.compiler.reset()
    blocks = runtime.CompiledBlocks([model], "required", 9, backend="eager")
    for _ in range(2):  # as it is, compiled
        with blocks.using_compiled_blocks():
            prediction = model(torch.rand(2, 3, 64, 64)).prediction
    assert len(blocks.blocks) == 10 and prediction.isfinite().all()
