"""What the figures were measured on: the processor, its measured peaks, and the versions of all
contestants.
"""

from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

import torch

from benchmarks.timing import shortest
from moecore.training.runtime import Runtime

PACKAGES = (
    "torch",
    "transformers",
    "st-moe-pytorch",
    "mixture-of-experts",
    "soft-moe-pytorch",
    "deepspeed",
)


class Peaks(NamedTuple):
    """What the machine reaches in the simplest programs: products of large matrices and a sum of
    long vectors.
    """

    flops: dict[str, float]  # FLOP/s by dtype
    bandwidth: float  # bytes/s, two vectors read and one written


def peaks(side: int = 2048, length: int = 2**26) -> Peaks:
    """Probe with (side × side) products in fp32 and bf16 and with vectors of ``length`` fp32
    numbers, far larger than any cache.
    """
    flops = {
        str(dtype).removeprefix("torch."): _flops(side, dtype)
        for dtype in (torch.float32, torch.bfloat16)
    }
    first = torch.ones(length)
    second = torch.ones(length)
    output = torch.empty_like(first)
    return Peaks(
        flops, 3 * first.nbytes / shortest(lambda: torch.add(first, second, out=output), 8)
    )


def _flops(side: int, dtype: torch.dtype) -> float:
    left = torch.randn(side, side).to(dtype)
    output = torch.empty_like(left)
    return 2 * side**3 / shortest(lambda: torch.mm(left, left, out=output), 8)


def versions() -> dict[str, str]:
    """Package → installed version; those that are not installed are missing."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def described(runtime: Runtime) -> dict:
    """The machine as JSON. Nothing in it changes with the date or names the host."""
    keep = ("device", "device_name", "threads", "allocator", "matmul_precision", "bf16_speedup")
    return {name: getattr(runtime, name) for name in keep}
