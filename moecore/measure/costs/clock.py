"""What a forward pass costs: its FLOPs, its time, its memory; nothing here knows of models."""

import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moecore.core.config import Config


class Quartiles(Config):
    """Median and quartiles of repeated timings.

    A timing has a long upper tail, which a mean and its error would follow.
    """

    median: float
    low: float
    high: float


def quartiles(values: Sequence[float]) -> Quartiles:
    """Median, lower and upper quartile (linear between neighbours); ValueError without values."""
    if len(values) == 0:
        raise ValueError("quartiles: no values")
    low, median, high = (float(value) for value in np.quantile(values, [0.25, 0.5, 0.75]))
    return Quartiles(median=median, low=low, high=high)


class Clock:
    """Seconds between two points of a computation, without making it wait.

    ``mark()`` now, ``seconds(a, b)`` once all is done. On CUDA a mark is an event in the stream, so
    that waiting for the device does not change what is timed; elsewhere the processor's clock.
    """

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.device = device

    def mark(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """Call ``wait`` before."""
        if self.cuda:
            return start.elapsed_time(end) / 1000
        return end - start

    def wait(self) -> None:
        """Until the device has done all that it was asked to do."""
        if self.cuda:
            torch.cuda.synchronize(self.device)


class LiveBytes(TorchDispatchMode):
    """The largest number of bytes that tensors held at one time within it: ``peak``.

    It begins with the tensors given. Every storage that an operation returns counts from then until
    it is freed, once, at its own size. So the peak is that of the computation itself, the same on
    every machine; not in it are what an allocator rounds up or keeps, and what a kernel takes for
    itself while it runs.
    """

    def __init__(self, held: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._known = {}
        for tensor in held:
            self._keep(tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        outputs = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(outputs):
            if isinstance(leaf, Tensor):
                self._keep(leaf)
        return outputs

    def _keep(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        self._known[key] = weakref.finalize(storage, self._free, key, storage.nbytes())
        self._known[key].atexit = False
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)

    def _free(self, key: int, size: int) -> None:
        del self._known[key]
        self.now -= size


def peak_bytes(
    run: Callable[[], object], held: Sequence[Tensor], device: torch.device
) -> tuple[int, str]:
    """The most bytes held at one time while ``run`` runs, and how they were counted.

    CUDA: what the caching allocator had given out at most (``max_memory_allocated``), other tensors
    of the process included. Elsewhere: live tensors (``LiveBytes``), ``held`` included.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device), "CUDA allocator"
    with LiveBytes(held) as live:
        run()
    return live.peak, "live tensors"


def timed(
    run: Callable[[int], object], rounds: int, warm_up: int, device: torch.device
) -> list[float]:
    """Seconds of each of ``rounds`` calls ``run(number)``, after ``warm_up`` others.

    A call ends when the device is done.
    """
    found = []
    for number in range(warm_up + rounds):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        run(number)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - start)
    return found[warm_up:]
