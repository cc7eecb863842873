"""Multi-head self-attention with timm's parameter names (``qkv``, ``proj``)."""

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from moecore.nn.layers.mlp import linear


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Softmax attention; all arguments and the result are (B, heads, T, head width).

    On CUDA this is PyTorch's fused kernel; on CPU the three plain operations are 5 to 7 times
    faster at ViT lengths.
    """
    if query.is_cuda:
        return scaled_dot_product_attention(query, key, value)
    return attention_weights(query, key).to(value.dtype) @ value


def attention_weights(query: Tensor, key: Tensor) -> Tensor:
    """(B, heads, T, T): how much each token (row) attends to each other one; rows sum to 1."""
    return torch.softmax((query * query.shape[-1] ** -0.5) @ key.transpose(-2, -1), dim=-1)


class Attention(nn.Module):
    """Self-attention over (B, T, width) tokens.

    Raises ValueError where heads do not divide the width.

    Returns the attended tokens and, where asked for, the weights (B, T, T) averaged over heads
    (else None).
    """

    def __init__(self, width: int, heads: int, qkv_bias: bool = True) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"model.heads = {heads} does not divide model.width = {width}")
        self.heads = heads
        self.qkv = linear(width, 3 * width, bias=qkv_bias)
        self.proj = linear(width, width)

    def forward(self, tokens: Tensor, weights: bool = False) -> tuple[Tensor, Tensor | None]:
        batch, length, width = tokens.shape
        qkv = self.qkv(tokens).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        if not weights:
            return self._merged(attend(query, key, value)), None
        each = attention_weights(query, key)
        return self._merged(each.to(value.dtype) @ value), each.mean(dim=1)

    def _merged(self, heads: Tensor) -> Tensor:
        return self.proj(heads.transpose(1, 2).flatten(2))
