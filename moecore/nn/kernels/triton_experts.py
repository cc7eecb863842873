"""MLP experts in Triton: a layer's dispatch, products, activation and weighted sum on CUDA.

A product multiplies tiles of rows, each of one expert. The host knows how many tiles suffice, so
nothing waits for the device and a CUDA graph can capture it; unused tiles end at once. Every sum
has a fixed order, without atomics, and is in fp32; fp32 operands are split into three TF32 products
(about as exact as fp32). `benchmarks/README.md` says why no other library's kernels are used.

N tokens, k choices, E experts, R rows sorted by expert, n tiles, d width, h hidden width.
``sources``: token of each row; ``rows``: row of each pair of token and choice, (N·k,); ``order``:
pair of each row; ``offsets``: where experts' rows end; ``tiles``: see ``compute_tile_bounds``.
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

from moecore.core.files import UserError, read_json
from moecore.nn.dispatch import SparsePlan
from moecore.nn.kernels import triton_products as kernels
from moecore.nn.kernels.grouped import compute_tile_bounds, to_autocast

TILINGS_FILE_VARIABLE = "MOECORE_TRITON_TILINGS"
_HEIGHTS = (16, 32, 64, 128)  # rows of a tile
_MIN_TILES_PER_EXPERT = 4  # at least; half a tile per expert is empty, so 1/8 of the work or less


class Tiling(NamedTuple):
    """Columns and inner dimension per step of a product's tile, and the GPU's warps and stages."""

    columns: int
    depth: int
    warps: int  # for 128 rows; 4 for fewer
    stages: int


# By an operand's bytes per entry. The first is used unless the file names another; it needs at most
# 99 KiB of shared memory. None spills registers (`python -m benchmarks.triton_resources`).
TILINGS = {
    2: (Tiling(128, 64, 8, 3), Tiling(128, 32, 8, 4), Tiling(64, 64, 8, 3)),
    4: (Tiling(64, 32, 8, 3), Tiling(64, 32, 8, 2), Tiling(32, 32, 4, 3)),
}


class _Launcher:
    """Launches the products of a layer, in tiles that fit its rows per expert and the GPU."""

    def __init__(self, tokens: Tensor, routes: list[Tensor]) -> None:
        self.sources, _, self.rows, self.offsets, self.tiles = routes
        self.height = choose_height(len(self.sources), len(self.offsets))
        self.bytes = tokens.element_size()
        self.card = ""
        if tokens.is_cuda:
            self.card = torch.cuda.get_device_name(tokens.device)

    def multiply_tiles(self, kernel: Any, width: int, *arguments: Any, **constants: Any) -> None:
        """Launch a product of all tiles, whose output has ``width`` columns."""
        options = self._options("product")
        if self.height < 128:
            options["num_warps"] = 4
        if kernel is kernels.differentiate_hidden or constants.get("ACTIVATION") == "swiglu":
            options["N"] //= 2  # several values per entry; with more, registers are spilled
        options["N"] = limit_block(options["N"], width)
        grid = (len(self.tiles) * triton.cdiv(width, options["N"]),)
        kernel[grid](*arguments, tiles=self.tiles, M=self.height, **options, **constants)

    def weight_gradients(self, *arguments: Any, D: int, O: int, GATHER_LHS: bool) -> None:
        """Launch the gradient of all experts' weights (D, O), and of biases where there are any."""
        options = self._options("weights")
        options |= {"M": limit_block(options["N"], D), "N": limit_block(options["N"], O)}
        blocks = triton.cdiv(D, options["M"]) * triton.cdiv(O, options["N"])
        options |= {"D": D, "O": O, "GATHER_LHS": GATHER_LHS, "offsets": self.offsets}
        kernels.differentiate_weights[(len(self.offsets) * blocks,)](*arguments, **options)

    def sum_choices(self, values: Tensor, gates: Tensor | None, output: Tensor, k: int) -> None:
        """Launch the sum of each token's k rows, weighted by gates (N, k) unless None."""
        number, width = output.shape
        sizes = {"D": width, "CHOICES": k, "N": limit_block(128, width)}
        grid = (triton.cdiv(number, 16), triton.cdiv(width, sizes["N"]))
        kernels.sum_choices[grid](values, gates, self.rows, output, number, **sizes)

    def _options(self, kind: str) -> dict[str, Any]:
        columns, depth, warps, stages = read_tiling(self.card, kind, self.bytes)
        return {"N": columns, "K": depth, "num_warps": warps, "num_stages": stages}


def choose_height(rows: int, experts: int) -> int:
    """Return the rows per tile, the most for which experts have 4 full tiles on average."""
    fitting = [size for size in _HEIGHTS if size * _MIN_TILES_PER_EXPERT * experts <= rows]
    return max(fitting, default=_HEIGHTS[0])


def limit_block(columns: int, width: int) -> int:
    """Return the power of two, at least 16 and at most ``columns``, that covers ``width``."""
    return min(columns, max(16, triton.next_power_of_2(width)))


@cache
def read_tiling(card: str, kind: str, size: int) -> Tiling:
    """Read a tiling, {GPU: {"kind size": [128, 64, 8, 3]}} in JSON; ``size``: bytes per number."""
    path = Path(os.environ.get(TILINGS_FILE_VARIABLE) or ".state/triton.json")
    choices = read_json(path).get(card, {}) if path.exists() else {}
    values = choices.get(f"{kind} {size}", TILINGS[size][0])
    if tuple(values) not in TILINGS[size]:
        allowed = "; ".join(str(list(tiling)) for tiling in TILINGS[size])
        raise UserError.at(f"{path}: {card}: {kind} {size}", found=values, allowed=allowed)
    return Tiling(*values)


def compute_forward(
    tokens: Tensor, gates: Tensor, routes: list[Tensor], parameters: list[Tensor], save: bool
) -> list[Tensor]:
    """Return experts' outputs (N, d), preactivations if ``save``, and outputs by row, (R, d)."""
    output, inner, values = allocate_forward(tokens, gates, routes, parameters, save)
    sources = routes[0]
    up, down, up_bias, down_bias = (*parameters, None, None)[:4]
    launcher = _Launcher(tokens, routes)
    width, hidden_width = tokens.shape[1], down.shape[1]
    hidden = tokens.new_empty(len(sources), hidden_width)
    active = "gelu" if up.shape[2] == hidden_width else "swiglu"
    with torch.cuda.device_of(tokens):
        pointers = (tokens, sources, up, up_bias, inner if save else None, hidden, up.shape[2], 1)
        options = {"D": width, "O": hidden_width, "ACTIVATION": active}
        launcher.multiply_tiles(kernels.multiply_and_activate, hidden_width, *pointers, **options)
        pointers = (hidden, None, down, down_bias, None, values, width, 1)
        options = {"D": hidden_width, "O": width, "ACTIVATION": "none"}
        launcher.multiply_tiles(kernels.multiply_and_activate, width, *pointers, **options)
        launcher.sum_choices(values, gates, output, gates.shape[1])
    return [output, inner, values]


def compute_backward(
    grad: Tensor, leaves: list[Tensor], low: list[Tensor], routes: list[Tensor], saved: list[Tensor]
) -> list[Tensor]:
    """Return gradients of ``leaves``: tokens, gates and, unless frozen, experts' parameters."""
    # low: up and down in the tokens' dtype. saved: what the forward pass returned after outputs.
    gradients = allocate_backward(grad, leaves)
    tokens, gates, *_ = leaves
    to_tokens, to_gates, *to_parameters = gradients
    up, down = low
    sources, order, rows, *_ = routes
    inner, values = saved
    launcher = _Launcher(tokens, routes)
    number, width = tokens.shape
    hidden_width, inner_width = down.shape[1], up.shape[2]
    to_inner = torch.empty_like(inner)
    weighted = inner.new_empty(len(inner), hidden_width)
    row_gates = gates.new_empty(len(inner), dtype=torch.float32)
    row_values = torch.empty_like(values)
    with torch.cuda.device_of(tokens):
        options = {"D": width, "H": hidden_width, "WIDTH": inner_width}
        pointers = (grad, sources, order, rows, gates, down, inner, to_inner, weighted, row_gates)
        kernel = kernels.differentiate_hidden
        launcher.multiply_tiles(kernel, hidden_width, *pointers, **options)
        pointers = (to_inner, None, up, None, None, row_values, 1, inner_width)
        options = {"D": inner_width, "O": width, "ACTIVATION": "none"}
        launcher.multiply_tiles(kernels.multiply_and_activate, width, *pointers, **options)
        launcher.sum_choices(row_values, None, to_tokens, gates.shape[1])
        sizes = {"D": width, "CHOICES": gates.shape[1], "N": limit_block(128, width)}
        grid = (triton.cdiv(number, 16),)
        kernels.differentiate_gates[grid](values, grad, rows, to_gates, number, **sizes)
        if to_parameters:
            to_up, to_down, to_up_bias, to_down_bias = (*to_parameters, None, None)[:4]
            pointers = (tokens, to_inner, sources, row_gates, to_up, to_up_bias)
            launcher.weight_gradients(*pointers, D=width, O=inner_width, GATHER_LHS=True)
            pointers = (weighted, grad, sources, row_gates, to_down, to_down_bias)
            launcher.weight_gradients(*pointers, D=hidden_width, O=width, GATHER_LHS=False)
    return gradients


# torch.compile does not trace into operators. Eager calls do not use them: calling an operator that
# is written in Python takes the host longer.
forward_operator = custom_op("moecore::triton_experts", compute_forward, mutates_args=())
backward_operator = custom_op("moecore::triton_experts_grad", compute_backward, mutates_args=())


@forward_operator.register_fake
def allocate_forward(
    tokens: Tensor, gates: Tensor, routes: list[Tensor], parameters: list[Tensor], save: bool
) -> list[Tensor]:
    """Return memory for outputs (N, d), values before GELU (R, h), and values by row (R, d)."""
    rows = len(routes[0])
    inner = tokens.new_empty(rows if save else 0, parameters[0].shape[2])
    return [torch.empty_like(tokens), inner, tokens.new_empty(rows, tokens.shape[1])]


@backward_operator.register_fake
def allocate_backward(grad: Tensor, leaves: list[Tensor], *_: Any) -> list[Tensor]:
    return [torch.empty_like(leaf) for leaf in leaves]


class TritonExperts(Function):
    """MLP experts: outputs (N, d) by weights in the tokens' dtype, gradients of uncast weights."""

    @staticmethod
    def forward(tokens: Tensor, gates: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
        *routes, low_up, low_down, save = arguments[:8]
        low = [low_up, low_down, *(bias for bias in arguments[10:] if bias is not None)]
        compute = forward_operator if torch.compiler.is_compiling() else compute_forward
        return tuple(compute(tokens, gates, routes, low, save))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.save_for_backward(*inputs[:9], *inputs[10:], *output[1:])
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        is_compiling = torch.compiler.is_compiling()
        if torch.is_grad_enabled() and not is_compiling:
            allowed = "MOECORE_KERNELS=torch"
            raise UserError.at("second derivatives", found="experts in Triton", allowed=allowed)
        if grads[0] is None:
            return (None,) * 14
        tensors = list(ctx.saved_tensors)
        leaves = tensors[:2]
        if any(ctx.needs_input_grad[10:]):
            leaves += [leaf for leaf in tensors[9:13] if leaf is not None]
        compute = backward_operator if is_compiling else compute_backward
        routes, low, saved = tensors[2:7], tensors[7:9], tensors[13:]
        gradients = [*compute(grads[0].contiguous(), leaves, low, routes, saved), *(None,) * 4]
        return *gradients[:2], *(None,) * 8, *gradients[2:6]


def compute_experts(experts: Any, tokens: Tensor, plan: SparsePlan) -> Tensor:
    """Return weighted outputs (B, T, d) of MLP experts for tokens (B, T, d)."""
    flat = to_autocast(tokens).flatten(0, 1).contiguous()
    gates = plan.weights.flatten(0, 1).contiguous()
    low = [weight.detach().to(flat.dtype).contiguous() for weight in (experts.up, experts.down)]
    height = choose_height(len(plan.tokens), len(plan.offsets))
    tiles = compute_tile_bounds(plan.offsets, len(plan.tokens), height)[: len(plan.tokens)].int()
    routes = (plan.tokens, plan.order, plan.rows, plan.offsets, tiles)
    parameters = (experts.up, experts.down, experts.up_bias, experts.down_bias)
    save = torch.is_grad_enabled()
    outputs = TritonExperts.apply(flat, gates, *routes, *low, save, *parameters)
    return outputs[0].view(tokens.shape)
