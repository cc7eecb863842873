"""What the machine reaches, and how fast a computation could be on it: each operation's
max(FLOPs / peak, bytes / bandwidth), added.
"""

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from benchmarks.layers import wait
from benchmarks.timing import time_fastest_call
from moecore.core.torch_internals import TorchDispatchMode, tree_leaves
from moecore.nn.kernels.grouped import register_flop_formulas
from moecore.training.runtime import Runtime

PACKAGES = (
    "torch",
    "transformers",
    "st-moe-pytorch",
    "mixture-of-experts",
    "soft-moe-pytorch",
    "deepspeed",
    "triton",
    "scattermoe",
    "megablocks",
    "sonic-moe",
)


class Peaks(NamedTuple):
    """Measured peaks of the machine: products of large matrices, and a sum of long vectors."""

    flops: dict[str, float]  # FLOP/s by dtype
    bandwidth: float  # bytes/s, two vectors read and one written


def peaks(device: str = "cpu", side: int = 2048, length: int = 2**26) -> Peaks:
    """Measure (side × side) products in fp32 and bf16, and a sum of two fp32 vectors.

    Vectors of ``length`` numbers exceed any cache. On a GPU both sizes are 4 times larger.
    """
    if device == "cuda":
        side, length = 4 * side, 4 * length
    flops = {
        str(dtype).removeprefix("torch."): _flops(side, dtype, device)
        for dtype in (torch.float32, torch.bfloat16)
    }
    first = torch.ones(length, device=device)
    second = torch.ones(length, device=device)
    output = torch.empty_like(first)

    def add() -> None:
        torch.add(first, second, out=output)
        wait(device)

    return Peaks(flops, 3 * first.nbytes / time_fastest_call(add, 8))


def _flops(side: int, dtype: torch.dtype, device: str) -> float:
    left = torch.randn(side, side, device=device).to(dtype)
    output = torch.empty_like(left)

    def product() -> None:
        torch.mm(left, left, out=output)
        wait(device)

    return 2 * side**3 / time_fastest_call(product, 8)


def versions() -> dict[str, str]:
    """Return package → version, for the installed ones of ``PACKAGES``."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def describe_machine(runtime: Runtime) -> dict:
    """Return the machine as JSON, without dates and host names."""
    keep = ("device", "device_name", "threads", "allocator", "matmul_precision", "bf16_speedup")
    return {name: getattr(runtime, name) for name in keep}


# Operations that read only as many bytes of their first tensor as they write.
GATHERS = {"aten::index_select", "aten::gather", "aten::embedding"}


class Limit(TorchDispatchMode):
    """Adds up ``seconds`` over all operations in the block, except views and allocations.

    Bytes: each input is read once and each output written once, as if there were no cache. FLOPs
    are counted by torch.utils.flop_counter; other operations are limited by their bytes alone.
    """

    def __init__(self, peaks: Peaks) -> None:
        super().__init__()
        register_flop_formulas()
        self.peaks = peaks
        self.seconds = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        outputs = func(*args, **(kwargs or {}))
        if not func.is_view and not func.name().startswith(
            ("aten::empty", "aten::detach", "aten::new_empty")
        ):
            self.seconds += max(
                self._flops(func, args, kwargs, outputs),
                _bytes(func, args, kwargs, outputs) / self.peaks.bandwidth,
            )
        return outputs

    def _flops(self, func: Any, args: tuple, kwargs: dict | None, outputs: Any) -> float:
        count = flop_registry.get(func.overloadpacket)
        if count is None:
            return 0.0
        dtype = str(
            next(leaf.dtype for leaf in tree_leaves(args) if isinstance(leaf, Tensor))
        ).removeprefix("torch.")
        return count(*args, **(kwargs or {}), out_val=outputs) / self.peaks.flops.get(
            dtype, self.peaks.flops["float32"]
        )


def limit(run: Callable[[], object], peaks: Peaks) -> float:
    """Return the least seconds of ``run`` at these peaks, without fused operations or a cache."""
    with Limit(peaks) as counted:
        run()
    return counted.seconds


def weight_traffic(parameters: list[Tensor]) -> int:
    """Return the least bytes of forward and backward: parameters read twice, gradients written."""
    return 3 * sum(parameter.nbytes for parameter in parameters)


def _bytes(func: Any, args: tuple, kwargs: dict | None, outputs: Any) -> int:
    written = {id(leaf): leaf.nbytes for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)}
    if func.name().partition(".")[0] in GATHERS:
        return 2 * sum(written.values())
    into = {id(leaf) for leaf in tree_leaves((kwargs or {}).get("out")) if isinstance(leaf, Tensor)}
    read = {
        id(leaf): leaf.nbytes
        for leaf in tree_leaves((args, kwargs))
        if isinstance(leaf, Tensor) and id(leaf) not in into
    }
    return sum(read.values()) + sum(written.values())
