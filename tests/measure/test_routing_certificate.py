"""Certified radii: bounds hold for random and attacked pixels, and no attack finds a change."""

import numpy as np
import pytest
import torch
from torch import nn

from moecore.attacks.base import Ball
from moecore.backbones import SingleLayer, Vit
from moecore.measure.routing_certificate import RoutingCertificate, attack_tokens, certified_radii
from moecore.nn import deviation_bounds as bounds
from moecore.nn.layers import block, lipschitz_lemma, moe
from moecore.parts import EncodeOptions, MeasuredModel
from moecore.testing import check_measurement
from tests.measure.subjects import built

SETTINGS = RoutingCertificate(images=8, attacked=30, steps=8)
MLP = {"kind": "mlp", "number": 4, "hidden_ratio": 0.5}
SMALL = {"patch": 6, "width": 16, "depth": 2, "heads": 2}
PLAIN = Vit(**SMALL)
CONV = Vit(**SMALL, stem="conv", stem_width=4)
DEIT = Vit(**SMALL, pooling="class+distillation", pre_norm=True, layer_scale=0.5, qkv_bias=False)
MEAN = Vit(**SMALL, pooling="mean")
TOP_2 = {"kind": "noisy_top_k", "k": 2}
WEIGHTS = ("router_weight", "chosen_weight", "diversity_weight")
COMPETITION = {"kind": "competition", "k": 2, **dict.fromkeys(WEIGHTS, 1.0)}


def sparse(router: dict, blocks: tuple[int, ...] = (1,)) -> moe.MoESettings:
    return moe.MoESettings(router=router, experts=MLP, blocks=blocks)


MODELS = {
    "first block": (PLAIN, sparse(TOP_2, (0, 1))),
    "second block": (PLAIN, sparse({"kind": "top_k_softmax", "k": 1})),
    "conv": (CONV, sparse(TOP_2)),
    "deit": (DEIT, sparse({"kind": "cosine", "k": 2})),
    "mean": (MEAN, sparse(COMPETITION)),
    "frozen": (PLAIN, sparse({"kind": "frozen_copy", "router": TOP_2, "until": 0.5}, (0,))),
}


@pytest.fixture(scope="module")
def models(data):
    return {name: built(*parts, data, 3) for name, parts in MODELS.items()}


@pytest.fixture(scope="module")
def images(data):
    return np.array(data.test.images[:8])


@pytest.mark.parametrize("name", MODELS)
def test_no_attack_changes_experts_within_a_radius(data, models, name):
    result = check_measurement(SETTINGS, MeasuredModel(models[name], data))
    assert result.find("routing_violations").value == 0
    for norm in ("linf", "l2"):
        assert result.find("routing_radius", norm=norm).value > 0
        shares = result.curve("certified_tokens", norm)
        assert list(shares.values()) == sorted(shares.values(), reverse=True)


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("name", ["first block", "deit"])
def test_the_attack_finds_changes_outside_of_a_radius(models, images, name, norm):
    radii = certified_radii(models[name], images)[norm]
    tokens = radii.nonzero()
    assert len(tokens) > 30
    assert not attack_tokens(models[name], images, tokens, radii, norm, 8).any()
    assert attack_tokens(models[name], images, tokens, 1000 * radii, norm, 8).float().mean() > 0.8


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("is_exact", [True, False])
def test_tokens_move_by_at_most_their_bounds(models, images, monkeypatch, is_exact, name, norm):
    """In two balls: in the smaller, bounds shrink by its share s, those of the rest by s²."""
    exact = lipschitz_lemma.frozen_double_copy(models[name])
    pixels = torch.from_numpy(images[:3]).double() / 255
    seen = []
    monkeypatch.setattr(bounds, "get_safe_radius_share", lambda at, *_: seen.append(at))
    if not is_exact:
        monkeypatch.setattr(bounds, "MAX_PIXELS_WITH_DERIVATIVES", 0)
    sizes, none = torch.tensor([1e-3, 1e-3 / 4]).double(), torch.zeros(0).double()
    balls = {"linf": none, "l2": none} | {norm: sizes}
    bounds.certify_radius_shares(
        exact, bounds.deviation_of_pixels(pixels, **balls), torch.ones(()), 0.0
    )
    found = seen[0]
    radius, length = found.total_change_bounds
    assert (radius[1] <= radius[0] / 4 * (1 + 1e-9)).all()
    options = EncodeOptions("mlp_input", (exact.moe.indices(2)[0],))
    tokens = lambda x: exact.encode(x, options).features[0]
    torch.testing.assert_close(found.centre, tokens(pixels))
    generator = torch.Generator().manual_seed(1)
    for _ in range(10):
        leaf = pixels.clone().requires_grad_(True)
        weights = torch.randn(found.centre.shape, generator=generator).double()
        (direction,) = torch.autograd.grad((tokens(leaf) * weights).sum(), leaf)
        if is_exact:
            error = torch.einsum("pbtd,btd->bp", found.tangent.double(), weights)
            error -= direction.flatten(1)
            assert error.norm() < direction.norm() * bounds.ROUNDING / 100
            assert (found.radius[1] <= found.radius[0] / 16 * (1 + 1e-9)).all()
        change = 1e-3 * Ball(pixels, 1.0, norm).direction(direction)
        moved = tokens(pixels + change) - found.centre
        assert (moved.abs() <= radius[0]).all()
        assert (moved.norm(dim=-1) <= length[0, ..., 0]).all()


LAYERS = {
    "linear": (3, lambda at, layer: bounds.bound_after_linear(at, layer.weight, layer.bias)),
    "gelu": (3, bounds.bound_layer_by_type),
    "norm": (3, bounds.bound_layer_by_type),
    "attention": (3, bounds.bound_attention),
    "group norm": (4, bounds.bound_layer_by_type),
    "convolution": (4, bounds.bound_layer_by_type),
}


def layer_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    layer = {
        "linear": nn.Linear(6, 5),
        "gelu": nn.GELU(),
        "norm": nn.LayerNorm(6),
        "attention": block.Attention(6, 2),
        "group norm": nn.GroupNorm(1, 2),
        "convolution": nn.Conv2d(2, 3, 3, stride=2, padding=1),
    }[name].double()
    for parameter in layer.parameters():
        parameter.data = torch.randn_like(parameter)
    return layer.requires_grad_(False)


@pytest.mark.parametrize("is_exact", [True, False])
@pytest.mark.parametrize("size", [1e-4, 0.01])
@pytest.mark.parametrize("name", LAYERS)
def test_an_operation_moves_by_at_most_its_bound_and_nearly_as_far(name, size, is_exact):
    """Gradient ascent of single numbers and of lengths, in the box and in the ball."""
    axes, bound = LAYERS[name]
    layer = layer_of(name)
    run = (lambda x: layer(x)[0]) if name == "attention" else layer
    centre = torch.randn(1, *((4, 6) if axes == 3 else (2, 4, 4)), dtype=torch.float64)
    kept = (-1,) if axes == 3 else (-3, -2, -1)
    norm = lambda values: torch.linalg.vector_norm(values, dim=kept, keepdim=True)
    clean = run(centre)
    sharpest = 0.0
    for is_box in (True, False):
        number = centre[0].numel() if axes == 4 else 6
        length = torch.full_like(norm(centre), size * (number**0.5 if is_box else 1))[None]
        radius, sizes = torch.full_like(centre, size)[None], torch.full((1,), size).double()
        shared = tangent = torch.zeros(0, *centre.shape).double()
        if is_exact:  # in ℓ2 this is the ball of all numbers, which lies in that of a token
            tangent = torch.eye(centre.numel()).double().view(-1, *centre.shape)
            if axes == 4:  # windows of a pixel
                tangent = torch.eye(2).double().view(2, 1, 2, 1, 1).repeat(1, 1, 1, 4, 4)
            radius, length = torch.zeros_like(radius), torch.zeros_like(length)
        balls = (sizes, sizes[:0]) if is_box else (sizes[:0], sizes)
        found = bound(bounds.Deviation(centre, tangent, radius, length, balls, shared), layer)
        torch.testing.assert_close(found.centre, clean)
        limits = found.total_change_bounds
        for target in range(12):
            change = size * torch.randn_like(centre).sign() / (1 if is_box else centre.numel())
            for _ in range(30):
                leaf = change.requires_grad_(True)
                moved = run(centre + leaf) - clean
                aim = norm(moved).max() if target == 0 else moved.flatten()[target].abs()
                (gradient,) = torch.autograd.grad(aim, leaf)
                step = gradient.sign() if is_box else gradient / norm(gradient).clamp_min(1e-30)
                change = change.detach() + size / 3 * step
                change = change.clamp(-size, size)
                if not is_box:
                    whole = change.norm() if is_exact else norm(change)
                    change = change * (size / whole).clamp(max=1)
                moved = moved.detach()
                shares = ((moved.abs() / limits[0][0]).max(), (norm(moved) / limits[1][0]).max())
                assert max(shares) <= 1 + 1e-6
                sharpest = max(sharpest, *map(float, shares))
    assert sharpest > (0.3 if name == "attention" else 0.5)


def test_ties_and_margins_within_rounding_have_no_radius(data, images):
    model = built(PLAIN, sparse(TOP_2, (0,)), data, 3)
    router = model.blocks[0].mlp.router
    router.weight.data[1] = router.weight.data[0]
    tied = certified_radii(model, images)["linf"]
    chosen = model.routing_of(torch.from_numpy(images) / 255)[0].chosen
    assert (tied[chosen[..., 0] != chosen[..., 1]] == 0).all()
    router.weight.data[:] = router.weight.data[0] * (1 + 1e-8 * torch.arange(4)[:, None])
    assert (certified_radii(model, images)["linf"] == 0).all()


REFUSED = {
    "no routers": (PLAIN, None),
    "no change of the pixels": (PLAIN, sparse({"kind": "hash", "k": 1, "by": "position"})),
    "router hash": (PLAIN, sparse({"kind": "hash", "k": 1})),
    "router eigenbasis": (PLAIN, sparse({"kind": "eigenbasis", "k": 2})),
    "balance": (PLAIN, sparse({**TOP_2, "balance": {"kind": "loss_free"}})),
    "vit alone": (SingleLayer(), sparse(TOP_2, (0,))),
    "quick_gelu": (Vit(**SMALL, activation="quick_gelu"), sparse(TOP_2)),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_models_without_bounds_say_why(data, reason):
    subject = MeasuredModel(built(*REFUSED[reason], data, 1), data)
    assert reason in RoutingCertificate.applies(subject)


def test_an_epsilon_of_0_is_refused():
    with pytest.raises(ValueError, match="greater than 0"):
        RoutingCertificate(epsilons=[0.0])
