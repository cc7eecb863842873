"""What the kernels in Triton need on each compute capability, compiled here without a GPU.

    python -m benchmarks.triton_resources [--capability 80 90 100] [--tilings] [--case vit_s ...]

Compiles every kernel of a layer's forward and backward pass with the arguments that the layer
launches it with, and prints registers per thread, bytes of stack per thread (spilled registers are
there), shared memory per program, and on 10.0 columns of tensor memory. A limit that is exceeded
ends it with status 1. --tilings: all of TILINGS, not the first alone. It needs triton, whose wheel
brings ptxas and cuobjdump; not torch with CUDA. $TRITON_INTERPRET must not be 1.
"""

import argparse
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import triton  # pyrefly: ignore[missing-import]
from torch import Tensor
from triton.backends.compiler import GPUTarget  # pyrefly: ignore[missing-import]
from triton.compiler import ASTSource  # pyrefly: ignore[missing-import]
from triton.runtime.jit import JITFunction  # pyrefly: ignore[missing-import]

from benchmarks.layers import Size
from moecore.nn.kernels import triton_experts, triton_products
from moecore.nn.kernels.grouped import max_tile_count
from moecore.nn.kernels.triton_experts import TILINGS, Tiling

KIB = 1024
# CUDA C++ Programming Guide, technical specifications per compute capability: shared memory that a
# program may have, in bytes (99 KiB on 8.6, 8.9 and 12.0), and registers.
SHARED_LIMITS = {80: 163 * KIB, 90: 227 * KIB, 100: 227 * KIB}
DEFAULT_SHARED_LIMIT = 99 * KIB  # of the first tiling: it runs on every card from 8.0 on
REGISTERS = 65536
TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int32: "i32",
    torch.int64: "i64",
}


class Case(NamedTuple):
    """A layer whose kernels are compiled."""

    size: Size
    dtype: torch.dtype
    gated: bool = False


VIT_S = Size(images=336, tokens=197, width=384, hidden=1536, experts=8, k=2)
CASES = {
    "vit_s": Case(VIT_S, torch.bfloat16),
    "vit_s_fp32": Case(VIT_S, torch.float32),
    "vit_s_swiglu": Case(VIT_S._replace(hidden=1024), torch.bfloat16, gated=True),
    "vit_s_swiglu_fp32": Case(VIT_S._replace(hidden=1024), torch.float32, gated=True),
    "many": Case(VIT_S._replace(experts=1024), torch.bfloat16),
    "odd": Case(VIT_S._replace(width=100, hidden=36, experts=1024), torch.bfloat16),
    "odd_fp32": Case(VIT_S._replace(width=100, hidden=36, experts=1024), torch.float32),
}


class Launch(NamedTuple):
    """A kernel as it is launched: what Triton would specialise it for."""

    kernel: JITFunction
    signature: dict[str, str]
    constants: dict[str, Any]
    divisible: tuple[str, ...]  # arguments that are multiples of 16
    warps: int
    stages: int

    @property
    def name(self) -> str:
        constants = self.constants
        word = ""
        if "ACTIVATION" in constants:
            plain = "backward" if constants.get("row_stride") == 1 else "down"
            word = plain if constants["ACTIVATION"] == "none" else constants["ACTIVATION"]
        if "GATHER_LHS" in constants:
            word = "up" if constants["GATHER_LHS"] else "down"
        if self.kernel.__name__ == "sum_choices" and "gates" not in constants:
            word = "weighted"
        return f"{self.kernel.__name__} {word}".strip()


class Usage(NamedTuple):
    """What a compiled kernel needs."""

    registers: int  # per thread
    stack: int  # bytes per thread
    shared: int  # bytes per program
    tensor_memory: int  # columns, of 512

    def excess(self, capability: int, warps: int, shared_limit: int) -> str:
        """Say which limit is exceeded; empty if none is."""
        if self.stack:
            return f"spills: {self.stack} bytes of stack"
        if self.shared > min(shared_limit, SHARED_LIMITS[capability]):
            return f"shared memory: {self.shared / KIB:.0f} KiB"
        if self.registers * 32 * warps > REGISTERS:
            return f"registers: {self.registers} × {32 * warps} threads"
        return ""


class Recorder:
    """Stands for a kernel and records its launches."""

    def __init__(self, kernel: JITFunction, launches: list[Launch]) -> None:
        self.kernel = kernel
        self.launches = launches

    def __getitem__(self, grid: tuple[int, ...]) -> "Recorder":
        return self

    def __call__(self, *arguments: Any, **options: Any) -> None:
        warps, stages = options.pop("num_warps", 4), options.pop("num_stages", 3)
        values = dict(zip(self.kernel.arg_names, arguments, strict=False)) | options
        signature: dict[str, str] = {}
        constants: dict[str, Any] = {}
        divisible = []
        for parameter in self.kernel.params:
            name = parameter.name
            value = values[name]
            if isinstance(value, Tensor):
                signature[name] = f"*{TYPES[value.dtype]}"
                divisible.append(name)
            elif parameter.is_constexpr or value is None or value == 1:
                signature[name] = "constexpr"
                constants[name] = value
            else:
                signature[name] = "i32"
                if value % 16 == 0:
                    divisible.append(name)
        launch = (self.kernel, signature, constants, tuple(divisible), warps, stages)
        self.launches.append(Launch(*launch))


def record_launches(case: Case, tiling: Tiling) -> list[Launch]:
    """Run a layer's passes on the meta device with recorders instead of kernels."""
    size, dtype, gated = case
    rows = size.images * size.tokens * size.k
    launches: list[Launch] = []
    recorders = {
        name: Recorder(kernel, launches)
        for name, kernel in vars(triton_products).items()
        if isinstance(kernel, JITFunction) and not name.startswith("_")
    }
    make = lambda dtype, *shape: torch.empty(shape, dtype=dtype, device="meta")
    tokens = make(dtype, rows // size.k, size.width)
    gates = make(torch.float32, rows // size.k, size.k)
    routes = [make(torch.int64, rows) for _ in range(3)]
    height = triton_experts.choose_height(rows, size.experts)
    tiles = max_tile_count(rows, size.experts, height)
    routes += [make(torch.int32, size.experts), make(torch.int32, tiles, 3)]
    up = make(dtype, size.experts, size.width, (1 + gated) * size.hidden)
    down = make(dtype, size.experts, size.hidden, size.width)
    biases = []
    if not gated:
        biases = [weight.new_empty(size.experts, weight.shape[2]).float() for weight in (up, down)]
    masters = [up.float(), down.float(), *biases]
    with (
        patch.object(triton_experts, "kernels", SimpleNamespace(**recorders)),
        patch.object(triton_experts, "read_tiling", lambda *_: tiling),
    ):
        forward = triton_experts.compute_forward(tokens, gates, routes, [up, down, *biases], True)
        leaves = [tokens, gates, *masters]
        triton_experts.compute_backward(forward[0], leaves, [up, down], routes, forward[1:])
    return launches


def compile_launch(launch: Launch, capability: int) -> Usage:
    """Compile a launch for a compute capability, and read what it needs from its binary."""
    places = [launch.kernel.arg_names.index(name) for name in launch.divisible]
    source = ASTSource(
        fn=launch.kernel,
        signature=launch.signature,
        constexprs=launch.constants,
        attrs={(place,): [["tt.divisibility", 16]] for place in places},
    )
    options = {"num_warps": launch.warps, "num_stages": launch.stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(compiled.asm["cubin"])
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    words = text.partition(f"Function {launch.kernel.__name__}:")[2].split()
    counts = dict(word.split(":")[:2] for word in words if ":" in word)
    # metadata counts dynamic shared memory; the compiler reserves some more on 9.0 and later
    shared = compiled.metadata.shared + int(counts["SHARED"])
    columns = getattr(compiled.metadata, "tmem_size", 0) or 0
    return Usage(int(counts["REG"]), int(counts["STACK"]), shared, columns)


def measure_usage(
    cases: list[str], capabilities: list[int], all_tilings: bool
) -> Iterator[tuple[str, Tiling, int, Launch, Usage, str]]:
    """Compile what each case launches, one of equal launches, and compare with the limits."""
    for name in cases:
        case = CASES[name]
        tilings = TILINGS[case.dtype.itemsize]
        for place, tiling in enumerate(tilings if all_tilings else tilings[:1]):
            launches = {launch.name: launch for launch in record_launches(case, tiling)}
            for launch, capability in product(launches.values(), capabilities):
                usage = compile_launch(launch, capability)
                limit = SHARED_LIMITS[capability] if place else DEFAULT_SHARED_LIMIT
                excess = usage.excess(capability, launch.warps, limit)
                yield name, tiling, capability, launch, usage, excess


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--capability", type=int, nargs="+", choices=SHARED_LIMITS)
    parser.add_argument("--case", nargs="+", choices=CASES)
    parser.add_argument("--tilings", action="store_true", help="all of TILINGS")
    options = parser.parse_args()
    print("| case | tiling | kernel | capability | registers | stack | shared, KiB | tensor | |")
    print("| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | --- |")
    is_exceeded = False
    cases = options.case or list(CASES)
    capabilities = options.capability or list(SHARED_LIMITS)
    for row in measure_usage(cases, capabilities, options.tilings):
        name, tiling, capability, launch, usage, excess = row
        words = [name, "·".join(map(str, tiling)), launch.name, capability / 10, *usage[:2]]
        words += [f"{usage.shared / KIB:.1f}", usage.tensor_memory, excess]
        print("|", " | ".join(map(str, words)), "|", flush=True)
        is_exceeded |= bool(excess)
    sys.exit(is_exceeded)


if __name__ == "__main__":
    main()
