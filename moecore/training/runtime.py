"""Speed of a training step: threads, precision, compiled blocks, and a trace of a few steps.

Settings for the CPU took a ViT-Tiny step from 838 to 241 ms. Compilation and tracing do not change
what a model learns, so the environment sets them, and no stage reruns because of them.
"""

import ctypes
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from moecore.core import ranks, torch_internals
from moecore.core.files import UserError, available_cores, read_json, write_json, write_json_sha256
from moecore.data.thread_map import requested_threads
from moecore.nn.kernels.grouped import ChosenKernels
from moecore.nn.layers.block import Block

# oneDNN caches a compiled product per shape, about 0.6 MB each. The rows of 32 experts have some
# hundred shapes: with a cache of 128 a step of a small Swin took 1.9 times as long.
ONEDNN_CACHE_CAPACITY = "1024"
Precision = Literal["auto", "float32", "bfloat16"]

COMPILE_ENV = "MOECORE_COMPILE"
GRAPH_ENV = "MOECORE_GRAPH"
KERNELS_ENV = "MOECORE_KERNELS"
TRACE_ENV = "MOECORE_TRACE"  # names the folder of the trace
MIN_COMPILED_STEPS = 1000  # estimate of the steps that save the minute that compiling takes
UNTRACED = 4  # first steps, which load, compile and reserve memory
TRACED = 4  # steps
MIN_TRITON_CAPABILITY = (8, 0)  # of the first cards with TF32 and bf16
CUDA_CONTEXT_GB = 0.7  # an allowance for CUDA's context and libraries, not measured
Compile = Literal["off", "tried", "required"]  # also of graphs
Kernels = Literal["torch", "triton"]


class Runtime(NamedTuple):
    """The settings chosen for this process; every field is logged with the run."""

    device: str
    device_name: str
    threads: int
    allocator: str
    matmul_precision: str
    matmul_error: float  # largest relative error of an fp32 product under that precision
    bf16_speedup: float  # time of an fp32 product / time of the same in bf16
    compile: Compile = "off"  # whether transformer blocks are compiled
    graph: Compile = "off"  # whether training steps are replayed as a CUDA graph
    kernels: Kernels = "torch"  # library that computes MLP experts

    def dtype(self, precision: Precision = "auto") -> torch.dtype:
        """Return the autocast dtype; auto: bf16 if it was at least 1.3 times faster than fp32."""
        if precision == "bfloat16" and self.device.startswith("cuda") and not self.bf16_speedup:
            found = f"bfloat16, which {self.device_name} does not compute"
            raise UserError.at("precision", found=found, allowed="auto, float32")
        if precision == "bfloat16" or (precision == "auto" and self.bf16_speedup >= 1.3):
            return torch.bfloat16
        return torch.float32


def tune_runtime(device: str | None = None, work: Path | None = None) -> Runtime:
    """Set allocator, threads and matmul precision of this process, and probe bf16; return them."""
    # work: the folder of a resumable stage. oneDNN reads its variable at the first product.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", ONEDNN_CACHE_CAPACITY)
    device = device or _requested_device()
    cores = available_cores()
    sharing = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # ranks on this machine
    threads = requested_threads() or max(1, cores // sharing)
    if work is not None:
        threads = read_or_store_threads(work, threads)
        if threads > cores:
            print(
                f"{work}: continues with the {threads} threads that it began with; cores: {cores}; "
                "slower, with the same bits",
                file=sys.stderr,
            )
    torch.set_num_threads(threads)
    allocator = _keep_freed_memory() if device == "cpu" else "cuda caching"
    precision, error = _set_fastest_matmul_precision(device)
    name = device_name(device)
    speedup = _read_or_probe_bf16_speedup(device, name)
    policies = compile_policy(device), graph_policy(device), choose_and_set_kernels(device)
    return Runtime(device, name, threads, allocator, precision, error, speedup, *policies)


def _requested_device() -> str:
    has_cuda = torch.cuda.is_available()
    device = os.environ.get("MOECORE_DEVICE")
    if not device:
        return "cuda" if has_cuda else "cpu"
    if re.fullmatch(r"cpu|cuda(:\d+)?" if has_cuda else "cpu", device) is None:
        allowed = "cpu, cuda, cuda:0, …" if has_cuda else "cpu; torch sees no GPU here"
        raise UserError(f"MOECORE_DEVICE: found {device!r}; allowed: {allowed}")
    return device


def read_or_store_threads(work: Path, threads: int) -> int:
    """Return the number of threads in ``work``/threads.json; without it, store ``threads``."""
    # Another number splits sums differently, and a resumed stage would not be bit-equal.
    path = work / "threads.json"
    if path.exists():
        return read_json(path, sealed=True)["threads"]
    if ranks.rank_and_size().is_first:
        write_json_sha256(path, {"threads": threads})
    return threads


def device_name(device: str) -> str:
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8") if info.exists() else ""
    model = re.search(r"^model name\s*:\s*(.+?)\s*$", text, re.MULTILINE)
    return platform.machine() if model is None else model[1]


def _keep_freed_memory() -> str:
    """Make glibc keep freed memory, which saves page faults; return the allocator's name."""
    if platform.libc_ver()[0] != "glibc":
        return "system"
    # Numbers of the parameters in glibc's malloc.h.
    m_trim_threshold = -1
    m_mmap_max = -4
    libc = ctypes.CDLL(None)
    if libc.mallopt(m_mmap_max, 0) and libc.mallopt(m_trim_threshold, -1):
        return "glibc, memory kept"
    return "glibc"


def _set_fastest_matmul_precision(device: str) -> tuple[str, float]:
    """Set the fastest fp32 precision that does not round to bf16; return its name and error."""
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randn(256, 256, generator=generator) for _ in range(2))
    exact = first.double() @ second.double()
    precisions = ("medium", "high", "highest") if device == "cpu" else ("high", "highest")
    for precision in precisions:
        torch.set_float32_matmul_precision(precision)
        product = (first.to(device) @ second.to(device)).cpu().double()
        error = (product - exact).abs().max() / exact.abs().max()
        if error < 1e-5:
            break
    return precision, float(error)


def _read_or_probe_bf16_speedup(device: str, name: str) -> float:
    """Return the bf16 speedup, probed once per machine: a resumed run must get the same dtype."""
    path = Path(".state/runtime.json")
    machine = f"{platform.node()}, {name}, torch {torch.__version__}"
    speedups = read_json(path) if path.exists() else {}
    if not isinstance(speedups, dict) or not isinstance(speedups.get(machine, 0.0), (int, float)):
        speedups = {}  # damaged: probe again
    if machine not in speedups:
        speedups[machine] = round(_probe_bf16_speedup(device), 2)
        write_json(path, speedups)
    return speedups[machine]


def _probe_bf16_speedup(device: str) -> float:
    if device.startswith("cuda"):
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return 4.0
        return 0.0
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # with several, the probe would measure the wait for a busy core
    first, second = torch.ones(2, 512, 512)
    low, low_right = torch.ones(2, 512, 512).bfloat16()
    speedup = _shortest_time(lambda: first @ second) / _shortest_time(lambda: low @ low_right)
    torch.set_num_threads(threads)
    return speedup


def _shortest_time(call: Callable[[], object]) -> float:
    """Return the shortest time (s) of 40 calls, or of those in 0.2 s (emulated bf16 is slow)."""
    call()
    times: list[float] = []
    while len(times) < 40 and sum(times) < 0.2:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def compile_policy(device: str) -> Compile:
    """Return how blocks are compiled, by $MOECORE_COMPILE: auto (the default), true or false."""
    # auto is ``tried`` on CUDA, in trainings of at least ``MIN_COMPILED_STEPS`` steps, else
    # ``off``: on one core it would take longer than it saves, and bits would differ.
    return _read_policy_variable(COMPILE_ENV, "auto", device)


def graph_policy(device: str) -> Compile:
    """Return how steps are captured, by $MOECORE_GRAPH: auto, true or false (the default)."""
    # The default is not auto until a GPU has shown that graphs are faster and stay correct.
    policy = _read_policy_variable(GRAPH_ENV, "false", device)
    if policy == "required" and not device.startswith("cuda"):
        raise UserError.at(GRAPH_ENV, found=f"'true' on {device}", allowed="auto, false, or a GPU")
    return policy


def choose_and_set_kernels(device: str) -> Kernels:
    """Choose and set the kernels of MLP experts, by $MOECORE_KERNELS: auto, triton or torch."""
    # auto is torch until a GPU has shown that Triton's kernels are faster and equal.
    policy = os.environ.get(KERNELS_ENV) or "auto"
    if policy not in ("auto", "triton", "torch"):
        raise UserError.at(KERNELS_ENV, found=repr(policy), allowed="auto, triton, torch")
    ChosenKernels.compute = None
    if policy != "triton":
        return "torch"
    ChosenKernels.device = torch.device(device).type
    allowed = "auto, torch, or Triton and a GPU of compute capability 8.0 or later"
    if device.startswith("cuda"):
        if torch.cuda.get_device_capability(device) < MIN_TRITON_CAPABILITY:
            text = f"'triton' on {device_name(device)}"
            raise UserError.at(KERNELS_ENV, found=text, allowed=allowed)
    elif os.environ.get("TRITON_INTERPRET") != "1":  # Triton's interpreter, for tests
        raise UserError.at(KERNELS_ENV, found=f"'triton' on {device}", allowed=allowed)
    try:
        from moecore.nn.kernels.triton_experts import compute_experts
    except ImportError as error:
        raise UserError.at(KERNELS_ENV, found=f"'triton', but {error}", allowed=allowed) from error
    ChosenKernels.compute = compute_experts
    return "triton"


def _read_policy_variable(variable: str, default: str, device: str) -> Compile:
    """Return the policy in an environment variable: auto is ``tried`` on CUDA, else ``off``."""
    policy = os.environ.get(variable) or default
    if policy not in ("auto", "true", "false"):
        raise UserError(f"{variable}: found {policy!r}; allowed: auto, true, false")
    if policy == "true":
        return "required"
    if policy == "auto" and device.startswith("cuda"):
        return "tried"
    return "off"


# The first step runs eagerly, because parts draw their fixed random values in it (hash.py).
# Compiled steps draw the same numbers. Blocks with experts on several ranks are not compiled: how
# much they send depends on the tokens. If a block cannot be compiled, ``required`` ends the
# training; ``tried`` prints a line and goes on eagerly.
class CompiledBlocks:
    """Compiles the blocks of a model one by one, for use while a step is computed."""

    def __init__(
        self,
        models: Iterable[nn.Module | None],
        compile: Compile,
        steps: int,
        backend: Callable | str | None = None,
    ) -> None:
        """Prepare compilation of the blocks of ``models``; backend: None for inductor."""
        self.strict = compile == "required"
        self.begun = False
        self.blocks: list[Block] = []
        self.ready: list[Callable] = []
        if compile == "off" or (compile == "tried" and steps < MIN_COMPILED_STEPS):
            return
        # Without fallback_random inductor draws other numbers than torch.
        inductor: dict[str, Any] = {"options": {"fallback_random": True}}
        options = inductor if backend is None else {"backend": backend}
        self.blocks = [
            module
            for model in models
            if model is not None
            for module in model.modules()
            if isinstance(module, Block) and getattr(module.mlp, "sharded_experts", None) is None
        ]
        # All blocks share one code object, compiled once per kind of block; a Swin has over 8.
        torch_internals.allow_recompilations(2 * len(self.blocks))
        for block in self.blocks:
            compiled = torch.compile(block.forward, fullgraph=True, dynamic=False, **options)
            self.ready.append(self._with_fallback(compiled, block.forward))

    @contextmanager
    def using_compiled_blocks(self) -> Iterator[None]:
        """Use compiled blocks in the ``with`` block; the first time, the blocks run eagerly."""
        blocks = self.blocks if self.begun else []
        self.begun = True
        for block, forward in zip(blocks, self.ready, strict=False):
            block.forward = forward
        try:
            yield
        finally:
            for block in blocks:
                del block.forward

    def _with_fallback(self, compiled: Callable, plain: Callable) -> Callable:
        refused = torch_internals.compile_error_class()

        def forward(*inputs: Any) -> Any:
            if not self.blocks:
                return plain(*inputs)
            try:
                return compiled(*inputs)
            except refused as error:
                reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
                message = f"{COMPILE_ENV}: a block cannot be compiled: {reason}"
                if self.strict:
                    raise UserError(f"{message}; allowed: false, or auto: without") from error
            print(f"{message}; training goes on without", file=sys.stderr)
            self.blocks = []
            return plain(*inputs)

        return forward


def trace_file(title: str) -> Path | None:
    """Return a training's trace file below $MOECORE_TRACE; None if unset, or not on rank 0."""
    folder = os.environ.get(TRACE_ENV)
    if not folder or not ranks.rank_and_size().is_first:
        return None
    return Path(folder) / f"{title.replace(' ', '_')}.json.gz"


def iterate_traced_steps(steps: range, path: Path | None, device: str) -> Iterator[int]:
    """Yield the steps; with a ``path``, write a Chrome trace of a few (https://ui.perfetto.dev)."""
    if path is None or not steps:
        yield from steps
        return
    begin = max(steps.start, min(steps.start + UNTRACED, steps.stop - TRACED))
    end = min(begin + TRACED, steps.stop)
    activities = [ProfilerActivity.CPU]
    if device.startswith("cuda"):
        activities.append(ProfilerActivity.CUDA)
    yield from range(steps.start, begin)
    with profile(activities=activities, record_shapes=True) as profiler:
        for step in range(begin, end):
            with record_function(f"step {step}"):
                yield step
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(path))
    print(f"{path}: a trace of steps {begin} to {end - 1}", file=sys.stderr)
    yield from range(end, steps.stop)
