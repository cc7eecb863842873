"""A pre-norm transformer block and its layers, with timm's parameter names."""

from collections.abc import Callable
from typing import Annotated, Literal

import torch
from pydantic import AfterValidator, Field, ValidationInfo
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from moecore.core.routing_records import NO_CONTEXT, RoutingContext
from moecore.core.streams import draw_bernoulli_mask


def trunc_normal_linear(inputs: int, outputs: int, bias: bool = True) -> nn.Linear:
    """Return a Linear with truncated normal weights (std 0.02) and zero bias, as in timm's ViT."""
    layer = nn.Linear(inputs, outputs, bias=bias)
    nn.init.trunc_normal_(layer.weight, std=0.02)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


def check_hidden_ratio(ratio: float, settings: ValidationInfo) -> float:
    width = settings.data.get("width")
    if width is not None and width * ratio < 1:
        raise ValueError(f"allowed: {1 / width:.3g} or more, one hidden unit at a width of {width}")
    return ratio


# HiddenRatio is for a setting declared after ``width``, which its check reads.
BlockOutput = tuple[Tensor, Tensor, tuple]  # tokens, input of the feed-forward, records
HiddenRatio = Annotated[float, Field(gt=0, le=1000), AfterValidator(check_hidden_ratio)]


class FeedForward(nn.Module):
    """``feed_forward(tokens, context)`` maps (B, T, d) to (tokens (B, T, d), records)."""

    wants: frozenset[str] = frozenset()  # fields of the RoutingContext that it reads


Activation = Literal["gelu", "quick_gelu", "linear"]


def quick_gelu(values: Tensor) -> Tensor:
    """Return x·σ(1.702 x), the activation of OpenAI's CLIP."""
    return values * torch.sigmoid(1.702 * values)


# without activation two maps are one linear map, as theory assumes
ACTIVATIONS = {"gelu": gelu, "quick_gelu": quick_gelu, "linear": lambda values: values}


class DenseMlp(FeedForward):
    """Linear, an activation (gelu: by erf), Linear over (B, T, width); no records."""

    def __init__(self, width: int, hidden: int, activation: Activation = "gelu") -> None:
        super().__init__()
        self.activation = activation
        self.activate = ACTIVATIONS[activation]
        self.fc1 = trunc_normal_linear(width, hidden)
        self.fc2 = trunc_normal_linear(hidden, width)

    def forward(self, tokens: Tensor, context: RoutingContext = NO_CONTEXT) -> tuple[Tensor, tuple]:
        return self.fc2(self.activate(self.fc1(tokens))), ()


def softmax_attention(query: Tensor, key: Tensor, value: Tensor, causal: bool = False) -> Tensor:
    """Return softmax attention; all tensors are (B, heads, T, head width)."""
    # on CPU plain operations are 5 to 7 times as fast as the fused kernel, at ViT lengths
    if query.is_cuda:
        return scaled_dot_product_attention(query, key, value, is_causal=causal)
    return attention_weights(query, key, causal).to(value.dtype) @ value


def attention_weights(query: Tensor, key: Tensor, causal: bool = False) -> Tensor:
    """Return the attention of each token (row) to all tokens, (B, heads, T, T); rows sum to 1."""
    scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-2, -1)
    if causal:
        length = scores.shape[-1]
        later = torch.ones(length, length, dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    return torch.softmax(scores, dim=-1)


class Attention(nn.Module):
    """Self-attention of (B, T, width); ``weights``: also return (B, T, T), averaged over heads."""

    def __init__(
        self,
        width: int,
        heads: int,
        qkv_bias: bool = True,
        causal: bool = False,
        linear: Callable[..., nn.Linear] = trunc_normal_linear,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.qkv = linear(width, 3 * width, bias=qkv_bias)
        self.proj = linear(width, width)

    def forward(self, tokens: Tensor, weights: bool = False) -> tuple[Tensor, Tensor | None]:
        batch, length, width = tokens.shape
        qkv = self.qkv(tokens).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mean = None
        if weights:
            weights_by_head = attention_weights(query, key, self.causal)
            heads = weights_by_head.to(value.dtype) @ value
            mean = weights_by_head.mean(dim=1)
        else:
            heads = softmax_attention(query, key, value, self.causal)
        return self.proj(heads.transpose(1, 2).flatten(2)), mean


class LayerScale(nn.Module):
    """Multiply (B, T, width) tokens by a learned vector (CaiT; ``gamma`` as in timm)."""

    def __init__(self, width: int, initial: float) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((width,), initial))

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens * self.gamma


class Dropout(nn.Module):
    """Dropout of values (B, …); a rank uses its part of one mask for all ranks' batch."""

    batch_views = 1  # views of each image in a batch that ranks share

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, values: Tensor) -> Tensor:
        if not self.training or not self.rate:
            return values
        empty = torch.empty_like(values, requires_grad=False)
        mask = draw_bernoulli_mask(empty, 1 - self.rate, self.batch_views)
        return values * (mask / (1 - self.rate))


class DropPath(Dropout):
    """Stochastic depth (Huang et al. 2016): drop a sample's branch with probability ``rate``."""

    def forward(self, values: Tensor) -> Tensor:
        if not self.training:
            return values
        share = 1 - self.rate
        # fp32 under autocast too: bfloat16 would round 1 / share, and bias every branch
        empty = torch.empty(len(values), 1, 1, device=values.device)
        # one draw per sample from the tokens' device, as in timm's layer of this name
        return values * (draw_bernoulli_mask(empty, share, self.batch_views) / share)


def drop_path_rates(last: float, depth: int) -> list[float]:
    return [last * index / max(1, depth - 1) for index in range(depth)]


class Block(nn.Module):
    """x + attention(norm1(x)), then x + feed_forward(norm2(x))."""

    def __init__(
        self,
        width: int,
        attention: nn.Module,  # called like ``Attention``
        mlp: FeedForward,  # dense or a mixture of experts
        layer_scale: float | None = None,
        drop_path: float = 0.0,
        eps: float = 1e-6,
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=eps)
        self.attn = attention
        self.ls1 = nn.Identity() if layer_scale is None else LayerScale(width, layer_scale)
        # Identity draws nothing: trainings without stochastic depth keep their random stream
        self.drop_path1 = DropPath(drop_path) if drop_path else nn.Identity()
        self.norm2 = nn.LayerNorm(width, eps=eps)
        self.mlp = mlp
        self.ls2 = nn.Identity() if layer_scale is None else LayerScale(width, layer_scale)
        self.drop_path2 = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, tokens: Tensor, context: RoutingContext = NO_CONTEXT) -> BlockOutput:
        """Return new tokens (B, T, width), the feed-forward's input, and its routing records."""
        attended, weights = self.attn(self.norm1(tokens), weights="attention" in self.mlp.wants)
        tokens = tokens + self.drop_path1(self.ls1(attended))
        entering = self.norm2(tokens)
        context = context.with_attention(self.mlp.wants, weights, attended)
        change, records = self.mlp(entering, context)
        return tokens + self.drop_path2(self.ls2(change)), entering, records
