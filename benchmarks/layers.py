"""Our contestants: the MoE layer as it is, gated, and with soft slots; the dense MLP; and how one
step of a layer is run.

N tokens as B images of T tokens, E experts, k chosen per token, d width, h hidden width of an
expert.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, silu

from moecore.nn.dispatch import Rows
from moecore.nn.experts.mlp import Mlp as MlpExperts
from moecore.nn.kernels.grouped import ChosenKernels, grouped_linear
from moecore.nn.layers.block import DenseMlp
from moecore.nn.layers.moe import MoEFeedForward
from moecore.nn.routers.noisy_top_k import NoisyTopK
from moecore.nn.routers.soft_slots import SoftSlots
from moecore.training.runtime import KERNELS_ENV, choose_and_set_kernels


class Size(NamedTuple):
    """The sizes of a raced layer and its tokens."""

    images: int
    tokens: int  # per image
    width: int
    hidden: int  # of one expert
    experts: int
    k: int

    @property
    def gated(self) -> int:
        """Hidden width of a gated expert with about equal FLOPs: a multiple of 8 near 2h/3.

        A gated expert has three matrices instead of two.
        """
        return max(8, 8 * round(self.hidden * 2 / 3 / 8))

    @property
    def slots(self) -> int:
        """Slots per expert and image for which soft routing computes about as many rows."""
        return max(1, round(self.tokens * self.k / self.experts))

    def flops(self) -> int:
        """Return FLOPs of forward and backward, without gates: 12·N·k·d·h + 6·N·d·E."""
        return (
            self.images * self.tokens * self.width * (12 * self.k * self.hidden + 6 * self.experts)
        )

    def shown(self) -> str:
        tokens = self.images * self.tokens
        return f"E {self.experts}, k {self.k}, d {self.width}, h {self.hidden}, N {tokens}"


class GatedExperts(nn.Module):
    """``experts(rows)``: W_down (activation(W_gate x) · W_up x), W_gate and W_up as one (E, d, 2h)
    matrix; biases and a factor where ``biased``.
    """

    def __init__(
        self,
        size: Size,
        activation: Callable[[Tensor], Tensor] = silu,
        hidden: int | None = None,
        biased: bool = False,
    ) -> None:
        super().__init__()
        hidden = hidden or size.gated
        self.activation = activation
        self.up = nn.Parameter(torch.randn(size.experts, size.width, 2 * hidden) * size.width**-0.5)
        self.down = nn.Parameter(torch.randn(size.experts, hidden, size.width) * hidden**-0.5)
        self.up_bias = None
        self.down_bias = None
        if biased:
            self.up_bias = nn.Parameter(torch.zeros(size.experts, 2 * hidden))
            self.down_bias = nn.Parameter(torch.zeros(size.experts, size.width))

    def forward(self, rows: Rows) -> Tensor:
        gate, up = grouped_linear(rows.values, self.up, self.up_bias, rows.offsets).chunk(2, dim=-1)
        return grouped_linear(self.activation(gate) * up, self.down, self.down_bias, rows.offsets)


def ours(size: Size) -> MoEFeedForward:
    """The layer of the method vmoe: noisy top-k router, MLP experts with biases."""
    experts = MlpExperts(number=size.experts, hidden_ratio=size.hidden / size.width).build(
        size.width
    )
    return MoEFeedForward(NoisyTopK(k=size.k).build(size.width, size.experts), experts)


def ours_swiglu(size: Size) -> nn.Module:
    """The same router with SwiGLU experts, without biases: the experts of transformers' models.

    Chosen gates sum to 1, as there.
    """
    return MoEFeedForward(_renormalised(size), GatedExperts(size, silu))


def ours_geglu(size: Size) -> nn.Module:
    """The same router with GEGLU experts and biases, as wide as those of st-moe-pytorch."""
    return MoEFeedForward(
        _renormalised(size), GatedExperts(size, gelu, int(size.hidden * 2 / 3), biased=True)
    )


def ours_soft(size: Size) -> nn.Module:
    """Soft slots with MLP experts."""
    experts = MlpExperts(number=size.experts, hidden_ratio=size.hidden / size.width).build(
        size.width
    )
    return MoEFeedForward(SoftSlots(slots=size.slots).build(size.width, size.experts), experts)


def dense(size: Size) -> nn.Module:
    """Build the dense MLP of equal active FLOPs: hidden width k·h."""
    return DenseMlp(size.width, size.k * size.hidden)


@contextmanager
def kernels_context(name: str, device: str) -> Iterator[None]:
    """Compute experts as with MOECORE_KERNELS=name within the block."""
    with patch.dict(os.environ, {KERNELS_ENV: name}):
        choose_and_set_kernels(device)
    try:
        yield
    finally:
        choose_and_set_kernels(device)


def with_kernels(name: str, run: Callable[[], object], device: str) -> Callable[[], None]:
    """Return ``run`` with the kernels ``name``, chosen once as in a training."""
    with kernels_context(name, device):
        compute = ChosenKernels.compute

    def call() -> None:
        with patch.object(ChosenKernels, "compute", compute):
            run()

    return call


def wait(device: str) -> None:
    """Wait until a GPU has finished all its work; do nothing on a CPU."""
    if device == "cuda":
        torch.cuda.synchronize()


def _renormalised(size: Size) -> nn.Module:
    return NoisyTopK(k=size.k, renormalise=True).build(size.width, size.experts)


def prediction(output: Tensor | tuple) -> Tensor:
    """Return the tokens of a layer's output, which may be a tuple that begins with them."""
    if isinstance(output, Tensor):
        return output
    return output[0]


def tokens_of(size: Size, seed: int = 0) -> Tensor:
    """Draw tokens (B, T, d), which are equal in all races of this size."""
    return torch.randn(
        size.images, size.tokens, size.width, generator=torch.Generator().manual_seed(seed)
    )


def step(
    layer: nn.Module,
    size: Size,
    dtype: torch.dtype,
    parameters: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Callable[[], None]:
    """Return a call that computes the gradients of tokens and parameters, and waits for them.

    dtype: of the products; autocast is used if it differs from ``parameters``, the dtype of layer
    and tokens.
    """
    layer = layer.to(device, parameters)
    tokens = tokens_of(size).to(device, parameters).requires_grad_()
    towards = tokens_of(size, seed=1).to(device, parameters)
    leaves = [tokens, *layer.parameters()]

    def run() -> None:
        with torch.autocast(device, dtype=torch.bfloat16, enabled=dtype != parameters):
            outputs = prediction(layer(tokens))
        torch.autograd.grad(outputs, leaves, towards.to(outputs.dtype), allow_unused=True)
        wait(device)

    return run
