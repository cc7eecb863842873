"""What a training loop sums between two logged points, the memory of a step, and what must not go
on.
"""

import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn

from moecore.core.files import UserError
from moecore.core.ranks import joined, of_all_ranks, ranks
from moecore.core.torch_internals import TorchDispatchMode, storage_address, tree_leaves
from moecore.training.sharded_state import own_part

MEMORY = "memory_mb"  # of one step, among the values of the first logged point
WEIGHED = 1  # the step, from 0, whose memory is taken: the first after the optimizer has its state


NEVER = 2**53  # a step, from 0, that no training reaches


class Peak(NamedTuple):
    """The most bytes held at one time while something ran, how they were counted, and what it
    returned.
    """

    size: int
    counted_as: str
    returned: Any


class LiveBytes(TorchDispatchMode):
    """The largest number of bytes that tensors held at one time within it: ``peak``.

    It begins with the tensors given. Every storage that an operation returns counts from then until
    it is freed, once, at its own size. So the peak is that of the computation itself, the same on
    every machine; not in it are what an allocator rounds up or keeps, and what a kernel takes for
    itself while it runs.
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
        key = storage_address(tensor)
        if key in self._known:
            return
        self._known[key] = weakref.finalize(storage, self._free, key, storage.nbytes())
        self._known[key].atexit = False
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)

    def _free(self, key: int, size: int) -> None:
        del self._known[key]
        self.now -= size


def peak_bytes(run: Callable[[], Any], held: Iterable[Tensor], device: torch.device) -> Peak:
    """The most bytes held at one time while ``run`` runs.

    CUDA: what the caching allocator had given out at most (``max_memory_allocated``), other tensors
    of the process included. Elsewhere: live tensors (``LiveBytes``), ``held`` included.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        returned = run()
        torch.cuda.synchronize(device)
        return Peak(torch.cuda.max_memory_allocated(device), counted_as(device), returned)
    with LiveBytes(held) as live:
        returned = run()
    return Peak(live.peak, counted_as(device), returned)


def counted_as(device: torch.device) -> str:
    """How ``peak_bytes`` counts on a device."""
    return "CUDA allocator" if device.type == "cuda" else "live tensors"


def held_in_training(
    modules: Iterable[nn.Module | None], optimizer: torch.optim.Optimizer, batch: Any
) -> Iterator[Tensor]:
    """What is there before a step: weights, their last gradients, buffers, the optimizer's state
    and the batch. The data set is not among it.

    One by one, so that nothing keeps the gradients which the step lets go.
    """
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


class Meter:
    """Sums on the device between two logged points, read once each time.

    So a step makes the host wait for nothing.
    """

    def __init__(self, device: torch.device, measure: str = "train_accuracy") -> None:
        """``measure``: the name of the mean, per image, of the scores."""
        self.device = device
        self.measure = measure
        self.memory: int | None = None
        self.start()

    def start(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.images = 0
        self.count = 0
        self.begun = time.perf_counter()
        self.first_bad = torch.full((), NEVER, device=self.device)

    def add(self, step: int, images: int, terms: dict[str, Tensor], score: Tensor) -> None:
        """The terms of one step, and the sum of the scores of its images."""
        for name, value in (terms | {"score": score}).items():
            self.sums[name] = self.sums.get(name, 0) + value.double()
        earlier = self.first_bad.clamp(max=step + 1)
        self.first_bad = torch.where(torch.isfinite(terms["loss"]), self.first_bad, earlier)
        self.images += images
        self.count += 1

    def weighed(self, update: Callable[[], Any], held: Iterable[Tensor], weigh: bool) -> Any:
        """What ``update`` returns; to ``weigh`` it is to tell, at the next point, the most memory
        that it takes.
        """
        if not weigh:
            return update()
        found = peak_bytes(update, held, self.device)
        self.memory = found.size
        return found.returned

    def take(self, last_good: str) -> dict[str, float]:
        """The means since the last point. Raises UserError where a loss was not finite."""
        size = ranks().size
        # Read at once: the device is waited for a single time.
        bad = self._bad()
        *summed, first_bad = torch.stack([*self.sums.values(), bad]).tolist()
        sums = dict(zip(self.sums, summed, strict=True))
        score = sums.pop("score")
        means = {name: value / self.count / size for name, value in sums.items()}
        if first_bad < NEVER:
            found = f"the loss is not finite since step {int(first_bad)} ({_shown(means)})"
            raise UserError(f"{found}; {last_good}. Lower the learning rate or a weight")
        seconds = time.perf_counter() - self.begun
        images = self.images * size
        rate = images / seconds
        values = means | {self.measure: score / images, "images_per_second": rate}
        if self.memory is not None:
            values[MEMORY] = self.memory / 1e6
            self.memory = None
        return values

    def _bad(self) -> Tensor:
        """The first bad step of any rank, fp64; the sums become those of all ranks."""
        bad = self.first_bad.double()
        if not joined():
            return bad
        summed = torch.stack(list(self.sums.values()))
        distributed.all_reduce(summed)
        self.sums = dict(zip(self.sums, summed, strict=True))
        distributed.all_reduce(bad, distributed.ReduceOp.MIN)
        return bad


def taken(
    meter: Meter, model: nn.Module, step: int, rate: float, last_good: str
) -> dict[str, float]:
    """What the meter holds, and the learning rate.

    Raises UserError where the loss was not finite, or the weights are not: a finite loss can leave
    such weights, and they must not become a checkpoint.
    """
    values = meter.take(last_good) | {"learning_rate": rate}
    sums = torch.stack([own_part(parameter.detach()).sum() for parameter in model.parameters()])
    if not of_all_ranks(sums.isfinite().all()):
        found = f"the weights are not finite after step {step} ({_shown(values)})"
        raise UserError(f"{found}; {last_good}. Lower the learning rate or a weight")
    return values


def check_predictions(prediction: Tensor, split: str) -> None:
    """Raise UserError where predictions (N, …) are not finite, which no score would show."""
    bad = int((~prediction.isfinite()).flatten(1).any(dim=1).sum())
    if bad:
        found = f"{bad} of {len(prediction)} predictions of the {split} split are not finite"
        raise UserError(f"{found}. Lower the learning rate or a weight")


def _shown(means: dict[str, float]) -> str:
    listed = ", ".join(f"{name} {value:.4g}" for name, value in means.items())
    return f"means since the last logged point: {listed}"
