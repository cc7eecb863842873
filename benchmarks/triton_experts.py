"""MLP experts in Triton: a layer's dispatch, products, activation and weighted sum on CUDA.

A product multiplies tiles of rows, each of one expert. The host knows how many tiles suffice, so
nothing waits for the device and a CUDA graph can capture it; unused tiles end at once. Every sum
has a fixed order, without atomics, and is in fp32; fp32 operands are split into three TF32 products
(about as exact as fp32). `benchmarks/README.md` says why no other library's kernels are used.

N tokens, k choices, E experts, R rows sorted by expert, n tiles, d width, h hidden width.
``sources``: token of each row; ``rows``: row of each pair of token and choice, (N·k,); ``order``:
pair of each row; ``offsets``: where experts' rows end.
"""

import os
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton  # pyrefly: ignore[missing-import]
from torch import Tensor
from torch.autograd import Function
from torch.library import custom_op

from benchmarks import triton_kernels as kernels
from moecore.core.files import UserError, read_json
from moecore.core.torch_internals import active_transforms
from moecore.nn.dispatch import SparsePlan
from moecore.nn.kernels.grouped import tile_count, to_autocast

TILINGS_FILE = "MOECORE_TRITON_TILINGS"
INTERPRETED = triton.knobs.runtime.interpret  # $TRITON_INTERPRET: on a CPU, for tests
_HEIGHTS = (16, 32, 64, 128)  # rows of a tile
_TILES_PER_EXPERT = 4  # at least; half a tile per expert is empty, so 1/8 of the work or less


class Tiling(NamedTuple):
    """Columns of a tile and depth of a step of a product, and how a program computes it."""

    columns: int
    depth: int
    warps: int  # for 128 rows; 4 for fewer
    stages: int


# Per bytes of an operand's entry. The first is used where the file names no other; it needs at most
# 99 KiB of shared memory. None spills registers (`python -m benchmarks.triton_resources`).
TILINGS = {
    2: (Tiling(128, 64, 8, 3), Tiling(128, 32, 8, 4), Tiling(64, 64, 8, 3)),
    4: (Tiling(64, 32, 8, 3), Tiling(64, 32, 8, 2), Tiling(32, 32, 4, 3)),
}


class _Launcher:
    """Launches the products of a layer, in tiles that fit its rows per expert and the card."""

    def __init__(self, tokens: Tensor, rows: int, experts: int) -> None:
        fitting = [size for size in _HEIGHTS if size * _TILES_PER_EXPERT * experts <= rows]
        self.height = max(fitting, default=_HEIGHTS[0])
        self.tiles = min(rows, tile_count(rows, experts, self.height))
        self.device = tokens.device
        self.bytes = tokens.element_size()
        self.precision = "tf32x3" if tokens.dtype == torch.float32 else "ieee"

    def multiply_tiles(self, kernel: Any, width: int, *arguments: Any, **constants: Any) -> None:
        """Launch a product of all tiles, whose output has ``width`` columns."""
        options = self._options("product")
        if self.height < 128:
            options["num_warps"] = 4
        if kernel is kernels.differentiate_hidden or constants.get("ACTIVATION") == "swiglu":
            options["N"] //= 2  # several values per entry; with more, registers are spilled
        options["N"] = limit_block(options["N"], width)
        grid = (self.tiles * triton.cdiv(width, options["N"]),)
        kernel[grid](*arguments, M=self.height, **options, **constants)

    def multiply_experts(self, *arguments: Any, D: int, O: int, GATHER_LEFT: bool) -> None:
        """Launch the gradient of all experts' weights (D, O), and of biases where there are any."""
        options = self._options("weights")
        options |= {"M": limit_block(options["N"], D), "N": limit_block(options["N"], O)}
        grid = (len(arguments[-1]) * triton.cdiv(D, options["M"]) * triton.cdiv(O, options["N"]),)
        options |= {"D": D, "O": O, "GATHER_LEFT": GATHER_LEFT}
        kernels.differentiate_weights[grid](*arguments, **options)

    def sum_choices(
        self, values: Tensor, gates: Tensor | None, rows: Tensor, output: Tensor, k: int
    ) -> None:
        """Launch the sum of each token's k rows, weighted by gates (N, k) unless None."""
        number, width = output.shape
        sizes = {"D": width, "CHOICES": k, "M": 16, "N": limit_block(128, width)}
        grid = (triton.cdiv(number, 16), triton.cdiv(width, sizes["N"]))
        kernels.sum_choices[grid](values, gates, rows, output, number, **sizes)

    def _options(self, kind: str) -> dict[str, Any]:
        card = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else ""
        columns, depth, warps, stages = read_tiling(card, kind, self.bytes)
        options = {"N": columns, "K": depth, "num_warps": warps, "num_stages": stages}
        return options | {"PRECISION": self.precision}


def limit_block(columns: int, width: int) -> int:
    """Return the power of two, at least 16 and at most ``columns``, that covers ``width``."""
    return min(columns, max(16, triton.next_power_of_2(width)))


@cache
def read_tiling(card: str, kind: str, size: int) -> Tiling:
    """Return the tiling of a card by its file: {card: {"product 2": [128, 64, 8, 3], …}}."""
    path = Path(os.environ.get(TILINGS_FILE) or ".state/triton.json")
    choices = read_json(path).get(card, {}) if path.exists() else {}
    values = choices.get(f"{kind} {size}", TILINGS[size][0])
    if tuple(values) not in TILINGS[size]:
        allowed = "; ".join(str(list(tiling)) for tiling in TILINGS[size])
        raise UserError.at(f"{path}: {card}: {kind} {size}", found=values, allowed=allowed)
    return Tiling(*values)


def compute_forward(
    tokens: Tensor, gates: Tensor, routes: list[Tensor], parameters: list[Tensor], save: bool
) -> list[Tensor]:
    """Launch the forward pass; parameters: up, down in the tokens' dtype and, if any, biases."""
    output, inner, values, tiles = allocate_forward(tokens, gates, routes, parameters, save)
    sources, _, rows, offsets = routes
    up, down, up_bias, down_bias = (*parameters, None, None)[:4]
    launcher = _Launcher(tokens, len(sources), len(offsets))
    width, hidden_width = tokens.shape[1], down.shape[1]
    hidden = tokens.new_empty(len(sources), hidden_width)
    active = "gelu" if up.shape[2] == hidden_width else "swiglu"
    with torch.cuda.device_of(tokens):
        numbers = (len(offsets), len(tiles))
        grid = (triton.cdiv(len(tiles), 64),)
        kernels.list_tiles[grid](offsets, tiles, *numbers, M=launcher.height, B=64)
        saved = inner if save else None
        pointers = (tokens, sources, up, up_bias, saved, hidden, tiles, up.shape[2], 1)
        options = {"D": width, "O": hidden_width, "ACTIVATION": active}
        launcher.multiply_tiles(kernels.multiply_rows, hidden_width, *pointers, **options)
        pointers = (hidden, None, down, down_bias, None, values, tiles, width, 1)
        options = {"D": hidden_width, "O": width, "ACTIVATION": "none"}
        launcher.multiply_tiles(kernels.multiply_rows, width, *pointers, **options)
        launcher.sum_choices(values, gates, rows, output, gates.shape[1])
    return [output, inner, values, tiles]


def compute_backward(
    grad: Tensor, leaves: list[Tensor], low: list[Tensor], routes: list[Tensor], saved: list[Tensor]
) -> list[Tensor]:
    """Launch the backward pass; leaves: tokens, gates and, unless frozen, all parameters."""
    # low: up and down in the tokens' dtype. saved: what the forward pass returned after outputs.
    gradients = allocate_backward(grad, leaves)
    tokens, gates, *_ = leaves
    to_tokens, to_gates, *to_parameters = gradients
    up, down = low
    sources, order, rows, offsets = routes
    inner, values, tiles = saved
    launcher = _Launcher(tokens, len(sources), len(offsets))
    number, width = tokens.shape
    hidden_width, inner_width = down.shape[1], up.shape[2]
    to_inner = torch.empty_like(inner)
    weighted = inner.new_empty(len(inner), hidden_width)
    row_gates = gates.new_empty(len(inner), dtype=torch.float32)
    row_values = torch.empty_like(values)
    with torch.cuda.device_of(tokens):
        options = {"D": width, "H": hidden_width, "GATED": inner_width != hidden_width}
        pointers = (grad, sources, order, rows, gates, down, inner, to_inner, weighted, row_gates)
        kernel = kernels.differentiate_hidden
        launcher.multiply_tiles(kernel, hidden_width, *pointers, tiles, **options)
        pointers = (to_inner, None, up, None, None, row_values, tiles, 1, inner_width)
        options = {"D": inner_width, "O": width, "ACTIVATION": "none"}
        launcher.multiply_tiles(kernels.multiply_rows, width, *pointers, **options)
        launcher.sum_choices(row_values, None, rows, to_tokens, gates.shape[1])
        sizes = {"D": width, "CHOICES": gates.shape[1], "M": 16, "N": limit_block(128, width)}
        grid = (triton.cdiv(number, 16),)
        kernels.differentiate_gates[grid](values, grad, rows, to_gates, number, **sizes)
        if to_parameters:
            to_up, to_down, to_up_bias, to_down_bias = (*to_parameters, None, None)[:4]
            pointers = (tokens, to_inner, sources, row_gates, to_up, to_up_bias, offsets)
            launcher.multiply_experts(*pointers, D=width, O=inner_width, GATHER_LEFT=True)
            pointers = (weighted, grad, sources, row_gates, to_down, to_down_bias, offsets)
            launcher.multiply_experts(*pointers, D=hidden_width, O=width, GATHER_LEFT=False)
    return gradients


# torch.compile does not look into operators. Eager calls go around them: the host needs more time
# for an operator that is written in Python.
forward_operator = custom_op("moecore::triton_experts", compute_forward, mutates_args=())
backward_operator = custom_op("moecore::triton_experts_grad", compute_backward, mutates_args=())


@forward_operator.register_fake
def allocate_forward(
    tokens: Tensor, gates: Tensor, routes: list[Tensor], parameters: list[Tensor], save: bool
) -> list[Tensor]:
    """Return outputs (N, d), values before GELU (R, h), values by row (R, d) and tiles (n, 3)."""
    sources, *_, offsets = routes
    rows = len(sources)
    inner = tokens.new_empty(rows if save else 0, parameters[0].shape[2])
    tiles = offsets.new_empty(_Launcher(tokens, rows, len(offsets)).tiles, 3)
    return [torch.empty_like(tokens), inner, tokens.new_empty(rows, tokens.shape[1]), tiles]


@backward_operator.register_fake
def allocate_backward(grad: Tensor, leaves: list[Tensor], *_: Any) -> list[Tensor]:
    """Return memory for the gradients of ``leaves``."""
    return [torch.empty_like(leaf) for leaf in leaves]


class TritonExperts(Function):
    """Compute outputs (N, d) from tokens, gates, a plan's routes, and low and full parameters."""

    @staticmethod
    def forward(tokens: Tensor, gates: Tensor, *others: Any) -> tuple[Tensor, ...]:
        *routes, low_up, low_down, save = others[:7]
        low = [low_up, low_down, *(bias for bias in others[9:] if bias is not None)]
        compute = forward_operator if torch.compiler.is_compiling() else compute_forward
        return tuple(compute(tokens, gates, routes, low, save))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.save_for_backward(*inputs[:8], *inputs[9:], *output[1:])
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        is_compiling = torch.compiler.is_compiling()
        if torch.is_grad_enabled() and not is_compiling:
            allowed = "the layer's own experts"
            raise UserError.at("second derivatives", found="experts in Triton", allowed=allowed)
        if grads[0] is None:
            return (None,) * 13
        tensors = list(ctx.saved_tensors)
        parameters = [leaf for leaf in tensors[8:12] if leaf is not None]
        leaves = tensors[:2] + (parameters if any(ctx.needs_input_grad[9:]) else [])
        compute = backward_operator if is_compiling else compute_backward
        routes, low, saved = tensors[2:6], tensors[6:8], tensors[12:]
        gradients = [*compute(grads[0].contiguous(), leaves, low, routes, saved), *(None,) * 4]
        return *gradients[:2], *(None,) * 7, *gradients[2:6]


def compute_experts(experts: Any, tokens: Tensor, plan: Any) -> Tensor | None:
    """Return weighted outputs (B, T, d) of MLP experts for tokens (B, T, d); None: use torch's."""
    is_here = tokens.device.type == ("cpu" if INTERPRETED else "cuda")
    if not is_here or not isinstance(plan, SparsePlan) or not len(plan.tokens):
        return None
    if tokens.dtype == torch.float64 or active_transforms():
        return None
    flat = to_autocast(tokens).flatten(0, 1).contiguous()
    gates = plan.weights.flatten(0, 1).contiguous()
    low = [weight.detach().to(flat.dtype).contiguous() for weight in (experts.up, experts.down)]
    routes = (plan.tokens, plan.order, plan.rows, plan.offsets)
    parameters = (experts.up, experts.down, experts.up_bias, experts.down_bias)
    save = torch.is_grad_enabled()
    outputs = TritonExperts.apply(flat, gates, *routes, *low, save, *parameters)
    return outputs[0].view(tokens.shape)
