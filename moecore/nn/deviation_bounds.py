"""Sound bounds of how far a change of the pixels moves the tokens of a vision transformer.

The change of each activation is a linear part, its derivative by the pixels times their change,
which is exact, plus a rest of second order. While the pixels stay in a ball, each operation bounds
the rest of each number (interval bound propagation, Gowal et al. 2018) and of each token in ℓ2 (a
product of Lipschitz constants), and keeps the tighter of the two bounds. J balls around each of B
images, P pixels, T tokens, E experts.

Every bound is the input's bound times factors that only grow with the ball, and the rest is of
second order. So in a ball of s < 1 times the radius, the linear part is at most s times as large
and the rest s² times; without derivatives all is rest, s times. Derivatives are in fp32.

In a convolutional stem a number depends on the pixels of a window, and through an image's mean and
variance on all pixels: each normalisation adds two linear maps that all numbers share.
"""

import math
from itertools import product
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, gelu, linear, normalize, pad, unfold

from moecore.nn.backbones.patch_transformer_base import PatchTransformer
from moecore.nn.layers.block import Attention, DenseMlp, LayerScale
from moecore.nn.layers.moe import MoEFeedForward
from moecore.nn.layers.patch_embed import ConvStem, PatchEmbed, cut_patches
from moecore.nn.routers.token_choice import MAX_LOG_FACTOR, MIN_NORM

MAX_PIXELS_WITH_DERIVATIVES = 3072  # of an image, times channels
DERIVATIVES_PER_CHUNK = 2**18  # derivatives at a time, which stay in the cache
ROUNDING = 1e-3  # added to lengths of derivatives; those in fp32 and fp64 differ by about 1e-6
MAX_SECOND, MAX_THIRD = 0.7979, 0.779  # of GELU's derivatives: |(2 − x²) φ|, |(x³ − 4 x) φ|


class Deviation(NamedTuple):
    """A layer's activations, and bounds of their change while pixels stay in each of J balls.

    A change is ``tangent`` · the pixels' change plus a rest, which is at most ``radius`` per number
    and ``length`` (ℓ2) per token. In a stem, ``tangent`` holds derivatives by a window's pixels.
    """

    centre: Tensor  # (B, T, d), or (B, C, H, W) in a stem
    # derivatives by the pixels, (P, B, …); in a stem (K + R, B, C, H, W): by the K pixels of a
    # window around each position, and factors of the R rows ``shared``; (0, B, …): all is rest
    tangent: Tensor
    radius: Tensor  # bound of each number's rest, (J, B, …)
    length: Tensor  # ℓ2 bound of each token's rest, (J, B, T, 1); (J, B, 1, 1, 1) in a stem
    balls: tuple[Tensor, Tensor]  # radii of ℓ∞ balls, and of ℓ2 balls; J in total
    shared: Tensor  # (R, B, *pixels); means over an image depend on all pixels
    border: int = 0  # pixels by which the first window exceeds the image

    @property
    def axes(self) -> tuple[int, ...]:
        if self.centre.ndim == 4:  # a stem's image
            return (-3, -2, -1)
        return (-1,)

    @property
    def has_windowed_derivatives(self) -> bool:
        return self.centre.ndim == 4 and len(self.tangent) > 0

    def norm(self, values: Tensor) -> Tensor:
        """Return the ℓ2 norm of each token (…, T, d), or of each image (…, C, H, W) in a stem."""
        return torch.linalg.vector_norm(values, dim=self.axes, keepdim=True)

    def max_shift(self, tangent: Tensor) -> Tensor:
        """Bound how far numbers with pixel derivatives (P, B, …) move in each ball, (J, B, …)."""
        count = len(tangent) - len(self.shared)
        norms = tangent.new_zeros(2, *tangent.shape[1:])  # dual norms, of ℓ∞ and ℓ2
        for part in tangent[:count].split(1 + DERIVATIVES_PER_CHUNK // norms.numel()):
            norms[0] += part.abs().sum(dim=0)
            norms[1] += part.square().sum(dim=0)
        norms[1].sqrt_()
        for order, steepest in enumerate(norms, start=1):
            rows = torch.linalg.vector_norm(self.shared.flatten(2), order, dim=-1)
            steepest += torch.einsum("rb,rb...->b...", rows, tangent[count:].abs())
        pairs = zip(self.balls, norms.to(self.centre) * (1 + ROUNDING), strict=True)
        return torch.cat([torch.tensordot(sizes, steepest, 0) for sizes, steepest in pairs])

    @property
    def total_change_bounds(self) -> tuple[Tensor, Tensor]:
        """Bound the total change, linear part and rest, of each number, and of each token in ℓ2."""
        linear_part = self.max_shift(self.tangent)
        return linear_part + self.radius, self.norm(linear_part) + self.length

    def after_layer(self, centre: Tensor, tangent: Tensor, radius: Tensor, length: Tensor) -> Self:
        """Return a copy with a layer's results; ``radius`` and ``length`` tighten each other."""
        # Each of the two bounds limits the other.
        at = self._replace(centre=centre, tangent=tangent)
        length = torch.minimum(length, at.norm(radius))
        return at._replace(radius=torch.minimum(radius, length), length=length)

    def expand_window_derivatives(self, tangent: Tensor) -> Tensor:
        """Expand a stem's derivatives, by pixels of a window, to all P pixels, (P, B, …, H, W)."""
        channels, height, width = self.shared.shape[2:]
        count = len(tangent) - len(self.shared)
        side = math.isqrt(count // channels)
        step = height // tangent.shape[-2]
        number = channels * height * width
        numbers = torch.arange(1, number + 1).to(tangent).view(1, channels, height, width)
        places = unfold(numbers, side, padding=self.border, stride=step)[0].long()  # 0: outside
        windows = tangent[:count].flatten(-2)
        dense = windows.new_zeros(number + 1, *windows.shape[1:])
        dense.scatter_(0, places[:, None, None].expand_as(windows), windows)
        rest = torch.einsum("rbp,rb...->pb...", self.shared.flatten(2), tangent[count:])
        return rest + dense[1:].view_as(rest)

    def project_out(self, unit: Tensor) -> "Deviation":
        """Return a copy, derivatives orthogonal to ``unit`` (B, …), by token (image in a stem)."""
        unit = unit.to(self.tangent)
        if not self.has_windowed_derivatives:
            along = (self.tangent * unit).sum(dim=self.axes, keepdim=True)
            return self._replace(tangent=torch.addcmul(self.tangent, unit, along, value=-1))
        along = self.expand_window_derivatives((self.tangent * unit).sum(dim=2, keepdim=True))
        row = along.sum(dim=self.axes).T.reshape(1, *self.shared.shape[1:])
        tangent = torch.cat([self.tangent, -unit.unsqueeze(0)])
        return self._replace(tangent=tangent, shared=torch.cat([self.shared, row]))


def bound_after_linear(at: Deviation, weight: Tensor, bias: Tensor | None) -> Deviation:
    radius = torch.minimum(linear(at.radius, weight.abs()), weight.norm(dim=1) * at.length)
    length = torch.linalg.matrix_norm(weight, ord=2) * at.length
    tangent = linear(at.tangent, weight.to(at.tangent))
    return at.after_layer(linear(at.centre, weight, bias), tangent, radius, length)


def bound_convolution(at: Deviation, layer: nn.Conv2d) -> Deviation:
    """Bound a convolution of images; its spectral norm is at most ‖weight‖₂ · ⌈kernel / stride⌉."""
    # A pixel lies in at most ⌈kernel / stride⌉² windows, and of each the map is a matrix product.
    weight = layer.weight.flatten(1)
    box = conv2d(at.radius.flatten(0, 1), layer.weight.abs(), None, layer.stride, layer.padding)
    overlap = math.ceil(layer.kernel_size[0] / layer.stride[0])
    length = torch.linalg.matrix_norm(weight, ord=2) * overlap * at.length
    rows = weight.norm(dim=1).view(-1, 1, 1) * at.length
    radius = torch.minimum(box.unflatten(0, at.radius.shape[:2]), rows)
    at = convolve_window_derivatives(at, layer)
    return at.after_layer(layer(at.centre), at.tangent, radius, length)


def convolve_window_derivatives(at: Deviation, layer: Any) -> Deviation:
    """Return ``at`` with derivatives convolved: by all pixels that an output's inputs depend on."""
    batch, outputs, height, width = layer(at.centre).shape
    if not at.has_windowed_derivatives:
        return at._replace(tangent=at.tangent.new_zeros(0, batch, outputs, height, width))
    weight = layer.weight.to(at.tangent)
    kernel, stride, border = (pair[0] for pair in (layer.kernel_size, layer.stride, layer.padding))
    channels, rows = at.shared.shape[2:4]
    count = len(at.tangent) - len(at.shared)
    side = math.isqrt(count // channels)
    step = rows // at.centre.shape[2]
    grown = side + step * (kernel - 1)
    windows = pad(at.tangent[:count].movedim(2, -1), [0, 0, *[border] * 4])  # channels last
    places = list(product(range(kernel), repeat=2))
    parts = [windows[..., row::stride, column::stride, :] for row, column in places]
    parts = [part[..., :height, :width, :].reshape(-1, weight.shape[1]) for part in parts]
    result = weight.new_zeros(channels, grown, grown, batch, height, width, outputs)
    for (row, column), part in zip(places, parts, strict=True):
        place = result[:, row * step :, column * step :][:, :side, :side]
        place += (part @ weight[..., row, column].T).view_as(place)
    factors = conv2d(at.tangent[count:].flatten(0, 1), weight, None, stride, border)
    parts = [result.flatten(0, 2).movedim(-1, 2), factors.unflatten(0, (-1, batch))]
    return at._replace(tangent=torch.cat(parts), border=at.border + border * step)


def bound_patch_embedding(at: Deviation, layer: PatchEmbed) -> Deviation:
    """Bound the linear map of patches of an image (B, C, H, W) to tokens."""
    windows = convolve_window_derivatives(at, layer.proj)
    tangent = windows.tangent
    if windows.has_windowed_derivatives:
        tangent = windows.expand_window_derivatives(tangent)
    cut = lambda values: cut_patches(values, [layer.patch] * 2)
    radius, centre = cut(at.radius.flatten(0, 1)).unflatten(0, at.radius.shape[:2]), cut(at.centre)
    length = at.length.squeeze(-1).expand(*radius.shape[:-1], 1)
    at = at._replace(shared=at.shared[:0])
    at = at.after_layer(centre, at.tangent.new_zeros(0, *centre.shape), radius, length)
    at = bound_after_linear(at, layer.proj.weight.flatten(1), layer.proj.bias)
    return at._replace(tangent=tangent.flatten(-2).mT.contiguous())


def bound_norm(at: Deviation, eps: float, floor: float = 0.0, is_centred: bool = True) -> Deviation:
    """Bound d / σ, σ = √(mean d² + eps), d = x − mean x; not centred: x / max(‖x‖, floor)."""
    count = 1
    if is_centred:
        count = math.prod(at.centre.shape[axis] for axis in at.axes)
        centre = at.centre - at.centre.mean(dim=at.axes, keepdim=True)
        radius = at.radius * (1 - 2 / count) + at.radius.mean(dim=at.axes, keepdim=True)
        at = at.project_out(torch.ones_like(centre) / count**0.5)
        at = at.after_layer(centre, at.tangent, radius, at.length)
    sigma = lambda norm: (norm.square() / count + eps).sqrt()
    width = sigma(at.norm(at.centre)).clamp_min(floor)
    scaled = at.centre / width
    moved, length = at.total_change_bounds
    lowest = sigma((at.norm(at.centre) - length).clamp_min(0))
    lowest = lowest.where(lowest > floor, 0)  # a kink: no bound
    # Second derivative along a line D, with h = ‖D‖ / (√n σ): at most (2 |D| h + 2 |d| h²) / σ.
    share = length / count**0.5 / lowest
    curve = moved * ((share + share.square()) / lowest)
    curve = curve.addcmul_(at.centre.abs(), share.square() / lowest)
    radius = torch.addcmul(curve, scaled.abs(), at.length / (count**0.5 * width))
    radius += at.radius / width
    length = at.length / width + at.norm(curve)
    at = at.project_out(scaled / count**0.5)
    return at.after_layer(scaled, at.tangent.div_(width.to(at.tangent)), radius, length)


def bound_scaling(at: Deviation, weight: Tensor, bias: Tensor | float = 0.0) -> Deviation:
    """Bound weight · x + bias, broadcast over numbers."""
    length = at.length * weight.abs().amax()
    tangent = at.tangent.mul_(weight.to(at.tangent))
    return at.after_layer(at.centre * weight + bias, tangent, at.radius * weight.abs(), length)


def bound_gelu(at: Deviation) -> Deviation:
    """Bound GELU by its derivatives at the centre, and by its largest second and third ones."""
    moved, _ = at.total_change_bounds
    density = torch.exp(-at.centre.square() / 2) / math.sqrt(2 * math.pi)
    slope = torch.special.ndtr(at.centre) + at.centre * density
    bend = ((2 - at.centre.square()) * density).abs()
    curve = (bend + MAX_THIRD / 3 * moved).clamp(max=MAX_SECOND) * moved.square() / 2
    steepest = slope.abs()
    length = steepest.amax(dim=at.axes, keepdim=True) * at.length + at.norm(curve)
    tangent = at.tangent.mul_(slope.to(at.tangent))
    return at.after_layer(gelu(at.centre), tangent, steepest * at.radius + curve, length)


def bound_sum(first: Deviation, second: Deviation) -> Deviation:
    pairs = zip(first[:4], second[:4], strict=True)
    centre, tangent, radius, length = (part + other for part, other in pairs)
    return Deviation(centre, tangent, radius, length, first.balls, first.shared)


def bound_attention(at: Deviation, layer: Attention) -> Deviation:
    """Bound self-attention: how far its scores move, and with these the weighted mean of values."""
    heads = layer.heads
    weights = layer.qkv.weight.unflatten(0, (3, heads, -1))  # (3, H, r, d)
    # query, key and value, (3, B, H, T, r)
    query, key, value = layer.qkv(at.centre).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    key = key - key.mean(dim=-2, keepdim=True)
    scaling = weights.shape[2] ** -0.5
    probs = (query @ key.mT * scaling).softmax(dim=-1)
    norm = lambda values: values.norm(dim=-1, keepdim=True)
    # Keys are centred: a vector that all share changes no probability. The score of query i and key
    # j moves with token j along ``by_key`` of i, and with token i along ``by_query`` of j.
    by_query, by_key = key @ weights[0], query @ weights[1]
    steps = torch.einsum("pbjd,bhid->pbhij", at.tangent, (by_key * scaling).to(at.tangent))
    steps = steps - steps.mean(dim=-1, keepdim=True)
    steps += torch.einsum("pbid,bhjd->pbhij", at.tangent, (by_query * scaling).to(at.tangent))
    # Values (B, H, T, d) after the output map, and their mean, whose derivative by a score is
    # p_j (v_j − mean).
    output = layer.proj.weight.unflatten(1, (heads, -1)).movedim(1, 0)  # (H, d, r)
    maps = output @ weights[2]

    def move_values(tokens: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
        box = torch.minimum(tokens @ maps.abs().mT, maps.norm(dim=-1).unsqueeze(1) * length)
        ball = torch.linalg.matrix_norm(maps, ord=2).view(-1, 1, 1) * length
        return box, torch.minimum(ball, norm(box))

    values = value @ output.mT
    distance = torch.cdist(probs @ values, values, compute_mode="donot_use_mm_for_euclid_dist")
    tokens, length = at.radius.unsqueeze(2), at.length.unsqueeze(2)  # for all heads
    shifts = [part.unsqueeze(2) for part in at.total_change_bounds]
    both = torch.linalg.matrix_norm(weights[0].mT @ weights[1], ord=2).view(-1, 1, 1)
    bend = torch.minimum(by_key.abs() @ tokens.mT, norm(by_key) * length.mT)
    bend = bend + torch.minimum(tokens @ by_query.abs().mT, length * norm(by_query).mT)
    bend = (bend + both * shifts[1] * shifts[1].mT) * scaling
    moved = at.max_shift(steps) + bend
    moved = moved + moved.amax(dim=-1, keepdim=True)
    # p_j moves by at most p_j (e^m − 1), and from its linear part by at most p_j e^m m² / 2.
    pull = (probs * (bend + moved.square() * moved.exp() / 2) * distance).sum(dim=-1, keepdim=True)
    drift = probs * torch.expm1(moved)
    radius, length = (
        (probs @ part + drift @ change + pull).sum(dim=2)
        for part, change in zip(move_values(tokens, length), move_values(*shifts), strict=True)
    )
    probs = probs.to(steps)
    steps = probs * (steps - (probs * steps).sum(dim=-1, keepdim=True))
    change = linear(at.tangent, weights[2].flatten(0, 1).to(steps)).unflatten(-1, (heads, -1))
    change = torch.einsum("bhij,pbjhr->pbihr", probs, change)
    change += torch.einsum("pbhij,bhjr->pbihr", steps, value.to(steps))
    tangent = linear(change.flatten(-2), layer.proj.weight.to(steps))
    return at.after_layer(layer(at.centre)[0], tangent, radius, length)


def bound_logits_input(at: Deviation, router: nn.Module) -> tuple[Deviation, Tensor, Tensor | None]:
    """Return the input of a router's last linear map, its weight (E, d), and bias (E,) or None."""
    projection = getattr(router, "projection", None)
    if projection is None:
        return at, router.get_parameter("weight"), getattr(router, "bias", None)
    narrow = bound_norm(bound_after_linear(at, projection, None), 0.0, MIN_NORM, is_centred=False)
    factor = router.get_parameter("log_factor").clamp(max=MAX_LOG_FACTOR).exp()
    return narrow, normalize(router.get_parameter("weight"), dim=-1, eps=MIN_NORM) * factor, None


def bound_layer_by_type(at: Deviation, layer: Any) -> Deviation:
    """Bound a layer without routing; TypeError for a layer that has no bound here."""
    if isinstance(layer, nn.Identity):
        return at
    if isinstance(layer, nn.LayerNorm):
        return bound_scaling(bound_norm(at, layer.eps), layer.weight, layer.bias)
    if isinstance(layer, nn.GroupNorm) and layer.num_groups == 1:
        weight, bias = layer.weight.view(-1, 1, 1), layer.bias.view(-1, 1, 1)
        return bound_scaling(bound_norm(at, layer.eps), weight, bias)
    if isinstance(layer, nn.Conv2d):
        return bound_convolution(at, layer)
    if isinstance(layer, nn.GELU):
        return bound_gelu(at)
    if isinstance(layer, LayerScale):
        return bound_scaling(at, layer.gamma)
    if isinstance(layer, DenseMlp) and layer.activation == "gelu":
        hidden = bound_gelu(bound_after_linear(at, layer.fc1.weight, layer.fc1.bias))
        return bound_after_linear(hidden, layer.fc2.weight, layer.fc2.bias)
    raise TypeError(f"deviation_bounds: no bound of {type(layer).__name__}")


def deviation_of_pixels(pixels: Tensor, linf: Tensor, l2: Tensor) -> Deviation:
    """Return pixels (B, C, H, W) as a Deviation, in ℓ∞ and ℓ2 balls of radii ``linf``, ``l2``."""
    shape, number = pixels.shape, pixels[0].numel()
    shared = pixels.new_zeros(0, *shape, dtype=torch.float32)
    radius = torch.cat([linf, l2]).view(-1, 1, 1, 1, 1).expand(-1, *shape)
    length = torch.cat([linf * number**0.5, l2]).view(-1, 1, 1, 1, 1).expand(-1, shape[0], 1, 1, 1)
    if number > MAX_PIXELS_WITH_DERIVATIVES:
        return Deviation(pixels, shared, radius, length, (linf, l2), shared)
    tangent = torch.eye(shape[1]).to(shared).view(shape[1], 1, shape[1], 1, 1)
    tangent = tangent.repeat(1, shape[0], 1, *shape[2:])
    return Deviation(pixels, tangent, 0 * radius, 0 * length, (linf, l2), shared)


def bound_embedding(model: PatchTransformer, at: Deviation) -> Deviation:
    """Bound the tokens before the first block, of pixels in [0, 1]."""
    at = bound_scaling(at._replace(centre=at.centre - model.pixel_mean), 1 / model.pixel_std[0])
    stem: Any = model.patch_embed
    if isinstance(stem, ConvStem):
        for layer in stem.convolutions:
            at = bound_layer_by_type(at, layer)
        stem = stem.embed
    at = bound_patch_embedding(at, stem)
    special = [token for token in (model.cls_token, model.dist_token) if token is not None]
    fixed = torch.cat([*special, torch.zeros_like(at.centre[:1])], dim=1)
    fixed[:, fixed.shape[1] - model.pos_embed.shape[1] :] += model.pos_embed
    centre, tangent, radius, length = (pad(part, (0, 0, model.special, 0)) for part in at[:4])
    at = Deviation(centre + fixed, tangent, radius, length, at.balls, at.shared)
    return bound_layer_by_type(at, model.norm_pre)


def certify_radius_shares(
    model: PatchTransformer, at: Deviation, chosen: Tensor, guard: float
) -> Tensor:
    """Return shares s (J, B, T): within s · radius, MoE layer 1's choice holds by ``guard``."""
    # model: a frozen fp64 copy; at: pixels in [0, 1] and balls; chosen: (B, T, E) of the first MoE
    # layer; guard: taken off margins. Only s up to 1 is proven, and NaN proves nothing.
    at = bound_embedding(model, at)
    blocks: Any = model.blocks
    for block in blocks:
        attended = bound_attention(bound_layer_by_type(at, block.norm1), block.attn)
        at = bound_sum(at, bound_layer_by_type(attended, block.ls1))
        entering = bound_layer_by_type(at, block.norm2)
        if isinstance(block.mlp, MoEFeedForward):
            return get_safe_radius_share(entering, block.mlp.router, chosen, guard)
        at = bound_sum(at, bound_layer_by_type(bound_layer_by_type(entering, block.mlp), block.ls2))
    raise ValueError("certify_radius_shares: the model has no MoE layer")


def get_safe_radius_share(at: Deviation, router: nn.Module, chosen: Tensor, guard: float) -> Tensor:
    """Return shares s (J, B, T): within s · radius, a router's chosen logits lead by ``guard``."""
    at, weight, bias = bound_logits_input(at, router)
    logits = linear(at.centre, weight, bias)
    shares = torch.full_like(at.length[..., 0], torch.inf)
    for index in chosen.long().topk(int(chosen.sum(dim=-1).amax())).indices.split(1, dim=-1):
        gaps = weight[index] - weight  # (B, T, E, d)
        radius = torch.einsum("jbtd,bted->jbte", at.radius, gaps.abs())
        radius = torch.minimum(radius, gaps.norm(dim=-1) * at.length)
        linear_part = at.max_shift(torch.einsum("pbtd,bted->pbte", at.tangent, gaps.to(at.tangent)))
        if not len(at.tangent):  # all is rest, which grows at least in proportion
            linear_part, radius = radius, linear_part
        margins = (logits.gather(-1, index) - logits - guard).clamp_min(0)
        is_pair = chosen.gather(-1, index) & ~chosen
        # the largest s with s · linear part + s² · rest = margin
        root = (linear_part.square() + 4 * margins * radius).sqrt()
        share = torch.where(is_pair, 2 * margins / (linear_part + root), torch.inf)
        shares = torch.minimum(shares, share.amin(dim=-1))
    return shares
