"""Settings that make CPU training faster: a ViT-Tiny step went from 838 to 241 ms by them."""

import ctypes
import os
import platform
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from moecore.core.files import UserError, read_json, write_json, write_sealed
from moecore.core.operating_system import available_cores
from moecore.core.ranks import current_ranks
from moecore.data.thread_map import requested_threads
from moecore.training.runtime import Compile, compile_policy

# oneDNN keeps a compiled product of every shape that it met, about 0.6 MB each. Rounded as they are
# (``nn.dispatch.round_row_counts``), the rows of 32 experts come in some hundred shapes, and with
# 128 kept a step of a small Swin took 1.9 times as long: each was compiled anew.
KEPT_PRODUCTS = "1024"

Precision = Literal["auto", "float32", "bfloat16"]


class Runtime(NamedTuple):
    """What was chosen for this process; every field is logged with the run."""

    device: str
    device_name: str
    threads: int
    allocator: str
    matmul_precision: str
    matmul_error: float  # largest relative error of an fp32 product under that precision
    bf16_speedup: float  # time of an fp32 product / time of the same in bf16
    compile: Compile = "off"  # of the transformer's blocks

    def dtype(self, precision: Precision = "auto") -> torch.dtype:
        """The autocast dtype: bf16 where it was measured at least 1.3 times faster than fp32."""
        if precision == "auto":
            return torch.bfloat16 if self.bf16_speedup >= 1.3 else torch.float32
        return torch.bfloat16 if precision == "bfloat16" else torch.float32


def tune_runtime(device: str | None = None, work: Path | None = None) -> Runtime:
    """Set allocator, threads and matmul precision for this process and probe bf16.

    Device: env MOECORE_DEVICE, else CUDA, else CPU. Whether blocks are compiled: see
    ``compile_policy``. work: the folder of a stage that may be resumed; see ``resumed_threads``.
    Raises UserError where the environment names no device or no number of threads.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", KEPT_PRODUCTS)  # before any product
    device = device or _requested_device()
    cores = available_cores()
    sharing = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # ranks on this machine
    threads = requested_threads() or max(1, cores // sharing)
    if work is not None:
        threads = resumed_threads(work, threads)
        if threads > cores:
            slower = f"that it began with, on {cores}: slower, with the same bits"
            print(f"{work}: continues with the {threads} threads {slower}", file=sys.stderr)
    torch.set_num_threads(threads)
    allocator = _keep_large_blocks() if device == "cpu" else "cuda caching"
    precision, error = _matmul_precision(device)
    name = device_name(device)
    speedup = _remembered_speedup(device, name)
    compiled = compile_policy(device)
    return Runtime(device, name, threads, allocator, precision, error, speedup, compiled)


def _requested_device() -> str:
    """Return $MOECORE_DEVICE, else CUDA where there is one, else the CPU."""
    has_cuda = torch.cuda.is_available()
    device = os.environ.get("MOECORE_DEVICE")
    if not device:
        return "cuda" if has_cuda else "cpu"
    if re.fullmatch(r"cpu|cuda(:\d+)?" if has_cuda else "cpu", device) is None:
        allowed = "cpu, cuda, cuda:0, …" if has_cuda else "cpu; torch sees no GPU here"
        raise UserError(f"MOECORE_DEVICE: found {device!r}; allowed: {allowed}")
    return device


def resumed_threads(work: Path, threads: int) -> int:
    """Return the number of threads that the stage of ``work`` began with; ``threads`` at its start.

    Another number splits sums in other places, so a resumed stage would end with other bits.
    """
    path = work / "threads.json"
    if path.exists():
        return read_json(path, sealed=True)["threads"]
    if current_ranks().first:
        write_sealed(path, {"threads": threads})
    return threads


def device_name(device: str) -> str:
    """The model of the GPU, or of the processor."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8") if info.exists() else ""
    model = re.search(r"^model name\s*:\s*(.+?)\s*$", text, re.MULTILINE)
    return platform.machine() if model is None else model[1]


def _keep_large_blocks() -> str:
    """Tell glibc to keep freed memory: large tensors would page-fault at each allocation."""
    if platform.libc_ver()[0] != "glibc":
        return "system"
    # The numbers of these parameters in glibc's malloc.h.
    m_trim_threshold = -1
    m_mmap_max = -4
    libc = ctypes.CDLL(None)
    done = libc.mallopt(m_mmap_max, 0) and libc.mallopt(m_trim_threshold, -1)
    if done:
        return "glibc, memory kept"
    return "glibc"


def _matmul_precision(device: str) -> tuple[str, float]:
    """The fastest setting of fp32 products that does not round to bf16, and its largest error."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(256, 256, generator=generator) for _ in range(2))
    exact = left.double() @ right.double()
    allowed = ("medium", "high", "highest") if device == "cpu" else ("high", "highest")
    for precision in allowed:
        torch.set_float32_matmul_precision(precision)
        product = (left.to(device) @ right.to(device)).cpu().double()
        error = (product - exact).abs().max() / exact.abs().max()
        if error < 1e-5:
            break
    return precision, float(error)


def _remembered_speedup(device: str, name: str) -> float:
    """Return the probe's first answer: a busy machine must not change a resumed run's dtype."""
    path = Path(".state/runtime.json")
    machine = f"{platform.node()}, {name}, torch {torch.__version__}"
    known = read_json(path) if path.exists() else {}
    if not isinstance(known, dict) or not isinstance(known.get(machine, 0.0), (int, float)):
        known = {}  # not as it was written: measured anew
    if machine not in known:
        known[machine] = round(_bf16_speedup(device), 2)
        write_json(path, known)
    return known[machine]


def _bf16_speedup(device: str) -> float:
    if device.startswith("cuda"):
        return 4.0 if torch.cuda.is_bf16_supported(including_emulation=False) else 0.0
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # two threads that wait for a busy core would measure the wait
    left, right = torch.ones(2, 512, 512)
    low, low_right = torch.ones(2, 512, 512).bfloat16()
    speedup = _shortest_call(lambda: left @ right) / _shortest_call(lambda: low @ low_right)
    torch.set_num_threads(threads)
    return speedup


def _shortest_call(call: Callable[[], object]) -> float:
    """The shortest of 40 calls, or of those that fit into 0.2 s (bf16 may be emulated)."""
    call()
    times: list[float] = []
    while len(times) < 40 and sum(times) < 0.2:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)
