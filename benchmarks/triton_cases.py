"""Run by test_triton_experts.py in Triton's interpreter: errors of experts in Triton, as JSON.

The reference computes one pair of token and choice after the other, in fp64.
"""

import json
import sys
from typing import Any, NamedTuple

import torch
import triton.language as tl  # pyrefly: ignore[missing-import]
from torch.nn.functional import gelu
from triton.runtime.interpreter import InterpreterBuilder  # pyrefly: ignore[missing-import]

from benchmarks.layers import kernels_context
from moecore.core.files import UserError
from moecore.nn import dispatch
from moecore.nn.backbones.base_model import ImageSpec
from moecore.nn.backbones.vit import Vit
from moecore.nn.dispatch import SparsePlan
from moecore.nn.experts.mlp import Mlp, gate_with_silu
from moecore.nn.kernels import triton_experts
from moecore.nn.kernels.grouped import ChosenKernels
from moecore.nn.layers.moe import MoEFeedForward, MoESettings
from moecore.nn.routers.noisy_top_k import NoisyTopK
from moecore.tasks.classification import Classification

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Case(NamedTuple):
    """Tokens per expert as first choice; the second is the next expert."""

    sizes: tuple[int, ...]
    width: int
    hidden: int
    dtype: torch.dtype = FP32
    k: int = 1
    activation: str = "gelu"
    capacity: bool = False  # some pairs are dropped
    padded: bool = False  # rows as on a CPU: their counts are rounded up
    frozen: bool = False  # parameters without gradients


CASES = {
    "few rows": Case((3, 0, 5, 1), 8, 4),
    "one row": Case((0, 1), 64, 64),
    "empty first and last": Case((0, 0, 7, 0), 6, 3, BF16),
    "no powers of two": Case((40, 36, 0), 100, 36, BF16, k=2),
    "no powers of two, swiglu": Case((11, 0, 25), 100, 36, k=2, activation="swiglu"),
    "swiglu": Case((30, 20), 96, 64, BF16, activation="swiglu"),
    "fp16": Case((9, 8), 72, 40, FP16, k=2),
    "tiles of 128 rows": Case((1100, 20), 16, 24, BF16),
    "tiles of 64 rows": Case((290, 0, 490), 24, 16),
    "capacity": Case((12, 20, 9), 64, 80, k=2, capacity=True),
    "padding": Case((21, 0, 9, 3), 64, 36, BF16, k=2, capacity=True, padded=True),
    "wide": Case((9, 0, 8), 1536, 72),
    "single rows": Case((1,) * 80, 20, 12),
    "4,096 experts": Case((0,) * 2000 + (1,) * 20 + (0,) * 2075 + (9,), 16, 16, frozen=True),
}


def multiply_wide(builder, first, second, *others, product=InterpreterBuilder.create_dot):
    """Triton 3.7's interpreter multiplies the bits of bf16 as if they were whole numbers."""
    sides = [
        builder.cast_impl(side, tl.float32) if side.dtype.scalar == tl.bfloat16 else side
        for side in (first, second)
    ]
    return product(builder, *sides, *others)


def apply_slowly(experts, tokens, gates, chosen):
    activation = gelu if experts.activation == "gelu" else gate_with_silu
    outputs = []
    for token, weights, numbers in zip(tokens[0], gates[0], chosen[0].tolist(), strict=True):
        total = torch.zeros_like(token)
        for weight, number in zip(weights, numbers, strict=True):
            inner, outer = token @ experts.up[number], 0
            if experts.up_bias is not None:
                inner, outer = inner + experts.up_bias[number], experts.down_bias[number]
            total = total + weight * (activation(inner) @ experts.down[number] + outer)
        outputs.append(total)
    return torch.stack(outputs)[None]


def measure_case(case):
    """Relative errors of output and gradients, and whether a second run has the same bits."""
    torch.manual_seed(0)
    number = len(case.sizes)
    shape = {"number": number, "hidden_ratio": case.hidden / case.width}
    experts = Mlp(**shape, activation=case.activation).build(case.width).requires_grad_(True)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    first = torch.arange(number).repeat_interleave(torch.tensor(case.sizes))
    first = first[torch.randperm(len(first))]
    chosen = torch.stack([(first + place) % number for place in range(case.k)], dim=1)[None]
    tokens = torch.randn(1, len(first), case.width, requires_grad=True)
    gates = torch.rand(chosen.shape, requires_grad=True)
    processed = torch.rand(chosen.shape) > 0.3 if case.capacity else None
    towards = torch.randn(tokens.shape)
    experts.requires_grad_(not case.frozen)
    leaves = [tokens, gates, *(() if case.frozen else experts.parameters())]
    dispatch.round_row_counts = ROUND if case.padded else lambda sizes: sizes
    runs = []
    for _ in range(2):
        plan = SparsePlan.build(chosen, gates, processed, number)
        with torch.autocast("cpu", case.dtype, enabled=case.dtype != FP32):
            output = triton_experts.compute_experts(experts, tokens, plan)
        gradients = torch.autograd.grad(output, leaves, towards.to(output.dtype))
        runs.append([output.detach(), *gradients])
    exact_experts = experts.double()
    exact = [tokens.detach().double(), gates.detach().double()]
    exact = [leaf.requires_grad_() for leaf in exact]
    weights = exact[1] if processed is None else exact[1] * processed
    expected = apply_slowly(exact_experts, exact[0], weights, chosen)
    exact += [] if case.frozen else exact_experts.parameters()
    expected = [expected, *torch.autograd.grad(expected, exact, towards.double())]
    errors = [
        float((ours.double() - theirs).norm() / theirs.norm().clamp(min=1e-30))
        for ours, theirs in zip(runs[0], expected, strict=True)
    ]
    used = {int(expert) for expert in chosen.flatten()}
    idle = [expert for expert in range(number) if expert not in used]
    return {
        "dtype": str(case.dtype).removeprefix("torch."),
        "errors": errors,
        "idle": max((float(run[idle].abs().sum()) for run in runs[0][3:]), default=0.0),
        "same": all(torch.equal(*pair) for pair in zip(*runs[:2], strict=True)),
    }


def differentiate(call, tokens, module):
    output = call(tokens)[0]
    leaves = [tokens, *module.parameters()]
    return [output, *torch.autograd.grad(output.square().sum(), leaves)]


def relative_differences(ours, theirs):
    pairs = zip(ours, theirs, strict=True)
    return [float(((a - b).norm() / b.norm().clamp(min=1e-30)).detach()) for a, b in pairs]


def check_layer():
    """Whether a layer uses them, alone, compiled, and without a gradient; and what it refuses."""
    torch.manual_seed(0)
    experts = Mlp(number=4, hidden_ratio=2).build(40)
    layer = MoEFeedForward(NoisyTopK(k=2).build(40, 4), experts).eval()
    tokens = torch.randn(2, 7, 40, requires_grad=True)
    with kernels_context("triton", "cpu"):
        eager = differentiate(layer, tokens, layer)
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        compiled = differentiate(compiled, tokens, layer)
        with torch.no_grad():
            without = layer(tokens)[0]
        try:
            torch.autograd.grad(layer(tokens)[0].sum(), tokens, create_graph=True)
            refusal = ""
        except UserError as error:
            refusal = str(error)
    return {
        "compiled": all(torch.equal(*pair) for pair in zip(eager, compiled, strict=True)),
        "without": torch.equal(without, eager[0]),
        "errors": relative_differences(eager, differentiate(layer, tokens, layer)),
        "refusal": refusal,
    }


def check_model(activation):
    """Differences of a small ViT's output and gradients from torch's, and calls of the kernels."""
    torch.manual_seed(0)
    experts = Mlp(number=4, activation=activation)
    moe = MoESettings(router=NoisyTopK(k=2), experts=experts, blocks="all")
    task = Classification(classes=("a", "b"))
    image = ImageSpec(channels=1, size=8, task=task, mean=(0.5,), std=(0.3,))
    model = Vit(patch=4, width=20, depth=2, heads=2).build(image, moe).eval()
    images = torch.rand(3, 1, 8, 8, requires_grad=True)
    call = lambda pixels: (model(pixels).prediction,)
    calls = []
    with kernels_context("triton", "cpu"):
        compute: Any = ChosenKernels.compute
        ChosenKernels.compute = lambda *inputs: calls.append(inputs) or compute(*inputs)
        ours = differentiate(call, images, model)
    return {
        "calls": len(calls),
        "errors": relative_differences(ours, differentiate(call, images, model)),
    }


if __name__ == "__main__":
    ROUND = dispatch.round_row_counts
    InterpreterBuilder.create_dot = multiply_wide
    results = {name: measure_case(case) for name, case in CASES.items()}
    models = {activation: check_model(activation) for activation in ("gelu", "swiglu")}
    json.dump(results | {"layer": check_layer(), "models": models}, sys.stdout)
