"""Average logged values over steps, check for non-finite values, and measure peak memory."""

import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, distributed, nn

from moecore.core.files import UserError
from moecore.core.ranks import has_process_group, holds_on_all_ranks, rank_and_size
from moecore.core.routing_records import ModelOutput, RoutingRecord
from moecore.core.torch_internals import TorchDispatchMode, storage_identity, tree_leaves
from moecore.training.distributed_training import local_shard
from moecore.training.monitor import LayerTotals, MonitorSettings

MEMORY = "memory_mb"  # key of a step's peak memory, in the first logged point
MEMORY_STEP = 1  # the step, from 0, whose memory is measured: the optimizer has its state by then
NEVER_REACHED_STEP = 2**53  # a step that no training reaches


class Meter:
    """Sums losses, scores and routing between two logged points, on the device."""

    def __init__(
        self,
        device: torch.device,
        measure: str = "train_accuracy",
        monitor: MonitorSettings | None = None,
    ) -> None:
        """Name the mean score ``measure``; count routing as often as ``monitor`` says."""
        self.device = device
        self.measure = measure
        self.monitor = monitor
        self.memory_bytes: int | None = None
        self.start()

    def start(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.routing: dict[str, Tensor] = {}  # by layer, (E + 4,)
        self.images = 0
        self.count = 0
        self.begun = time.perf_counter()
        self.first_bad = torch.full((), NEVER_REACHED_STEP, device=self.device)

    def add(
        self, step: int, images: int, terms: dict[str, Tensor], score: Tensor, output: ModelOutput
    ) -> None:
        for name, value in (terms | {"score": score}).items():
            self.sums[name] = self.sums.get(name, 0) + value.double()
        earlier = self.first_bad.clamp(max=step + 1)
        self.first_bad = torch.where(torch.isfinite(terms["loss"]), self.first_bad, earlier)
        self.images += images
        self.count += 1
        if self.monitor is None or step % self.monitor.every:
            return
        for tower, records in {"MoE": output.routing, "text MoE": output.text_routing}.items():
            for index, record in enumerate(records, start=1):
                name = f"{tower} {index}"
                self.routing[name] = self.routing.get(name, 0) + sum_layer_routing(record)

    @contextmanager
    def measuring_memory(self, tensors: Iterable[Tensor], is_measured: bool) -> Iterator[None]:
        """If ``is_measured``, measure the peak memory, which ``average_over_ranks`` returns."""
        if not is_measured:
            yield
            return
        with measuring_peak_memory(tensors, self.device) as peak:
            yield
        self.memory_bytes = peak.size

    def average_over_ranks(self, last_good: str) -> tuple[dict[str, float], dict[str, LayerTotals]]:
        """Return means, layer totals since ``start()``; NaN or ∞: UserError with ``last_good``."""
        size = rank_and_size().size
        summed = torch.cat([torch.stack(list(self.sums.values())), *self.routing.values()])
        bad = self.first_bad.double()
        if has_process_group():
            distributed.all_reduce(summed)
            distributed.all_reduce(bad, distributed.ReduceOp.MIN)
        # Read together, so that the host waits for the device once.
        *numbers, first_bad = torch.cat([summed, bad[None]]).tolist()
        sums = dict(zip(self.sums, numbers, strict=False))
        score = sums.pop("score")
        means = {name: value / self.count / size for name, value in sums.items()}
        if first_bad < NEVER_REACHED_STEP:
            raise UserError(
                f"the loss is not finite since step {int(first_bad)} ({_format_means(means)}); "
                f"{last_good}. Lower the learning rate or a weight"
            )
        seconds = time.perf_counter() - self.begun
        images = self.images * size
        values = means | {self.measure: score / images, "images_per_second": images / seconds}
        if self.memory_bytes is not None:
            values[MEMORY] = self.memory_bytes / 1e6
            self.memory_bytes = None
        totals = {}
        begin = len(self.sums)
        for name, layer in self.routing.items():
            totals[name] = LayerTotals.from_numbers(numbers[begin : begin + len(layer)])
            begin += len(layer)
        return values, totals


@torch.no_grad()
def sum_layer_routing(record: RoutingRecord) -> Tensor:
    """Sum a record's routing to the numbers of LayerTotals, (E + 4,) fp64."""
    chosen, probs = record.chosen.flatten(0, -2), record.probs.flatten(0, -2)
    experts = probs.shape[-1]
    number = chosen.sum(dim=-1, keepdim=True)
    # The margin is between clean probs: a record has no other scores that determined the choice.
    ordered = probs.sort(dim=-1, descending=True).values
    gap = ordered.gather(-1, (number - 1).clamp_min(0))
    gap = gap - ordered.gather(-1, number.clamp_max(experts - 1))
    has_margin = (number > 0) & (number < experts)
    sums = [
        torch.full((), len(probs), device=probs.device),
        torch.special.entr(probs).sum(),
        gap.where(has_margin, 0).sum(),
        has_margin.sum(),
    ]
    return torch.cat([chosen.sum(dim=0).double(), torch.stack([value.double() for value in sums])])


def average_and_check_metrics(
    meter: Meter, model: nn.Module, step: int, rate: float, last_good: str
) -> tuple[dict[str, float], dict[str, LayerTotals]]:
    """Return averages, learning rate; weights not finite: UserError with the text ``last_good``."""
    values, routing = meter.average_over_ranks(last_good)
    values["learning_rate"] = rate
    # A checkpoint must not hold weights that are not finite.
    sums = torch.stack([local_shard(parameter.detach()).sum() for parameter in model.parameters()])
    if not holds_on_all_ranks(sums.isfinite().all()):
        raise UserError(
            f"the weights are not finite after step {step} ({_format_means(values)}); "
            f"{last_good}. Lower the learning rate or a weight"
        )
    return values, routing


def check_finite_predictions(prediction: Tensor, split: str) -> None:
    """Raise UserError if a prediction (N, …) is not finite; a score may hide this."""
    bad = int((~prediction.isfinite()).flatten(1).any(dim=1).sum())
    if bad:
        raise UserError(
            f"{bad} of {len(prediction)} predictions of the {split} split are not finite. Lower "
            "the learning rate or a weight"
        )


def _format_means(means: dict[str, float]) -> str:
    listed = ", ".join(f"{name} {value:.4g}" for name, value in means.items())
    return f"means since the last logged point: {listed}"


# Every storage in ``tensors`` or from an operation counts, once, until it is freed. Overhead and
# workspaces of kernels do not, so the peak is the same on every machine.
class LiveBytesCounter(TorchDispatchMode):
    """Counts bytes of live tensors in the ``with`` block; ``peak`` is the maximum."""

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._known = {}
        for tensor in tensors:
            self._count_tensor(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(outputs):
            if isinstance(leaf, Tensor):
                self._count_tensor(leaf)
        return outputs

    def _count_tensor(self, tensor: Tensor) -> None:
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


class PeakMemory:
    """Peak memory in bytes: ``size`` is set when the context ``measuring_peak_memory`` ends."""

    size: int


@contextmanager
def measuring_peak_memory(tensors: Iterable[Tensor], device: torch.device) -> Iterator[PeakMemory]:
    """Measure the peak memory of the ``with`` block; the yielded object gets it at the end."""
    peak = PeakMemory()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        yield peak
        torch.cuda.synchronize(device)
        # with other tensors of the process
        peak.size = torch.cuda.max_memory_allocated(device)
        return
    with LiveBytesCounter(tensors) as live:
        yield peak
    peak.size = live.peak


def live_training_tensors(
    modules: Iterable[nn.Module | None], optimizer: torch.optim.Optimizer, batch: Any
) -> Iterator[Tensor]:
    """Yield weights, gradients, optimizer state and batch, one by one, to keep none alive."""
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
