"""Sound bounds of how far a change of the pixels moves the tokens of a vision transformer.

Operation by operation they bound how far each number can move (interval bound propagation, Gowal
et al. 2018) and how far each token can in ℓ2 (a product of local Lipschitz constants), while the
pixels stay in a ball. Each bound limits the other, so every step has the tighter of both. J balls
around each of B images, T tokens, E experts.

Every bound is the bound of the input times factors that only grow with the ball. So in a ball of
a share s < 1 of the radius everything moves by at most s times as far.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, gelu, linear, normalize, pad

from moecore.nn.backbones.patch_transformer_base import PatchTransformer
from moecore.nn.layers.block import Attention, DenseMlp, LayerScale
from moecore.nn.layers.moe import MoEFeedForward
from moecore.nn.layers.patch_embed import ConvStem, PatchEmbed, cut_patches
from moecore.nn.routers.token_choice import FLOOR, MAX_LOG_FACTOR


class Deviation(NamedTuple):
    """Numbers at the images, and bounds of their change within each ball; all fp64."""

    centre: Tensor  # (B, T, d), or (B, C, H, W) in a stem
    radius: Tensor  # (J, B, …), of each number
    length: Tensor  # of each token in ℓ2, (J, B, T, 1); in a stem of the image, (J, B, 1, 1, 1)

    @property
    def axes(self) -> tuple[int, ...]:
        return (-3, -2, -1) if self.centre.ndim == 4 else (-1,)

    def norm(self, values: Tensor) -> Tensor:
        """Return the ℓ2 norm of values (…, T, d) or (…, C, H, W) over ``axes``."""
        return torch.linalg.vector_norm(values, dim=self.axes, keepdim=True)

    def tightened(self) -> "Deviation":
        """Return it with radius and length limited by each other."""
        length = torch.minimum(self.length, self.norm(self.radius))
        return self._replace(radius=torch.minimum(self.radius, length), length=length)


def bound_linear(at: Deviation, weight: Tensor, bias: Tensor | None) -> Deviation:
    box = linear(at.radius, weight.abs())
    radius = torch.minimum(box, weight.norm(dim=1) * at.length)
    length = torch.linalg.matrix_norm(weight, ord=2) * at.length
    return Deviation(linear(at.centre, weight, bias), radius, length).tightened()


def bound_convolution(at: Deviation, layer: nn.Conv2d) -> Deviation:
    """Bound a convolution of images; its spectral norm is at most ‖weight‖₂ · ⌈kernel / stride⌉."""
    # A pixel lies in at most ⌈kernel / stride⌉² windows, and of each the map is a matrix product.
    weight = layer.weight.flatten(1)
    box = conv2d(at.radius.flatten(0, 1), layer.weight.abs(), None, layer.stride, layer.padding)
    overlap = math.ceil(layer.kernel_size[0] / layer.stride[0])
    length = torch.linalg.matrix_norm(weight, ord=2) * overlap * at.length
    rows = weight.norm(dim=1).view(-1, 1, 1) * at.length
    radius = torch.minimum(box.unflatten(0, at.radius.shape[:2]), rows)
    return Deviation(layer(at.centre), radius, length).tightened()


def bound_patches(at: Deviation, layer: PatchEmbed) -> Deviation:
    """Bound the linear map of patches of an image (B, C, H, W) to tokens."""
    sides = [layer.patch] * 2
    radius = cut_patches(at.radius.flatten(0, 1), sides).unflatten(0, at.radius.shape[:2])
    length = at.length.squeeze(-1).expand(*radius.shape[:-1], 1)
    patches = Deviation(cut_patches(at.centre, sides), radius, length).tightened()
    return bound_linear(patches, layer.proj.weight.flatten(1), layer.proj.bias)


def bound_norm(at: Deviation, eps: float, floor: float = 0.0, is_centred: bool = True) -> Deviation:
    """Bound d / max(√(mean d² + eps), floor), d = x − mean x; not centred: x / max(‖x‖, floor)."""
    # d ↦ d / σ has a Jacobian of norm 1 / σ at most, and |σ − σ₀| ≤ ‖d − d₀‖ / √n.
    change, moved, count = at.centre, at.radius, 1
    if is_centred:
        count = math.prod(change.shape[axis] for axis in at.axes)
        change = change - change.mean(dim=at.axes, keepdim=True)
        moved = moved * (1 - 2 / count) + moved.mean(dim=at.axes, keepdim=True)
    length = torch.minimum(at.length, at.norm(moved))
    sigma = lambda norm: (norm.square() / count + eps).sqrt().clamp_min(floor)
    lowest = sigma((at.norm(change) - length).clamp_min(0))
    centre = change / sigma(at.norm(change))
    radius = (moved + centre.abs() * length / count**0.5) / lowest
    return Deviation(centre, radius, length / lowest).tightened()


def scale(at: Deviation, weight: Tensor, bias: Tensor | float = 0.0) -> Deviation:
    """Bound weight · x + bias, broadcast over numbers."""
    length = at.length * weight.abs().amax()
    return Deviation(at.centre * weight + bias, at.radius * weight.abs(), length).tightened()


def gelu_slope(values: Tensor) -> Tensor:
    density = torch.exp(-values.square() / 2) / math.sqrt(2 * math.pi)
    return torch.special.ndtr(values) + values * density


def bound_gelu(at: Deviation) -> Deviation:
    """Bound GELU by its steepest slope between centre − radius and centre + radius."""
    low, high = at.centre - at.radius, at.centre + at.radius
    # the slope is monotone between −∞, −√2, √2 and ∞
    turns = [low.clamp_min(turn).minimum(high) for turn in (-math.sqrt(2), math.sqrt(2))]
    slope = torch.stack([gelu_slope(place).abs() for place in (low, *turns, high)]).amax(dim=0)
    length = slope.amax(dim=at.axes, keepdim=True) * at.length
    return Deviation(gelu(at.centre), slope * at.radius, length).tightened()


def add(first: Deviation, second: Deviation) -> Deviation:
    return Deviation(*(part + other for part, other in zip(first, second, strict=True)))


def bound_attention(at: Deviation, layer: Attention) -> Deviation:
    """Bound self-attention: how far its scores move, and with these the weighted mean of values."""
    heads = layer.heads
    weights = layer.qkv.weight.unflatten(0, (3, heads, -1))  # (3, H, r, d)
    qkv = linear(at.centre, layer.qkv.weight, layer.qkv.bias).unflatten(-1, (3, heads, -1))
    query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # (B, H, T, r)
    tokens, length = at.radius.unsqueeze(2), at.length.unsqueeze(2)  # for all heads
    norm = lambda values: values.norm(dim=-1, keepdim=True)
    # A vector that all keys share changes no probability. The score of tokens i and j moves along
    # ``by_key`` of i with token j and along ``by_query`` of j with token i.
    by_query = (key - key.mean(dim=-2, keepdim=True)) @ weights[0]
    by_key = query @ weights[1]
    moved = torch.minimum(by_key.abs() @ tokens.mT, norm(by_key) * length.mT)
    moved = moved + torch.minimum(tokens @ by_query.abs().mT, length * norm(by_query).mT)
    both = torch.linalg.matrix_norm(weights[0].mT @ weights[1], ord=2).view(-1, 1, 1)
    scaling = query.shape[-1] ** -0.5
    moved = (moved + both * length * length.mT) * scaling
    probs = (query @ key.mT * scaling).softmax(dim=-1)
    peak = moved.amax(dim=-1, keepdim=True)
    highest = probs * (moved + peak).exp()
    # Values (B, H, T, d) after the output map, and their mean, whose derivative by a score is
    # p_j (v_j − mean), with the mean wherever the ball takes it.
    output = layer.proj.weight.unflatten(1, (heads, -1)).movedim(1, 0)  # (H, d, r)
    values = value @ output.mT
    mean = probs @ values
    maps = output @ weights[2]
    box = torch.minimum(tokens @ maps.abs().mT, maps.norm(dim=-1).unsqueeze(1) * length)
    ball = torch.linalg.matrix_norm(maps, ord=2).view(-1, 1, 1) * length
    distance = torch.cdist(mean, values, compute_mode="donot_use_mm_for_euclid_dist")
    drift = (probs * distance).sum(dim=-1, keepdim=True) * torch.expm1(2 * peak)
    pull = (highest * moved * (distance + drift)).sum(dim=-1, keepdim=True)
    radius, length = (
        (torch.minimum(highest @ part, part.amax(dim=-2, keepdim=True)) + pull).sum(dim=2)
        for part in (box, torch.minimum(ball, norm(box)))
    )
    return Deviation(mean.sum(dim=1) + layer.proj.bias, radius, length).tightened()


def deciding_map(at: Deviation, router: nn.Module) -> tuple[Deviation, Tensor, Tensor | None]:
    """Return what a router's last linear map gets, and that map's weight (E, d) and bias (E,)."""
    projection = getattr(router, "projection", None)
    if projection is None:
        return at, router.get_parameter("weight"), getattr(router, "bias", None)
    narrow = bound_norm(bound_linear(at, projection, None), 0.0, FLOOR, is_centred=False)
    factor = router.get_parameter("log_factor").clamp(max=MAX_LOG_FACTOR).exp()
    return narrow, normalize(router.get_parameter("weight"), dim=-1, eps=FLOOR) * factor, None


def bound_layer(at: Deviation, layer: Any) -> Deviation:
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
        hidden = bound_gelu(bound_linear(at, layer.fc1.weight, layer.fc1.bias))
        return bound_linear(hidden, layer.fc2.weight, layer.fc2.bias)
    raise TypeError(f"deviation_bounds: no bound of {type(layer).__name__}")


def bound_embedding(model: PatchTransformer, at: Deviation) -> Deviation:
    """Bound the tokens before the first block, of pixels in [0, 1]."""
    at = scale(at._replace(centre=at.centre - model.pixel_mean), 1 / model.pixel_std[0])
    stem: Any = model.patch_embed
    if isinstance(stem, ConvStem):
        for layer in stem.convolutions:
            at = bound_layer(at, layer)
        stem = stem.embed
    at = bound_patches(at, stem)
    special = [token for token in (model.cls_token, model.dist_token) if token is not None]
    fixed = torch.cat([*special, torch.zeros_like(at.centre[:1])], dim=1)
    fixed[:, fixed.shape[1] - model.pos_embed.shape[1] :] += model.pos_embed
    at = Deviation(*(pad(part, (0, 0, model.special, 0)) for part in at))
    return bound_layer(at._replace(centre=at.centre + fixed), model.norm_pre)


def routing_shares(model: PatchTransformer, at: Deviation, chosen: Tensor, guard: float) -> Tensor:
    """Return s (J, B, T): in s times a ball a token keeps its experts in the first MoE layer."""
    # model: a frozen fp64 copy; at: pixels in [0, 1] and balls; chosen: (B, T, E) of the first MoE
    # layer; guard: taken off margins. Only s up to 1 is proven, and NaN proves nothing.
    at = bound_embedding(model, at)
    blocks: Any = model.blocks
    for block in blocks:
        attended = bound_attention(bound_layer(at, block.norm1), block.attn)
        at = add(at, bound_layer(attended, block.ls1))
        entering = bound_layer(at, block.norm2)
        if isinstance(block.mlp, MoEFeedForward):
            return margin_shares(entering, block.mlp.router, chosen, guard)
        at = add(at, bound_layer(bound_layer(entering, block.mlp), block.ls2))
    raise ValueError("routing_shares: the model has no MoE layer")


def margin_shares(at: Deviation, router: nn.Module, chosen: Tensor, guard: float) -> Tensor:
    """Return the smallest margin / bound of its change, over pairs of chosen and other experts."""
    at, weight, bias = deciding_map(at, router)
    logits = bound_linear(at, weight, bias)
    shares = torch.full_like(at.length[..., 0], torch.inf)
    for expert in range(len(weight)):
        row = slice(expert, expert + 1)
        margin = logits.centre[..., row] - logits.centre - guard
        ball = (weight[row] - weight).norm(dim=1) * at.length
        moved = torch.minimum(logits.radius[..., row] + logits.radius, ball)
        is_pair = chosen[..., row] & ~chosen
        share = torch.where(is_pair, margin / moved, torch.inf).amin(dim=-1)
        shares = torch.minimum(shares, share)
    return shares
