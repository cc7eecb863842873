import pytest
import torch
from pydantic import ValidationError
from torch import nn
from torch.nn import Conv2d
from torch.nn.functional import conv3d, unfold

from moecore.backbones import LanguageModel, MoESettings, TextTowerSettings, Vit, Vit3d
from moecore.core.files import UserError
from moecore.nn.backbones import sfcn, swin
from moecore.nn.backbones.base_model import count_total_and_active_parameters
from moecore.nn.layers.patch_embed import ConvStem, PatchEmbed, cut_patches
from moecore.nn.predict import meta_device_context
from moecore.nn.routers.eigenbasis import Eigenbasis
from moecore.parts import Classification, EncodeOptions, ImageSpec
from moecore.tasks.regression import Regression
from moecore.testing.check_helpers import IMAGE as FLAT
from moecore.testing.model_and_loss_checks import MOE as SPARSE
from moecore.training.artifacts import load_adapted_model, load_model, save_model
from moecore.training.teachers.timm import define_missing_operators, vit_settings
from moecore.training.upcycle import copy_dense_into_moe
from tests.data.making import VOLUMES

COLOURS = {"channels": 3, "mean": (0.5, 0.4, 0.3), "std": (0.2, 0.25, 0.3)}
IMAGE = ImageSpec(size=32, task=Classification(classes=tuple("abcde")), **COLOURS)
SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 3, "num_heads": 3}
CLASSES = VOLUMES.model_copy(update={"task": FLAT.task})
ATTENDING = SPARSE.model_copy(update={"router": Eigenbasis(context="attention_output")})
SMALL_SFCN = sfcn.Sfcn(channels=(4, 8, 6), bins=3, first_bin=50, bin_width=10, bin_deviation=5)
AGE = Regression(target="age", unit="years", mean=60.0, deviation=15.0)
SPEC = ImageSpec(channels=1, size=(8, 12, 4), mean=(0.4,), std=(0.2,), task=AGE)
SMALL_3D = Vit3d(patch=4, width=24, depth=2, heads=2)
MLPS = {"kind": "mlp", "number": 4, "hidden_ratio": 1}
MOE = MoESettings(router={"kind": "hash", "k": 1}, experts=MLPS, blocks=[1])


def spread(model):
    """The model in evaluation mode; some of its weights start at 0, where a mistake would hide."""
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return model.eval()


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("VisionTransformer", {}),
        ("VisionTransformer", {"class_token": False, "global_pool": "avg"}),
        ("VisionTransformerDistilled", {}),
        ("VisionTransformer", {"no_embed_class": True, "init_values": 1e-6}),
        ("VisionTransformer", {"qkv_bias": False}),
    ],
    ids=["vit", "mean pooling", "deit distilled", "deit3", "no qkv bias"],
)
def test_dense_logits_equal_timms(kind, settings):
    define_missing_operators()
    from timm.models import deit  # which has both kinds

    torch.manual_seed(0)
    source = spread(getattr(deit, kind)(**SMALL, num_classes=5, **settings))
    model = vit_settings(source).build(IMAGE)
    model.load_state_dict(source.state_dict())
    images = torch.rand(4, 3, 32, 32)
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (IMAGE.mean, IMAGE.std))
    with torch.no_grad():
        expected = source((images - mean) / std)
        torch.testing.assert_close(model.eval()(images).prediction, expected, atol=1e-4, rtol=0)


def test_features_are_what_enters_and_leaves_a_block():
    model = Vit(patch=8, width=48, depth=3).build(IMAGE).eval()
    images = torch.rand(2, 3, 32, 32)
    tokens, _, (entering,) = model.encode(images, EncodeOptions("mlp_input", (2,)))
    _, _, (before,) = model.encode(images, EncodeOptions("block_out", (1,)))
    block = model.blocks[2]
    attended = before + block.attn(block.norm1(before))[0]
    torch.testing.assert_close(entering, block.norm2(attended))
    torch.testing.assert_close(tokens, model.norm(attended + block.mlp(entering)[0]))
    (final,) = model.encode(images, EncodeOptions("final", (2,))).features
    torch.testing.assert_close(final, tokens)


def drawn(config: Vit3d = SMALL_3D, spec: ImageSpec = SPEC, moe: MoESettings | None = None):
    torch.manual_seed(0)
    return spread(config.build(spec, moe))


def with_(**changes) -> Vit3d:
    return SMALL_3D.model_copy(update=changes)


def test_cubes_come_in_order_with_the_last_axis_fastest():
    # one voxel per cube of a (2, 3, 1) grid is lit; the cube's number and the voxel's place in the
    # cube, by hand
    volume = torch.zeros(1, 1, 8, 12, 4)
    # cube (1, 2, 0) = 1·3 + 2 = 5; voxel (1, 2, 3) = 1·16 + 2·4 + 3 = 27
    volume[0, 0, 4 + 1, 8 + 2, 3] = 1
    cubes = cut_patches(volume, (4, 4, 4))
    assert cubes.shape == (1, 6, 64) and cubes[0, 5, 27] == 1 and cubes.sum() == 1
    images = torch.rand(2, 3, 8, 12)
    assert torch.equal(cut_patches(images, (4, 4)), unfold(images, 4, stride=4).transpose(1, 2))
    with pytest.raises(ValueError, match="8×12×5 pixels .* 4×4×4"):
        cut_patches(torch.rand(1, 1, 8, 12, 5), (4, 4, 4))
    # the linear stem is a convolution
    embed = PatchEmbed(2, 4, 6, axes=3)
    volumes = torch.rand(3, 2, 8, 12, 4)
    expected = conv3d(volumes, embed.proj.weight, embed.proj.bias, stride=4).flatten(2)
    torch.testing.assert_close(embed(volumes), expected.transpose(1, 2))


def test_years_are_deviations_about_the_mean():
    model = drawn()
    volumes = torch.rand(3, 1, 8, 12, 4)
    tokens, _, _ = model.encode(volumes)
    torch.testing.assert_close(model(volumes).prediction, 60 + 15 * model.head(tokens[:, 0]))
    model.head.weight.data.zero_()
    model.head.bias.data.fill_(-1.0)
    assert model(volumes).prediction.tolist() == [[45.0]] * 3  # 60 − 1 · 15


@pytest.mark.parametrize(
    "changes",
    [
        *({"stem": "pooled", "pool": 2}, {"stem": "conv", "stem_width": 3}),
        *({"positions": "sinusoidal"}, {"pooling": "mean"}, {"position_on_class": False}),
    ],
)
def test_every_form_learns_from_every_voxel(changes):
    model = drawn(with_(**changes))
    volumes = torch.rand(2, 1, 8, 12, 4, requires_grad=True)
    model(volumes).prediction.sum().backward()
    assert (volumes.grad != 0).all()


def test_the_pooled_stem_sees_means_only():
    stem = drawn(with_(stem="pooled", pool=2)).patch_embed
    volume = torch.rand(1, 1, 8, 12, 4)
    swapped = volume.clone()
    # within one 2³ cube
    swapped[0, 0, 0, 0, 0] = volume[0, 0, 1, 1, 1]
    swapped[0, 0, 1, 1, 1] = volume[0, 0, 0, 0, 0]
    torch.testing.assert_close(stem(volume), stem(swapped))
    swapped[0, 0, [0, 2], 0, 0] = swapped[0, 0, [2, 0], 0, 0]  # across two
    assert not torch.allclose(stem(volume), stem(swapped))


def test_fixed_positions_are_no_weights_and_all_differ():
    model = drawn(with_(positions="sinusoidal"))
    assert "pos_embed" not in model.state_dict() and model.pos_embed.shape == (1, 7, 24)
    assert (model.pos_embed[0, 0] == 0).all()
    assert (torch.cdist(model.pos_embed[0, 1:], model.pos_embed[0, 1:]) + torch.eye(6) > 0.5).all()


@pytest.mark.parametrize(
    ("config", "spec", "named"),
    [
        (with_(patch=8), SPEC, "model.patch.*8, 12, 4"),
        (with_(heads=5), SPEC, "model.heads"),
        (Vit(patch=4, width=24), SPEC, "model.kind"),
    ],
)
def test_what_does_not_fit_is_named(config, spec, named):
    with pytest.raises(UserError, match=named):
        config.build(spec)


@pytest.mark.parametrize(("patch", "convolutions"), [(4, 2), (8, 3), (1, 1)])
def test_the_conv_stem_halves_images_down_to_the_grid_of_patches(patch, convolutions, tmp_path):
    model = drawn(Vit(patch=patch, width=24, depth=2, heads=2, stem="conv"), IMAGE, MOE)
    layers = [layer for layer in model.patch_embed.convolutions if isinstance(layer, Conv2d)]
    assert [layer.out_channels for layer in layers] == [16, 32, 64][:convolutions]
    images = torch.rand(2, 3, 32, 32, requires_grad=True)
    tokens = model.patch_embed(images)
    assert tokens.shape == (2, (32 // patch) ** 2, 24)
    # the norm is an image's: alone it gets the same tokens; and they come row by row
    torch.testing.assert_close(model.patch_embed(images[:1]), tokens[:1])
    tokens[0, 1].sum().backward()
    seen = images.grad[0].abs().sum((0, 1))
    assert seen[: 2 * patch].sum() > seen[2 * patch :].sum()
    save_model(tmp_path, model)
    larger = load_adapted_model(tmp_path, IMAGE.model_copy(update={"size": 64}), MOE)
    assert larger(torch.rand(1, 3, 64, 64)).routing[0].combine.shape[1] == 1 + (64 // patch) ** 2


@pytest.mark.parametrize("kind", ["mlp", "eigen"])
def test_initial_weights_are_scaled_and_routers_are_not(kind):
    experts = {"kind": kind, "number": 4} | ({"factored_output": True} if kind == "eigen" else {})
    router = {"kind": "eigenbasis" if kind == "eigen" else "noisy_top_k", "k": 1}
    moe = MoESettings(router=router, experts=experts, blocks=[1])
    built = []
    for std in (0.02, 0.1):
        torch.manual_seed(0)
        config = Vit(patch=8, width=24, depth=2, heads=2, initial_std=std, position_std=3 * std)
        built.append(dict(config.build(IMAGE, moe).named_parameters()))
    scaled = {name for name, value in built[1].items() if not torch.equal(value, built[0][name])}
    for name in scaled:
        torch.testing.assert_close(built[1][name], 5 * built[0][name])
    ends = ["mlp.experts.up", f"mlp.experts.{'down_inner' if kind == 'eigen' else 'down'}"]
    first = ["attn.qkv.weight", "attn.proj.weight", "mlp.fc1.weight", "mlp.fc2.weight"]
    keys = [*(f"blocks.0.{end}" for end in first), *(f"blocks.1.{end}" for end in first[:2] + ends)]
    assert scaled == {"cls_token", "pos_embed", *keys}


@pytest.mark.parametrize("positions", ["learned", "sinusoidal"])
def test_saved_loaded_and_transferred_to_the_same_volumes_it_is_the_same(tmp_path, positions):
    model = drawn(with_(positions=positions), moe=MOE)
    volumes = torch.rand(2, 1, 8, 12, 4)
    save_model(tmp_path, model)
    for other in (load_model(tmp_path), load_adapted_model(tmp_path, SPEC, MOE).eval()):
        torch.testing.assert_close(other(volumes).prediction, model(volumes).prediction)


def test_transfer_to_another_cohort_keeps_what_it_says_in_years(tmp_path):
    model = drawn()
    volumes = torch.rand(2, 1, 8, 12, 4)
    save_model(tmp_path, model)
    tasks = (Regression(target="age", mean=30.0, deviation=5.0), Regression(target="height"))
    specs = [SPEC.model_copy(update={"task": task}) for task in tasks]
    other, height = (load_adapted_model(tmp_path, spec, None).eval() for spec in specs)
    ours, theirs = (net(volumes).prediction for net in (other, model))
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-5)
    # another question has a fresh head
    assert not torch.equal(height.head.weight, model.head.weight)


def test_transfer_to_a_larger_grid_interpolates_along_each_axis(tmp_path):
    model = drawn()
    model.pos_embed.data = torch.zeros(1, 7, 24)
    model.pos_embed.data[0, 4:] = 1.0  # patches (1, 0…2, 0): a step along the first axis
    save_model(tmp_path, model)
    larger = load_adapted_model(tmp_path, SPEC.model_copy(update={"size": (16, 12, 8)}), None)
    # trilinear with half-pixel centres: 2 places 0, 1 become 4 places 0, 1/4, 3/4, 1, the same
    # along the other axes
    expected = torch.tensor([0, 0.25, 0.75, 1]).view(4, 1, 1).expand(4, 3, 2)
    torch.testing.assert_close(larger.pos_embed[0, 1:, 0].view(4, 3, 2), expected)
    with pytest.raises(UserError, match="axes"):
        load_adapted_model(tmp_path, SPEC.model_copy(update={"size": 8}), None)


def test_upcycled_it_computes_what_the_dense_model_does():
    config = with_(mlp_ratio=1.0)
    dense = drawn(config)
    router = {"kind": "noisy_top_k", "k": 2, "renormalise": True}
    moe = MoESettings(router=router, experts=MOE.experts, blocks=[1])
    sparse = copy_dense_into_moe(config.build(SPEC, moe), dense).eval()
    volumes = torch.rand(2, 1, 8, 12, 4)
    torch.testing.assert_close(sparse(volumes).prediction, dense(volumes).prediction)


@pytest.mark.parametrize("kind", [Vit, Vit3d, swin.SwinSettings, TextTowerSettings, LanguageModel])
def test_a_hidden_layer_has_a_unit(kind):
    with pytest.raises(ValidationError, match=r"(?s)mlp_ratio.*allowed: 0.\d+ or more"):
        kind(mlp_ratio=1e-9)


def test_a_convolutional_stem_sees_one_image_at_a_time():
    stem = ConvStem(channels=1, patch=4, width=8, hidden=4)  # as built: in training
    images = torch.rand(3, 1, 8, 8)
    torch.testing.assert_close(stem(images)[:1], stem(images[:1]))


def test_the_published_size():
    image = VOLUMES.model_copy(update={"size": (160, 192, 160)})
    with meta_device_context():
        model = sfcn.Sfcn().build(image)
    assert model.layout.grid == (5, 6, 5)  # what the authors average over
    # Convolutions 27·(1·32 + 32·64 + 64·128 + 128·256 + 256·256) + 256·64 and a bias each, two
    # numbers of a batch norm for each of 800 channels, and a head of 64·40 + 40.
    convolutions = 27 * (32 + 32 * 64 + 64 * 128 + 128 * 256 + 256 * 256) + 256 * 64 + 800
    assert (
        count_total_and_active_parameters(model)["parameters"]
        == convolutions + 2 * 800 + 2600
        == 2_952_936
    )


def test_the_layers_in_the_order_of_the_authors():
    torch.manual_seed(0)
    model = SMALL_SFCN.build(VOLUMES).eval()
    sizes, end = ((1, 4), (4, 8)), (nn.MaxPool3d(2), nn.ReLU())
    halving = [(nn.Conv3d(a, b, 3, padding=1), nn.BatchNorm3d(b), *end) for a, b in sizes]
    last = (nn.Conv3d(8, 6, 1), nn.BatchNorm3d(6), nn.ReLU())
    theirs = nn.Sequential(*halving[0], *halving[1], *last, nn.AvgPool3d(4), nn.Conv3d(6, 3, 1))
    pairs = zip(theirs.state_dict().items(), model.state_dict().values(), strict=True)
    theirs.load_state_dict({name: value.view(like.shape) for (name, like), value in pairs})
    volumes = torch.rand(2, 1, 16, 16, 16)
    output = model(volumes)
    expected = theirs.eval()((volumes - 0.5) / 0.25).flatten(1)
    torch.testing.assert_close(output.heads[0], expected)
    ages = expected.softmax(1) @ torch.tensor([55.0, 65, 75])
    torch.testing.assert_close(output.prediction[:, 0], ages)


def test_labels_over_bins_by_hand():
    # Edges 50, 60, 70, 80 and a deviation of 5: 60 is split in halves but for what lies above 70,
    # 1 − Φ(2) = 0.0228; 90 lies beyond all bins, and all but Φ(−4) falls to the last.
    rows = sfcn.soft_labels(torch.tensor([60.0, 90.0]), torch.tensor([50.0, 60, 70, 80]), 5.0)
    expected = torch.tensor([[0.5, 0.4772, 0.0228], [0.0, 0.0, 1.0]])
    torch.testing.assert_close(rows, expected, atol=1e-4, rtol=0)


def test_the_loss_is_the_divergence_from_the_label():
    model = SMALL_SFCN.build(VOLUMES).train()
    labels = torch.tensor([60.0, 72.0])
    wanted = sfcn.soft_labels(labels, model.edges, 5.0)
    output = model(torch.rand(2, 1, 16, 16, 16))
    exact = model.task_loss(output._replace(heads=(wanted.log(),)), labels)
    assert exact == pytest.approx(0, abs=1e-6)
    uniform = model.task_loss(output._replace(heads=(torch.zeros(2, 3),)), labels)
    # KL(q ‖ 1/3) = log 3 − H(q)
    entropy = -(wanted * wanted.log()).nansum(1).mean()
    torch.testing.assert_close(uniform, torch.tensor(3.0).log() - entropy)
    with pytest.raises(UserError, match=r"label_smoothing: found 0.1, .* allowed: 0"):
        model.task_loss(output, labels, 0.1)


@pytest.mark.parametrize(
    ("config", "image", "moe", "says"),
    [
        (sfcn.Sfcn(), VOLUMES, None, r"multiples of 32 voxels .* \[16, 16, 16\] \(set `size`"),
        (SMALL_SFCN, FLAT, None, "have 2 axes; allowed: vit"),
        (SMALL_SFCN, CLASSES, None, "head: found bins for classification; allowed: number"),
        (SMALL_SFCN, VOLUMES, ATTENDING, "no attention, but the router eigenbasis reads attended"),
    ],
)
def test_what_does_not_fit_is_refused(config, image, moe, says):
    with pytest.raises(UserError, match=says):
        config.build(image, moe)
