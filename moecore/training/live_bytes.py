"""The most memory that a computation holds at one time."""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from moecore.core.torch_internals import TorchDispatchMode, storage_identity, tree_leaves


class LiveBytes(TorchDispatchMode):
    """``peak``: the largest number of bytes that tensors held at one time within it.

    It begins with the tensors given. Every storage that an operation returns counts, once, until it
    is freed; what an allocator rounds up or keeps, or a kernel takes for itself, does not. So the
    peak is the same on every machine.
    """

    def __init__(self, held: Iterable[Tensor] = ()) -> None:
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
        key = storage_identity(tensor)
        if key in self._known:
            return
        self._known[key] = weakref.finalize(storage, self._free, key, storage.nbytes())
        self._known[key].atexit = False
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)

    def _free(self, key: int, size: int) -> None:
        del self._known[key]
        self.now -= size


class Peak:
    """The most bytes held at one time: ``size``, known once ``measure_peak`` ends."""

    size: int


@contextmanager
def measure_peak(held: Iterable[Tensor], device: torch.device) -> Iterator[Peak]:
    """Yield what is told, at the end, the most bytes held at one time inside.

    CUDA: what the caching allocator had given out at most (``max_memory_allocated``), other tensors
    of the process included. Elsewhere: live tensors (``LiveBytes``), ``held`` included.
    """
    peak = Peak()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        yield peak
        torch.cuda.synchronize(device)
        peak.size = torch.cuda.max_memory_allocated(device)
        return
    with LiveBytes(held) as live:
        yield peak
    peak.size = live.peak


def peak_counting_method(device: torch.device) -> str:
    """Return how ``measure_peak`` counts on a device."""
    return "CUDA allocator" if device.type == "cuda" else "live tensors"


def live_training_tensors(
    modules: Iterable[nn.Module | None], optimizer: torch.optim.Optimizer, batch: Any
) -> Iterator[Tensor]:
    """Yield all tensors there before a step, one by one, so that no gradient is kept alive."""
    for module in modules:
        if module is not None:
            yield from module.buffers()
            for weight in module.parameters():
                yield weight
                if weight.grad is not None:
                    yield weight.grad
    for leaf in tree_leaves([batch, list(optimizer.state.values())]):
        if isinstance(leaf, Tensor):
            yield leaf
