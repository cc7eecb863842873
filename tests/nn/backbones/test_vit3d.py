"""The transformer of volumes: cubes, positions, stems, and a head that answers in years."""

import pytest
import torch
from torch.nn.functional import conv3d, unfold

from moecore.core.files import UserError
from moecore.core.records import Layout
from moecore.nn.backbones.image import ImageSpec
from moecore.nn.backbones.vit import Vit
from moecore.nn.backbones.vit3d import Vit3d
from moecore.nn.layers.moe import MoE
from moecore.nn.layers.patch_embed import PatchEmbed, cut
from moecore.tasks.classification import Classification
from moecore.tasks.regression import Regression
from moecore.training.artifacts import load_model, save_model, transferred
from moecore.training.upcycle import upcycle

SPEC = ImageSpec(
    channels=1,
    size=(8, 12, 4),
    mean=(0.4,),
    std=(0.2,),
    task=Regression(target="age", unit="years", mean=60.0, deviation=15.0),
)
SMALL = Vit3d(patch=4, width=24, depth=2, heads=2)
MOE = MoE(
    router={"kind": "hash", "k": 1},
    experts={"kind": "mlp", "number": 4, "hidden_ratio": 1},
    blocks=[1],
)


def drawn(config: Vit3d = SMALL, spec: ImageSpec = SPEC, moe: MoE | None = None):
    torch.manual_seed(0)
    model = config.build(spec, moe).eval()
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return model


def test_cubes_come_in_order_with_the_last_axis_fastest():
    # one voxel per cube of a (2, 3, 1) grid is lit; the cube's number and the voxel's place in the
    # cube, by hand
    volume = torch.zeros(1, 1, 8, 12, 4)
    # cube (1, 2, 0) = 1·3 + 2 = 5; voxel (1, 2, 3) = 1·16 + 2·4 + 3 = 27
    volume[0, 0, 4 + 1, 8 + 2, 3] = 1
    cubes = cut(volume, 4)
    assert cubes.shape == (1, 6, 64) and cubes[0, 5, 27] == 1 and cubes.sum() == 1


def test_patches_of_images_are_unfolds():
    images = torch.rand(2, 3, 8, 12)
    assert torch.equal(cut(images, 4), unfold(images, 4, stride=4).transpose(1, 2))
    with pytest.raises(ValueError, match="8×12×5 pixels .* 4×4×4"):
        cut(torch.rand(1, 1, 8, 12, 5), 4)


def test_the_linear_stem_is_a_convolution():
    embed = PatchEmbed(2, 4, 6, axes=3)
    volumes = torch.rand(3, 2, 8, 12, 4)
    expected = (
        conv3d(volumes, embed.proj.weight, embed.proj.bias, stride=4).flatten(2).transpose(1, 2)
    )
    torch.testing.assert_close(embed(volumes), expected)


def test_layout_and_records():
    model = drawn(moe=MOE)
    assert model.layout == Layout(1, (2, 3, 1), (8, 12, 4))
    output = model(torch.rand(5, 1, 8, 12, 4))
    assert output.prediction.shape == (5, 1) and output.routing[0].probs.shape == (5, 7, 4)


def test_years_are_deviations_about_the_mean():
    model = drawn()
    volumes = torch.rand(3, 1, 8, 12, 4)
    tokens, _, _ = model.encode(volumes)
    torch.testing.assert_close(model(volumes).prediction, 60 + 15 * model.head(tokens[:, 0]))
    model.head.weight.data.zero_()
    model.head.bias.data.fill_(-1.0)
    assert model(volumes).prediction.tolist() == [[45.0]] * 3  # 60 − 1 · 15


def test_classes_stay_logits():
    spec = ImageSpec(
        channels=1,
        size=(8, 12, 4),
        task=Classification(classes=("a", "b", "c")),
        mean=(0.4,),
        std=(0.2,),
    )
    model = drawn(spec=spec)
    volumes = torch.rand(3, 1, 8, 12, 4)
    torch.testing.assert_close(
        model(volumes).prediction, model.head(model.encode(volumes)[0][:, 0])
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"stem": "pooled", "pool": 2},
        {"stem": "conv", "stem_width": 3},
        {"positions": "sinusoidal"},
        {"pooling": "mean"},
        {"position_on_class": False},
    ],
)
def test_every_form_learns_from_every_voxel(changes):
    model = drawn(SMALL.model_copy(update=changes))
    volumes = torch.rand(2, 1, 8, 12, 4, requires_grad=True)
    model(volumes).prediction.sum().backward()
    assert (volumes.grad != 0).all()
    lonely = model(volumes[1:]).prediction
    # no volume depends on the others
    torch.testing.assert_close(model(volumes).prediction[1:], lonely)


def test_the_pooled_stem_sees_means_only():
    stem = drawn(SMALL.model_copy(update={"stem": "pooled", "pool": 2})).patch_embed
    volume = torch.rand(1, 1, 8, 12, 4)
    swapped = None
    swapped = volume.clone()
    # within one 2³ cube
    swapped[0, 0, 0, 0, 0] = volume[0, 0, 1, 1, 1]
    swapped[0, 0, 1, 1, 1] = volume[0, 0, 0, 0, 0]
    torch.testing.assert_close(stem(volume), stem(swapped))
    # across two
    swapped[0, 0, 0, 0, 0], swapped[0, 0, 2, 0, 0] = (
        swapped[0, 0, 2, 0, 0],
        swapped[0, 0, 0, 0, 0],
    )
    assert not torch.allclose(stem(volume), stem(swapped))


def test_fixed_positions_are_no_weights_and_all_differ():
    model = drawn(SMALL.model_copy(update={"positions": "sinusoidal"}))
    assert "pos_embed" not in model.state_dict() and model.pos_embed.shape == (1, 7, 24)
    assert (model.pos_embed[0, 0] == 0).all()
    distances = torch.cdist(model.pos_embed[0, 1:], model.pos_embed[0, 1:])
    assert (distances + torch.eye(6) > 0.5).all()


@pytest.mark.parametrize(
    ("config", "spec", "named"),
    [
        (SMALL.model_copy(update={"patch": 8}), SPEC, "model.patch.*8, 12, 4"),
        (SMALL.model_copy(update={"heads": 5}), SPEC, "model.heads"),
        (SMALL.model_copy(update={"stem": "pooled", "pool": 3}), SPEC, "model.pool"),
        (SMALL.model_copy(update={"stem": "conv", "patch": 2}), SPEC, "model.stem"),
        (
            SMALL.model_copy(update={"positions": "sinusoidal", "width": 32}),
            SPEC,
            "model.positions",
        ),
        (
            SMALL,
            ImageSpec(
                channels=1, size=8, task=Classification(classes=("a", "b")), mean=(0.4,), std=(0.2,)
            ),
            "model.kind",
        ),
        (Vit(patch=4, width=24), SPEC, "model.kind"),
    ],
)
def test_what_does_not_fit_is_named(config, spec, named):
    with pytest.raises(UserError, match=named):
        config.build(spec)


@pytest.mark.parametrize("positions", ["learned", "sinusoidal"])
def test_saved_loaded_and_transferred_to_the_same_volumes_it_is_the_same(tmp_path, positions):
    model = drawn(SMALL.model_copy(update={"positions": positions}), moe=MOE)
    volumes = torch.rand(2, 1, 8, 12, 4)
    save_model(tmp_path, model)
    for other in (load_model(tmp_path), transferred(tmp_path, SPEC, MOE).eval()):
        torch.testing.assert_close(other(volumes).prediction, model(volumes).prediction)


def test_transfer_to_another_cohort_keeps_what_it_says_in_years(tmp_path):
    model = drawn()
    volumes = torch.rand(2, 1, 8, 12, 4)
    save_model(tmp_path, model)
    other = transferred(
        tmp_path,
        SPEC.model_copy(update={"task": Regression(target="age", mean=30.0, deviation=5.0)}),
        None,
    ).eval()
    torch.testing.assert_close(
        other(volumes).prediction, model(volumes).prediction, atol=1e-4, rtol=1e-5
    )
    height = transferred(
        tmp_path, SPEC.model_copy(update={"task": Regression(target="height")}), None
    )
    # another question has a fresh head
    assert not torch.equal(height.head.weight, model.head.weight)


def test_transfer_to_a_larger_grid_interpolates_along_each_axis(tmp_path):
    model = drawn()
    model.pos_embed.data = torch.zeros(1, 7, 24)
    model.pos_embed.data[0, 4:] = 1.0  # patches (1, 0…2, 0): a step along the first axis
    save_model(tmp_path, model)
    larger = transferred(tmp_path, SPEC.model_copy(update={"size": (16, 12, 8)}), None)
    # trilinear with half-pixel centres: 2 places 0, 1 become 4 places 0, 1/4, 3/4, 1, the same
    # along the other axes
    expected = torch.tensor([0, 0.25, 0.75, 1]).view(4, 1, 1).expand(4, 3, 2)
    torch.testing.assert_close(larger.pos_embed[0, 1:, 0].view(4, 3, 2), expected)
    with pytest.raises(UserError, match="bicubic"):
        transferred(tmp_path, SPEC.model_copy(update={"size": (16, 12, 8)}), None, "bicubic")
    with pytest.raises(UserError, match="axes"):
        transferred(
            tmp_path,
            ImageSpec(channels=1, size=8, mean=(0.4,), std=(0.2,), task=Regression(target="age")),
            None,
        )


def test_upcycled_it_computes_what_the_dense_model_does():
    dense = drawn(SMALL.model_copy(update={"mlp_ratio": 1.0}))
    router = {"kind": "noisy_top_k", "k": 2, "renormalise": True}
    moe = MoE(router=router, experts={"kind": "mlp", "number": 4, "hidden_ratio": 1}, blocks=[1])
    sparse = upcycle(SMALL.model_copy(update={"mlp_ratio": 1.0}).build(SPEC, moe), dense).eval()
    volumes = torch.rand(2, 1, 8, 12, 4)
    torch.testing.assert_close(sparse(volumes).prediction, dense(volumes).prediction)
