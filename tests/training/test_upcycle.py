"""Sparse upcycling of each backbone and of timm's models: as the dense teacher, or refused."""

from functools import partial

import pytest
import torch
from torch import nn

from moecore import UserError, routing_loss
from moecore.backbones import LanguageModel, Sfcn, SingleLayer, Swin, SwinMoe, SwinV2, Vit, Vit3d
from moecore.conformance.targets import draw_weights
from moecore.nn.backbones.base_model import BackboneModel, ImageSpec
from moecore.nn.backbones.two_towers import TextTowerSettings, TwoTowers
from moecore.nn.experts.mlp import Mlp
from moecore.nn.layers.moe import MoELayer, MoESettings, build_moe_feed_forward
from moecore.nn.routing_collection import routing_collector
from moecore.regularizers import GroupSparsity, Importance, JensenShannon, Load, ZLoss
from moecore.routers import Cosine, Depth, Hash, NoisyTopK, TopKSoftmax
from moecore.tasks import Classification, ImageText, NextToken, Regression
from moecore.testing.check_helpers import IMAGE
from moecore.training.teachers.timm import define_missing_operators
from moecore.training.upcycle import copy_dense_into_moe, copy_mlp_into_experts, upcycle_in_place
from moecore.training.upcycling_kinds import Drop, Granular, redraw_rows, repeat_router_rows
from tests.attacks.models import vit

VOLUMES = IMAGE.model_copy(update={"size": (8, 8, 8)})
TEXT = ImageSpec(channels=2, size=(4,), mean=(0.0,) * 2, std=(1.0,) * 2, task=NextToken(words=11))
CAPTIONS = ImageText(words=20, context=7, captions=2, end=2, vocabulary="0" * 64)
CAPTIONED = IMAGE.model_copy(update={"task": CAPTIONS})
ROUTER = {"kind": "noisy_top_k", "k": 2, "renormalise": True}
# Another value of every setting, the teacher's; "kind" is always compared.
TRANSFORMER = {"patch": 2, "width": 32, "depth": 3, "heads": 4, "mlp_ratio": 1.0, "pooling": "mean"}
TRANSFORMER |= {"position_on_class": False, "layer_scale": 0.1, "qkv_bias": False}
TRANSFORMER |= {"pre_norm": True, "activation": "quick_gelu", "norm_eps": 0.01, "drop_path": 0.1}
TRANSFORMER |= {"initial_std": 0.1, "position_std": 0.3}
STEM = {"stem": "conv", "stem_width": 8}
VOLUME_TRANSFORMER = STEM | {"pool": 2, "positions": "sinusoidal"}
SWIN = {"patch": 1, "width": 32, "depths": (1, 2), "heads": (2, 4), "mlp_ratio": 1.0}
SWIN |= {"qkv_bias": False, "drop_path": 0.1}
LANGUAGE = {"width": 16, "depth": 3, "heads": 4, "span": 2, "layers": "momentum"}
LANGUAGE |= {"mlp_ratio": 1.0, "dropout": 0.1}
SINGLE = {"hidden": 64, "activation": "quick_gelu"}
TEXT_TOWER = {"width": 32, "depth": 3, "heads": 4, "mlp_ratio": 1.0, "mask": "full"}
TEXT_TOWER |= {"pooling": "class", "activation": "quick_gelu", "frozen": "always"}
SMALL_VIT = Vit(patch=4, width=16, depth=2, heads=2, mlp_ratio=2.0)
SMALL_SWIN = {"patch": 2, "width": 16, "depths": (2, 2), "heads": (2, 2), "window": 2}
SMALL_TEXT = TextTowerSettings(width=16, depth=2, heads=2, mlp_ratio=2.0)
CUBES = Vit3d(patch=4, width=24, depth=2, heads=2, mlp_ratio=2.0)
WORDS = LanguageModel(width=8, depth=2, heads=2, span=4, mlp_ratio=2.0, dropout=0.0)
TOWERS = {"joint": 8, "pairs": "sigmoid", "image.heads": 4, "image.drop_path": 0.1}
TOWERS |= {f"text.{name}": value for name, value in TEXT_TOWER.items()}
BACKBONES = {
    "vit": (SMALL_VIT, IMAGE, TRANSFORMER | STEM),
    "vit3d": (CUBES, VOLUMES, VOLUME_TRANSFORMER),
    "swin": (Swin(**SMALL_SWIN, mlp_ratio=2.0), IMAGE, SWIN),
    "swin_moe": (SwinMoe(**SMALL_SWIN, mlp_ratio=2.0), IMAGE, {}),
    "swin_v2": (SwinV2(**SMALL_SWIN, mlp_ratio=2.0), IMAGE, {}),
    "single_layer": (SingleLayer(hidden=128), IMAGE, SINGLE),
    "language_model": (WORDS, TEXT, LANGUAGE),
    "two_towers": (TwoTowers(image=SMALL_VIT, text=SMALL_TEXT, joint=6), CAPTIONED, TOWERS),
}
CASES = [(name, key) for name, (_, _, others) in BACKBONES.items() for key in others]

DENSE = {
    "fc1.weight": torch.tensor([[1.0, 0], [0, -1], [1, 1], [-1, -1]]),
    "fc1.bias": torch.tensor([0, 0.5, 0, 0]),
    "fc2.weight": torch.tensor([[1, 0, 1, 0.5], [0, 1, 0, -1]]),
    "fc2.bias": torch.tensor([0.1, -0.1]),
}
PIECES = Granular(pieces=2)

NOISY = NoisyTopK(k=2, renormalise=True)
EXPERTS = Mlp(number=4)
SMALL = {"num_classes": 3, "img_size": 32}
TIMM_VIT = {"patch_size": 8, "embed_dim": 16, "depth": 4, "num_heads": 2}
TIMM_SWIN = {"patch_size": 2, "embed_dim": 8, "depths": (2, 2), "num_heads": (2, 2)}
TIMM_SWIN["window_size"] = 4
MODELS = {"vit_tiny_patch16_224": TIMM_VIT, "deit_tiny_distilled_patch16_224": TIMM_VIT}
MODELS |= {"deit3_small_patch16_224": TIMM_VIT, "swin_tiny_patch4_window7_224": TIMM_SWIN}
MODELS |= {"swinv2_tiny_window8_256": TIMM_SWIN}


def changed(config, key: str, value):
    name, _, inner = key.partition(".")
    if inner:
        value = changed(getattr(config, name), inner, value)
    return config.model_copy(update={name: value})


def build(config, image: ImageSpec, is_sparse: bool = False) -> BackboneModel:
    torch.manual_seed(0)
    if not is_sparse:
        return config.build(image).eval()
    activation = "relu" if config.kind == "language_model" else "gelu"
    experts = {"kind": "mlp", "number": 4, "hidden_ratio": 2.0, "activation": activation}
    moe = MoESettings(router=ROUTER, experts=experts, blocks=(config.depth - 1,))
    if config.kind == "two_towers":
        config = changed(config, "text.moe", moe.model_copy(update={"blocks": (1,)}))
    return config.build(image, moe).eval()


def draw(model: BackboneModel) -> BackboneModel:
    draw_weights(model, std=0.3)
    return model


def predictions(model: BackboneModel) -> torch.Tensor:
    image = model.image
    torch.manual_seed(1)
    if isinstance(image.task, NextToken):
        return model(torch.randint(11, (3, 2, 4))).prediction
    output = model(torch.rand(3, image.channels, *image.shape)).prediction
    if not isinstance(image.task, ImageText):
        return output
    words = torch.randint(4, 20, (3, 1, 7))
    words[:, :, 0], words[:, :, 5] = 1, 2
    return torch.cat([output.flatten(), model.targets(words).flatten()])


@torch.no_grad()
def assert_begins_as(sparse: BackboneModel, dense: BackboneModel) -> None:
    close = partial(torch.testing.assert_close, atol=1e-5, rtol=1e-4)
    close(predictions(copy_dense_into_moe(sparse, dense)), predictions(dense))


@pytest.mark.parametrize("kind", BACKBONES)
def test_a_model_begins_as_its_teacher_whose_pixels_were_normalised_otherwise(kind):
    config, image, _ = BACKBONES[kind]
    assert_begins_as(build(config, image, is_sparse=True), draw(build(config, image)))
    dense = draw(build(config, image.model_copy(update={"mean": (0.4,) * image.channels})))
    if kind in ("single_layer", "language_model"):
        with pytest.raises(UserError, match=r"^upcycle: the teacher's pixels have means of \(0.4"):
            copy_dense_into_moe(build(config, image, is_sparse=True), dense)
    else:
        assert_begins_as(build(config, image, is_sparse=True), dense)


@pytest.mark.parametrize(("kind", "key"), CASES)
@pytest.mark.parametrize("is_the_teachers", [True, False])
def test_with_another_setting_it_begins_as_its_teacher_or_is_refused(kind, key, is_the_teachers):
    config, image, others = BACKBONES[kind]
    other = changed(config, key, others[key])
    ours, theirs = (config, other) if is_the_teachers else (other, config)
    dense, sparse = draw(build(theirs, image)), build(ours, image, is_sparse=True)
    try:
        assert_begins_as(sparse, dense)
    except UserError as error:
        assert str(error).startswith("upcycle: ") and "\n" not in str(error)
        assert key.rpartition(".")[2] not in ("drop_path", "dropout", "frozen")
    else:
        assert key.rpartition(".")[2] in type(_owner(config, key)).free_settings


def _owner(config, key: str):
    name, _, inner = key.partition(".")
    return getattr(config, name) if inner else config


@pytest.mark.parametrize(
    ("settings", "tried"),
    [
        (Vit, TRANSFORMER | STEM),
        (Vit3d, TRANSFORMER | VOLUME_TRANSFORMER),
        # of windows: tests/nn/backbones/test_swin.py
        *((kind, [*SWIN, "window", "pretrained_windows"]) for kind in (Swin, SwinMoe, SwinV2)),
        (SingleLayer, SINGLE),
        (LanguageModel, LANGUAGE),
        (TextTowerSettings, [*TEXT_TOWER, "moe"]),
        (TwoTowers, ["joint", "pairs", "image", "text"]),
    ],
)
def test_every_setting_of_a_backbone_is_tried(settings, tried):
    assert {*settings.model_fields} - {"kind"} == {*tried}


def test_experts_of_bases_begin_as_the_dense_mlp_unless_their_output_is_factored():
    def sparse(**changes) -> BackboneModel:
        experts = {"kind": "eigen", "number": 4, "rank": 16, "hidden_ratio": 2.0} | changes
        moe = MoESettings(router=ROUTER, experts=experts, blocks="all")
        return SMALL_VIT.build(IMAGE, moe).eval()

    dense = draw(build(SMALL_VIT, IMAGE))
    assert_begins_as(sparse(), dense)  # bases of the whole width see all of a token
    with pytest.raises(UserError, match="factored_output: false"):
        copy_dense_into_moe(sparse(factored_output=True), dense)


def test_other_classes_get_a_fresh_head_and_other_sizes_new_positions():
    classes = Classification(classes=tuple("abcdef"))
    other = IMAGE.model_copy(update={"task": classes, "size": 16})
    dense, sparse = build(SMALL_VIT, IMAGE), build(SMALL_VIT, other, is_sparse=True)
    head = sparse.head.weight.clone()
    copy_dense_into_moe(sparse, dense)
    assert torch.equal(sparse.head.weight, head) and torch.equal(sparse.cls_token, dense.cls_token)


@torch.no_grad()
def test_the_text_tower_alone_may_have_experts():
    config, image, _ = BACKBONES["two_towers"]
    moe = build(config, image, is_sparse=True).config.text.moe
    assert_begins_as(build(changed(config, "text.moe", moe), image), draw(build(config, image)))


def test_a_text_tower_of_other_words_is_refused():
    config, image, _ = BACKBONES["two_towers"]
    other = CAPTIONS.model_copy(update={"vocabulary": "1" * 64})
    dense = build(config, image.model_copy(update={"task": other}))
    with pytest.raises(UserError, match="^upcycle: found other words: captions of 20 words"):
        copy_dense_into_moe(build(config, image, is_sparse=True), dense)


def test_a_dense_model_may_begin_as_its_teacher_alone():
    sizes = {"channels": (2, 3, 4), "bins": 3}
    dense = draw(Sfcn(**sizes).build(_ages(40.0, 10.0)))
    # whose bins have edges in years, whatever the labels' mean is
    model = copy_dense_into_moe(Sfcn(**sizes, dropout=0.0).build(_ages(60.0, 8.0)), dense)
    assert torch.equal(model.head.weight, dense.head.weight)
    with pytest.raises(UserError, match=r"^upcycle: found first_bin 10.0 in the model, 42.0 in"):
        copy_dense_into_moe(Sfcn(**sizes, first_bin=10.0).build(_ages(40.0, 10.0)), dense)


def _ages(mean: float, deviation: float) -> ImageSpec:
    task = Regression(target="age", mean=mean, deviation=deviation)
    return VOLUMES.model_copy(update={"task": task})


def test_a_head_of_the_same_target_says_it_of_another_cohort():
    config = Vit3d(patch=4, width=24, depth=2, heads=2, pooling="class+distillation", mlp_ratio=2.0)
    dense = draw(build(config, _ages(60.0, 8.0)))
    assert_begins_as(build(config, _ages(40.0, 10.0), is_sparse=True), dense)


# Fixtures D1.1 and D1.3. Of the token (1, −2) the dense hidden units are relu(1, 2.5, −1, 1), its
# output (1 + 0.5 + 0.1, 2.5 − 1 − 0.1) = (1.6, 1.4). Two copies of two pieces with the logits 0.3,
# 0.3, −0.2, −0.2: the first copy's are chosen. After the choice their softmax is ½ each, before it
# 1 / (2 + 2 exp(−0.5)) = 0.31123 each: 2 · 0.31123 · 4/2 = 1.24492 times the dense output.
@pytest.mark.parametrize(
    ("renormalise", "weight", "output"),
    [(True, 0.5, [1.6, 1.4]), (False, 0.31123, [1.99187, 1.742886])],
)
def test_pieces_of_a_copy_are_chosen_together_and_sum_to_it(renormalise, weight, output):
    router = NoisyTopK(k=2, noise_std=0, renormalise=renormalise)
    experts = Mlp(number=4, hidden_ratio=1, activation="relu")
    assert not list(PIECES.list_settings_parting_pieces(router, experts))
    layer = build_moe_feed_forward(router, experts, 2)
    with torch.no_grad():
        layer.router.weight.copy_(torch.tensor([[0.3, 0], [9, 9], [-0.2, 0], [9, 9]]))
        repeat_router_rows(layer.router, 2)
        copy_mlp_into_experts(layer.experts, dict(DENSE), "", PIECES.piece_scales(router, 4))
    made, (record,) = layer(torch.tensor([[[1.0, -2.0]]]))
    torch.testing.assert_close(made[0, 0], torch.tensor(output), atol=1e-6, rtol=0)
    expected = torch.tensor([weight, weight, 0, 0])
    torch.testing.assert_close(record.combine[0, 0], expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("router", [TopKSoftmax(k=2), NoisyTopK(noise_std=0, renormalise=True)])
def test_a_model_of_pieces_begins_as_the_dense_one_and_learns(router):
    backbone = Vit(patch=4, width=16, depth=2, heads=2, mlp_ratio=1.0)
    moe = MoESettings(router=router, experts=Mlp(number=6, hidden_ratio=0.5), blocks=(1,))
    dense = backbone.build(IMAGE).eval()
    draw_weights(dense)
    model = copy_dense_into_moe(backbone.build(IMAGE, moe), dense, PIECES)
    images = torch.rand(3, 1, 8, 8)
    torch.testing.assert_close(model(images).prediction, dense(images).prediction)
    model(images).prediction.square().sum().backward()
    assert all(one.grad is not None for one in model.parameters())


QUIET = partial(NoisyTopK, noise_std=0)


@pytest.mark.parametrize(
    ("router", "experts", "key", "allowed"),
    [
        (QUIET(), Mlp(number=5), "experts.number", "allowed: multiples"),
        (QUIET(k=1), Mlp(), "router.k", "multiples of upcycle.pieces, 2"),
        (NoisyTopK(), Mlp(), "router.noise_std", "allowed with granular upcycling: 0"),
        (Cosine(), Mlp(), "router.kind", "noisy_top_k, top_k_softmax"),
        (QUIET(balance={"kind": "loss_free"}), Mlp(), "router.balance", "upcycling: null"),
        (QUIET(score="sigmoid"), Mlp(), "router.score", "softmax"),
    ],
)
def test_what_would_part_the_pieces_is_refused(router, experts, key, allowed):
    moe = MoESettings(router=router, experts=experts, blocks=(1,))
    backbone = Vit(patch=4, width=16, depth=2, heads=2)
    with pytest.raises(UserError, match=f"^{key}: found .*{allowed}"):
        copy_dense_into_moe(backbone.build(IMAGE, moe), backbone.build(IMAGE), PIECES)


def test_units_are_redrawn_with_their_own_mean_and_deviation():
    # Fixture D2: rows 1 and 3 of W1 hold 3, 4, 7, 8: mean 5.5, deviation √(17/3) = 2.380476;
    # columns 1 and 3 of W2 hold 0, 1, 1, 4: mean 1.5, deviation √3.
    up = torch.tensor([[1.0, 2], [3, 4], [5, 6], [7, 8]])
    down = torch.tensor([[1.0, 0, 2, 1], [0, 1, 1, 4]])
    units = torch.tensor([1, 3])
    redraw_rows(up, units, torch.tensor([[1, -1], [0, 0.5]]))
    redraw_rows(down.t(), units, torch.tensor([[0.0, 1], [-1, 2]]).t())
    expected = torch.tensor([[1, 2], [7.880476, 3.119524], [5, 6], [5.5, 6.690238]])
    torch.testing.assert_close(up, expected, atol=1e-6, rtol=0)
    expected = torch.tensor([[1, 1.5, 2, 3.232051], [0, -0.232051, 1, 4.964102]])
    torch.testing.assert_close(down, expected, atol=1e-6, rtol=0)


def test_each_expert_has_its_own_units_drawn_anew_and_each_seed_others():
    def redrawn(ratio: float, seed: int) -> list[torch.Tensor]:
        torch.manual_seed(0)
        experts = Mlp(number=3, hidden_ratio=1.25, init="identical")
        layer = build_moe_feed_forward(NoisyTopK(), experts, 8)
        layer.experts.up_bias.data.uniform_()
        before = layer.experts.up.clone()
        Drop(ratio=ratio).redraw_experts(layer, seed)
        return [*(layer.experts.up != before).any(dim=1), *layer.experts.parameters()]

    first, second, third, *_ = redrawn(0.7, 0)
    assert first.sum() == second.sum() == 7  # ⌊0.7 · 10⌋
    assert not torch.equal(first, second) or not torch.equal(first, third)
    ours, again, other = redrawn(0.7, 0), redrawn(0.7, 0), redrawn(0.7, 1)
    assert all(map(torch.equal, ours, again)) and not torch.equal(ours[3], other[3])
    assert not any(changed.any() for changed in redrawn(0.0, 0)[:3])


def timm_model(name: str = "vit_tiny_patch16_224", **changes) -> nn.Module:
    """A small model of timm whose every part counts: no weight is 0."""
    define_missing_operators()
    import timm

    torch.manual_seed(0)
    model = timm.create_model(name, pretrained=False, **SMALL, **MODELS[name], **changes)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape)
    return model.eval()


@pytest.mark.parametrize("name", MODELS)
def test_it_computes_what_it_did_and_its_routers_learn_from_the_records(name):
    model = timm_model(name)
    images = torch.rand(2, 3, 32, 32)
    before = model(images)
    layers = upcycle_in_place(model, router=NOISY, experts=EXPERTS, blocks=(1, 2))
    assert [type(block.mlp) for block in model.modules() if hasattr(block, "mlp")].count(MoELayer)
    with routing_collector(model) as records:
        after = model(images)
    torch.testing.assert_close(after, before, atol=1e-5, rtol=1e-4)
    assert len(records) == 2 and all(record.probs.shape[0] == 2 for record in records)
    assert routing_loss(records, []) == 0
    (after.sum() + routing_loss(records, [Load(weight=0.1)])).backward()
    for layer in layers:
        assert layer.feed_forward.router.weight.grad.any()
        assert layer.feed_forward.experts.up.grad.any() and not layer.training


def test_pieces_of_copies_compute_what_the_model_did():
    model, images = timm_model(), torch.rand(2, 3, 32, 32)
    before = model(images)
    quiet = NoisyTopK(k=2, renormalise=True, noise_std=0)
    halves = Mlp(number=4, hidden_ratio=2)
    upcycle_in_place(model, router=quiet, experts=halves, kind=Granular(pieces=2))
    torch.testing.assert_close(model(images), before, atol=1e-5, rtol=1e-4)


def test_half_of_each_copys_units_are_drawn_anew_by_the_seed():
    units = []
    for seed in (0, 0, 1):
        model = timm_model()
        fc1 = model.blocks[3].mlp.fc1.weight.clone()
        drop = Drop(ratio=0.5)
        settings = {"router": NOISY, "experts": EXPERTS, "blocks": (3,)}
        (layer,) = upcycle_in_place(model, **settings, kind=drop, seed=seed)
        kept = (layer.feed_forward.experts.up.transpose(1, 2) == fc1).all(dim=-1)
        assert kept.sum(dim=1).tolist() == [32] * 4, "of 64 hidden units of each expert"
        units.append(layer.feed_forward.experts.up)
    assert torch.equal(units[0], units[1]) and not torch.equal(units[0], units[2])


def test_blocks_are_chosen_as_in_a_method_and_its_state_is_a_torch_models():
    model, other = timm_model(), timm_model()
    for one in (model, other):
        upcycle_in_place(one, router=NOISY, experts=EXPERTS, blocks="every_2")
    kinds = [type(block.mlp).__name__ for block in model.blocks]
    assert kinds == ["Mlp", "MoELayer", "Mlp", "MoELayer"]
    model.blocks[1].mlp.feed_forward.router.weight.data.normal_()
    other.load_state_dict(model.state_dict())
    images = torch.rand(2, 3, 32, 32)
    assert torch.equal(other(images), model(images))


@pytest.mark.parametrize(
    ("changes", "settings", "problem"),
    [
        ({}, {"experts": Mlp(number=4, hidden_ratio=2)}, "upcycle: .* set experts.hidden_ratio"),
        ({}, {"experts": Mlp(number=4, activation="relu")}, "experts.activation: found relu"),
        ({}, {"blocks": (4,)}, r"blocks: found \[4\]"),
        ({}, {"blocks": "some"}, "blocks: found some"),
        ({}, {"router": Hash()}, "router: found hash, which reads patches"),
        ({}, {"kind": Granular(pieces=2)}, "router.noise_std: found 1, which breaks ties"),
        ({"proj_drop_rate": 0.1}, {}, "upcycle: found an mlp with dropout"),
        ({"act_layer": nn.SiLU}, {}, "upcycle: found an mlp with the activation SiLU"),
    ],
)
def test_what_does_not_fit_is_one_line_and_changes_nothing(changes, settings, problem):
    model = timm_model(**changes)
    with pytest.raises(UserError, match=f"^{problem}"):
        upcycle_in_place(model, **{"router": NOISY, "experts": EXPERTS} | settings)
    assert not any(isinstance(module, MoELayer) for module in model.modules())


def test_only_dense_foreign_models_are_upcycled():
    model = timm_model()
    upcycle_in_place(model, router=NOISY, experts=EXPERTS)
    for other, problem in (
        (model, "a chosen block has experts already"),
        (vit(None), "moecore's models do not change"),
        (nn.Linear(2, 2), "Linear has no block with an mlp"),
    ):
        with pytest.raises(UserError, match=f"^upcycle: {problem}"):
            upcycle_in_place(other, router=NOISY, experts=EXPERTS)


def test_the_loss_is_the_weighted_sum_and_a_regularizer_alone_is_not_weighted():
    layer = MoELayer(8, NOISY, EXPERTS)
    with routing_collector(layer) as records:
        layer(torch.randn(5, 8))
    parts = [Importance(weight=0.5), ZLoss(weight=3.0), GroupSparsity(weight=0.0)]
    alone = [routing_loss(records, [part.model_copy(update={"weight": 1.0})]) for part in parts]
    torch.testing.assert_close(routing_loss(records, parts), 0.5 * alone[0] + 3.0 * alone[1])


def test_what_a_router_adds_by_itself_is_part_of_the_loss():
    layer = MoELayer(8, Depth(share=0.5, sampling="bce", sampling_weight=2.0), EXPERTS)
    with routing_collector(layer) as records:
        layer(torch.randn(5, 8))
        layer(torch.randn(3, 8))
    importance = routing_loss([one.with_penalty(None) for one in records], [Importance()])
    penalty = records[0].penalty.mean() + records[1].penalty.mean()
    assert penalty > 1
    torch.testing.assert_close(routing_loss(records, [Importance()]), importance + penalty)
    routing_loss(records, []).backward()
    assert layer.feed_forward.router.weight.grad.any()


def test_regularizers_that_need_more_than_records_are_refused():
    layer = MoELayer(8, Hash(by="position"), EXPERTS)
    with routing_collector(layer) as records:
        layer(torch.randn(5, 8))
    with pytest.raises(UserError, match="found jensen_shannon, which needs two_views"):
        routing_loss(records, [JensenShannon()])
