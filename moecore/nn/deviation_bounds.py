"""Sound bounds of how far a change of the pixels moves the tokens of a vision transformer.

The change of each number is its derivative by the pixels times theirs, which is exact, and a rest
of second order. Operation by operation the rest is bounded for each number (interval bound
propagation, Gowal et al. 2018) and for each token in ℓ2 (a product of Lipschitz constants), while
the pixels stay in a ball. Each bound limits the other, so every step has the tighter of both. J
balls around each of B images, P pixels, T tokens, E experts.

Every bound is the bound of the input times factors that only grow with the ball. So in a ball of
a share s < 1 of the radius everything moves by at most s times as far.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import jvp, vmap
from torch.nn.functional import conv2d, gelu, linear, normalize, pad

from moecore.nn.backbones.patch_transformer_base import PatchTransformer
from moecore.nn.layers.block import Attention, DenseMlp, LayerScale
from moecore.nn.layers.moe import MoEFeedForward
from moecore.nn.layers.patch_embed import ConvStem, PatchEmbed, cut_patches
from moecore.nn.routers.token_choice import FLOOR, MAX_LOG_FACTOR

MAX_PIXELS = 3072  # of an image, times channels, up to which derivatives are computed
Map = Callable[[Tensor], Tensor]


class Deviation(NamedTuple):
    """Numbers at the images, and their change in each ball: linear in the pixels, and a rest."""

    centre: Tensor  # (B, T, d), or (B, C, H, W) in a stem
    tangent: Tensor  # (P, B, …), derivatives by the pixels; all 0: the rest is the whole change
    radius: Tensor  # of each number's rest, (J, B, …)
    length: Tensor  # of each token's rest in ℓ2, (J, B, T, 1); in a stem image's, (J, B, 1, 1, 1)
    balls: tuple[Tensor, Tensor]  # radii in ℓ∞, and in ℓ2; J of both together

    @property
    def axes(self) -> tuple[int, ...]:
        if self.centre.ndim == 4:  # a stem's image
            return (-3, -2, -1)
        return (-1,)

    def norm(self, values: Tensor) -> Tensor:
        """Return the ℓ2 norm of values (…, T, d) or (…, C, H, W) over ``axes``."""
        return torch.linalg.vector_norm(values, dim=self.axes, keepdim=True)

    def reach(self, tangent: Tensor) -> Tensor:
        """Return how far a linear part (P, B, …) moves each number, (J, B, …)."""
        steepest = tangent.abs().sum(dim=0), tangent.norm(dim=0)  # the dual norms
        parts = [torch.tensordot(*pair, 0) for pair in zip(self.balls, steepest, strict=True)]
        return torch.cat(parts)

    @property
    def moved(self) -> tuple[Tensor, Tensor]:
        """Return radius and length of the whole change, linear part and rest."""
        linear_part = self.reach(self.tangent)
        return linear_part + self.radius, self.norm(linear_part) + self.length

    def follow(self, function: Map, radius: Tensor, length: Tensor) -> "Deviation":
        """Return the numbers after a function, whose rest has these bounds."""
        # Each limits the other.
        at = self._replace(centre=function(self.centre), tangent=push_tangents(function, self))
        length = torch.minimum(length, at.norm(radius))
        return at._replace(radius=torch.minimum(radius, length), length=length)


def push_tangents(function: Map, at: Deviation) -> Tensor:
    """Return the derivatives (P, B, …) of a function's value."""
    return vmap(lambda tangent: jvp(function, (at.centre,), (tangent,))[1])(at.tangent)


def bound_after_linear(at: Deviation, weight: Tensor, bias: Tensor | None) -> Deviation:
    radius = torch.minimum(linear(at.radius, weight.abs()), weight.norm(dim=1) * at.length)
    length = torch.linalg.matrix_norm(weight, ord=2) * at.length
    return at.follow(partial(linear, weight=weight, bias=bias), radius, length)


def bound_convolution(at: Deviation, layer: nn.Conv2d) -> Deviation:
    """Bound a convolution of images; its spectral norm is at most ‖weight‖₂ · ⌈kernel / stride⌉."""
    # A pixel lies in at most ⌈kernel / stride⌉² windows, and of each the map is a matrix product.
    weight = layer.weight.flatten(1)
    box = conv2d(at.radius.flatten(0, 1), layer.weight.abs(), None, layer.stride, layer.padding)
    overlap = math.ceil(layer.kernel_size[0] / layer.stride[0])
    length = torch.linalg.matrix_norm(weight, ord=2) * overlap * at.length
    rows = weight.norm(dim=1).view(-1, 1, 1) * at.length
    radius = torch.minimum(box.unflatten(0, at.radius.shape[:2]), rows)
    return at.follow(layer, radius, length)


def bound_patches(at: Deviation, layer: PatchEmbed) -> Deviation:
    """Bound the linear map of patches of an image (B, C, H, W) to tokens."""
    cut = partial(cut_patches, sides=[layer.patch] * 2)
    radius = cut(at.radius.flatten(0, 1)).unflatten(0, at.radius.shape[:2])
    length = at.length.squeeze(-1).expand(*radius.shape[:-1], 1)
    patches = at.follow(cut, radius, length)
    return bound_after_linear(patches, layer.proj.weight.flatten(1), layer.proj.bias)


def bound_norm(at: Deviation, eps: float, floor: float = 0.0, is_centred: bool = True) -> Deviation:
    """Bound d / σ, σ = √(mean d² + eps), d = x − mean x; not centred: x / max(‖x‖, floor)."""
    count = 1
    if is_centred:
        count = math.prod(at.centre.shape[axis] for axis in at.axes)
        centre_on_mean = lambda values: values - values.mean(dim=at.axes, keepdim=True)
        radius = at.radius * (1 - 2 / count) + at.radius.mean(dim=at.axes, keepdim=True)
        at = at.follow(centre_on_mean, radius, at.length)
    sigma = lambda norm: (norm.square() / count + eps).sqrt()
    divide = lambda values: values / sigma(at.norm(values)).clamp_min(floor)
    scaled, width = divide(at.centre), sigma(at.norm(at.centre)).clamp_min(floor)
    moved, length = at.moved
    lowest = sigma((at.norm(at.centre) - length).clamp_min(0))
    lowest = lowest.where(lowest > floor, 0)  # a kink: no bound
    # Second derivative along a line D, with h = ‖D‖ / (√n σ): at most (2 |D| h + 2 |d| h²) / σ.
    share = length / count**0.5 / lowest
    curve = (moved * share + (at.centre.abs() + moved) * share.square()) / lowest
    radius = (at.radius + scaled.abs() * at.length / count**0.5) / width + curve
    return at.follow(divide, radius, at.length / width + at.norm(curve))


def scale(at: Deviation, weight: Tensor, bias: Tensor | float = 0.0) -> Deviation:
    """Bound weight · x + bias, broadcast over numbers."""
    length = at.length * weight.abs().amax()
    return at.follow(lambda values: values * weight + bias, at.radius * weight.abs(), length)


def gelu_derivatives(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return GELU's derivatives Φ(x) + x φ(x) and (2 − x²) φ(x)."""
    density = torch.exp(-values.square() / 2) / math.sqrt(2 * math.pi)
    return torch.special.ndtr(values) + values * density, (2 - values.square()) * density


def bound_gelu(at: Deviation) -> Deviation:
    """Bound GELU by its slope at the centre and its largest second derivative in the interval."""
    moved, _ = at.moved
    low, high = at.centre - moved, at.centre + moved
    # the second derivative is monotone between −∞, −2, 0, 2 and ∞
    turns = [low.clamp_min(turn).minimum(high) for turn in (-2.0, 0.0, 2.0)]
    bends = [gelu_derivatives(place)[1].abs() for place in (low, *turns, high)]
    curve = torch.stack(bends).amax(dim=0) * moved.square() / 2
    slope = gelu_derivatives(at.centre)[0].abs()
    length = slope.amax(dim=at.axes, keepdim=True) * at.length + at.norm(curve)
    return at.follow(gelu, slope * at.radius + curve, length)


def add(first: Deviation, second: Deviation) -> Deviation:
    pairs = zip(first[:4], second[:4], strict=True)
    centre, tangent, radius, length = (part + other for part, other in pairs)
    return Deviation(centre, tangent, radius, length, first.balls)


def bound_attention(at: Deviation, layer: Attention) -> Deviation:
    """Bound self-attention: how far its scores move, and with these the weighted mean of values."""
    heads = layer.heads
    weights = layer.qkv.weight.unflatten(0, (3, heads, -1))  # (3, H, r, d)
    # query, key and value, (3, B, H, T, r)
    read = lambda x: layer.qkv(x).unflatten(-1, (3, heads, -1)).movedim(-3, 0).transpose(-3, -2)
    scaling = weights.shape[2] ** -0.5

    def score(tokens: Tensor) -> Tensor:
        query, key, _ = read(tokens)
        return query @ (key - key.mean(dim=-2, keepdim=True)).mT * scaling

    query, key, value = read(at.centre)
    norm = lambda values: values.norm(dim=-1, keepdim=True)
    # A vector that all keys share changes no probability. The score of tokens i and j moves along
    # ``by_key`` of i with token j and along ``by_query`` of j with token i.
    by_query = (key - key.mean(dim=-2, keepdim=True)) @ weights[0]
    by_key = query @ weights[1]
    # Values (B, H, T, d) after the output map, and their mean, whose derivative by a score is
    # p_j (v_j − mean).
    output = layer.proj.weight.unflatten(1, (heads, -1)).movedim(1, 0)  # (H, d, r)
    maps = output @ weights[2]

    def move_values(tokens: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
        box = torch.minimum(tokens @ maps.abs().mT, maps.norm(dim=-1).unsqueeze(1) * length)
        ball = torch.linalg.matrix_norm(maps, ord=2).view(-1, 1, 1) * length
        return box, torch.minimum(ball, norm(box))

    values = value @ output.mT
    probs = score(at.centre).softmax(dim=-1)
    distance = torch.cdist(probs @ values, values, compute_mode="donot_use_mm_for_euclid_dist")
    tokens, length = at.radius.unsqueeze(2), at.length.unsqueeze(2)  # for all heads
    shifts = [part.unsqueeze(2) for part in at.moved]
    both = torch.linalg.matrix_norm(weights[0].mT @ weights[1], ord=2).view(-1, 1, 1)
    bend = torch.minimum(by_key.abs() @ tokens.mT, norm(by_key) * length.mT)
    bend = bend + torch.minimum(tokens @ by_query.abs().mT, length * norm(by_query).mT)
    bend = (bend + both * shifts[1] * shifts[1].mT) * scaling
    moved = at.reach(push_tangents(score, at)) + bend
    moved = moved + moved.amax(dim=-1, keepdim=True)
    # p_j moves by at most p_j (e^m − 1), and from its linear part by at most p_j e^m m² / 2.
    pull = (probs * (bend + moved.square() * moved.exp() / 2) * distance).sum(dim=-1, keepdim=True)
    drift = probs * torch.expm1(moved)
    radius, length = (
        (probs @ part + drift @ change + pull).sum(dim=2)
        for part, change in zip(move_values(tokens, length), move_values(*shifts), strict=True)
    )
    # ``weights``: by plain operations, as the fused kernel has no forward derivative
    return at.follow(lambda tokens: layer(tokens, weights=True)[0], radius, length)


def deciding_map(at: Deviation, router: nn.Module) -> tuple[Deviation, Tensor, Tensor | None]:
    """Return what a router's last linear map gets, and that map's weight (E, d) and bias (E,)."""
    projection = getattr(router, "projection", None)
    if projection is None:
        return at, router.get_parameter("weight"), getattr(router, "bias", None)
    narrow = bound_norm(bound_after_linear(at, projection, None), 0.0, FLOOR, is_centred=False)
    factor = router.get_parameter("log_factor").clamp(max=MAX_LOG_FACTOR).exp()
    return narrow, normalize(router.get_parameter("weight"), dim=-1, eps=FLOOR) * factor, None


def bound_after_layer(at: Deviation, layer: Any) -> Deviation:
    """Bound a layer without routing; TypeError for a layer that has no bound here."""
    if isinstance(layer, nn.Identity):
        return at
    if isinstance(layer, nn.LayerNorm):
        return scale(bound_norm(at, layer.eps), layer.weight, layer.bias)
    if isinstance(layer, nn.GroupNorm) and layer.num_groups == 1:
        weight, bias = layer.weight.view(-1, 1, 1), layer.bias.view(-1, 1, 1)
        return scale(bound_norm(at, layer.eps), weight, bias)
    if isinstance(layer, nn.Conv2d):
        return bound_convolution(at, layer)
    if isinstance(layer, nn.GELU):
        return bound_gelu(at)
    if isinstance(layer, LayerScale):
        return scale(at, layer.gamma)
    if isinstance(layer, DenseMlp) and layer.activation == "gelu":
        hidden = bound_gelu(bound_after_linear(at, layer.fc1.weight, layer.fc1.bias))
        return bound_after_linear(hidden, layer.fc2.weight, layer.fc2.bias)
    raise TypeError(f"deviation_bounds: no bound of {type(layer).__name__}")


def deviation_of_pixels(pixels: Tensor, linf: Tensor, l2: Tensor) -> Deviation:
    """Return the pixels (B, C, H, W) of images, which may move inside balls."""
    shape, number = pixels.shape, pixels[0].numel()
    count = number
    if number > MAX_PIXELS:  # no derivatives by the pixels
        count = 1
    share = float(count < number)  # of the change that is the rest
    tangent = (1 - share) * torch.eye(count, number).to(pixels).view(count, 1, *shape[1:])
    radius = share * torch.cat([linf, l2]).view(-1, 1, 1, 1, 1).expand(-1, *shape)
    length = share * torch.cat([linf * number**0.5, l2]).view(-1, 1, 1, 1, 1)
    length = length.expand(-1, len(pixels), 1, 1, 1)
    return Deviation(pixels, tangent.expand(-1, *shape), radius, length, (linf, l2))


def bound_embedding(model: PatchTransformer, at: Deviation) -> Deviation:
    """Bound the tokens before the first block, of pixels in [0, 1]."""
    at = scale(at._replace(centre=at.centre - model.pixel_mean), 1 / model.pixel_std[0])
    stem: Any = model.patch_embed
    if isinstance(stem, ConvStem):
        for layer in stem.convolutions:
            at = bound_after_layer(at, layer)
        stem = stem.embed
    at = bound_patches(at, stem)
    special = [token for token in (model.cls_token, model.dist_token) if token is not None]
    fixed = torch.cat([*special, torch.zeros_like(at.centre[:1])], dim=1)
    fixed[:, fixed.shape[1] - model.pos_embed.shape[1] :] += model.pos_embed
    centre, tangent, radius, length = (pad(part, (0, 0, model.special, 0)) for part in at[:4])
    at = Deviation(centre + fixed, tangent, radius, length, at.balls)
    return bound_after_layer(at, model.norm_pre)


def routing_shares(model: PatchTransformer, at: Deviation, chosen: Tensor, guard: float) -> Tensor:
    """Return s (J, B, T): in s times a ball a token keeps its experts in the first MoE layer."""
    # model: a frozen fp64 copy; at: pixels in [0, 1] and balls; chosen: (B, T, E) of the first MoE
    # layer; guard: taken off margins. Only s up to 1 is proven, and NaN proves nothing.
    at = bound_embedding(model, at)
    blocks: Any = model.blocks
    for block in blocks:
        attended = bound_attention(bound_after_layer(at, block.norm1), block.attn)
        at = add(at, bound_after_layer(attended, block.ls1))
        entering = bound_after_layer(at, block.norm2)
        if isinstance(block.mlp, MoEFeedForward):
            return margin_shares(entering, block.mlp.router, chosen, guard)
        at = add(at, bound_after_layer(bound_after_layer(entering, block.mlp), block.ls2))
    raise ValueError("routing_shares: the model has no MoE layer")


def margin_shares(at: Deviation, router: nn.Module, chosen: Tensor, guard: float) -> Tensor:
    """Return the smallest margin / bound of its change, over pairs of chosen and other experts."""
    at, weight, bias = deciding_map(at, router)
    shares = torch.full_like(at.length[..., 0], torch.inf)
    for expert in range(len(weight)):
        gaps = None if bias is None else bias[expert] - bias
        margins = bound_after_linear(at, weight[expert] - weight, gaps)
        is_pair = chosen[..., expert : expert + 1] & ~chosen
        share = torch.where(is_pair, (margins.centre - guard) / margins.moved[0], torch.inf)
        shares = torch.minimum(shares, share.amin(dim=-1))
    return shares
