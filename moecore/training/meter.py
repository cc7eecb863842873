"""What a training loop sums between two logged points, and what must not go on."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, distributed, nn

from moecore.core.files import UserError
from moecore.core.ranks import current_ranks, has_process_group, holds_on_all_ranks
from moecore.core.routing_records import ModelOutput, RoutingRecord
from moecore.training.meter import measure_peak
from moecore.training.monitor import LayerTotals, Monitor
from moecore.training.sharded_state import local_shard

MEMORY = "memory_mb"  # of one step, among the values of the first logged point
WEIGHED = 1  # the step, from 0, whose memory is taken: the first after the optimizer has its state
NEVER = 2**53  # a step, from 0, that no training reaches


class Meter:
    """Sums on the device between two logged points, read once each: the host waits for nothing."""

    def __init__(
        self,
        device: torch.device,
        measure: str = "train_accuracy",
        monitor: Monitor | None = None,
    ) -> None:
        """``measure``: the name of the mean, per image, of the scores; ``monitor``: how often
        routing is counted.
        """
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
        self.first_bad = torch.full((), NEVER, device=self.device)

    def add(
        self,
        step: int,
        images: int,
        terms: dict[str, Tensor],
        score: Tensor,
        output: ModelOutput,
    ) -> None:
        """The terms of one step, the sum of the scores of its images, and what the model said."""
        for name, value in (terms | {"score": score}).items():
            self.sums[name] = self.sums.get(name, 0) + value.double()
        earlier = self.first_bad.clamp(max=step + 1)
        self.first_bad = torch.where(torch.isfinite(terms["loss"]), self.first_bad, earlier)
        self.images += images
        self.count += 1
        if self.monitor is not None and step % self.monitor.every == 0:
            for name, record in name_records(output).items():
                self.routing[name] = self.routing.get(name, 0) + sum_layer_routing(record)

    @contextmanager
    def memory(self, held: Iterable[Tensor], when: bool) -> Iterator[None]:
        """Tell, at the next point, the most memory held inside; only ``when`` it is asked for."""
        if not when:
            yield
            return
        with measure_peak(held, self.device) as peak:
            yield
        self.memory_bytes = peak.size

    def take(self, last_good: str) -> tuple[dict[str, float], dict[str, LayerTotals]]:
        """The means since the last point, and the routing of each layer where it was added.

        Raises UserError where a loss was not finite.
        """
        size = current_ranks().size
        layers = list(self.routing.values())
        # Read at once: the device is waited for a single time.
        summed, bad = self._over_ranks(torch.cat([torch.stack(list(self.sums.values())), *layers]))
        *numbers, first_bad = torch.cat([summed, bad[None]]).tolist()
        sums = dict(zip(self.sums, numbers, strict=False))
        score = sums.pop("score")
        means = {name: value / self.count / size for name, value in sums.items()}
        if first_bad < NEVER:
            problem = f"the loss is not finite since step {int(first_bad)} ({_format_means(means)})"
            raise UserError(f"{problem}; {last_good}. Lower the learning rate or a weight")
        seconds = time.perf_counter() - self.begun
        images = self.images * size
        rate = images / seconds
        values = means | {self.measure: score / images, "images_per_second": rate}
        if self.memory_bytes is not None:
            values[MEMORY] = self.memory_bytes / 1e6
            self.memory_bytes = None
        return values, self._layer_totals(numbers[len(self.sums) :])

    def _over_ranks(self, summed: Tensor) -> tuple[Tensor, Tensor]:
        """The sums of all ranks, and the first bad step of any, fp64."""
        bad = self.first_bad.double()
        if has_process_group():
            distributed.all_reduce(summed)
            distributed.all_reduce(bad, distributed.ReduceOp.MIN)
        return summed, bad

    def _layer_totals(self, numbers: list[float]) -> dict[str, LayerTotals]:
        totals, begin = {}, 0
        for name, sums in self.routing.items():
            totals[name] = LayerTotals.of(numbers[begin : begin + len(sums)])
            begin += len(sums)
        return totals


@torch.no_grad()
def sum_layer_routing(record: RoutingRecord) -> Tensor:
    """Return a layer's ``LayerTotals`` of one step, (E + 4,) fp64, on the record's device.

    The margin is of the clean probs: a record has no other scores that a choice went by.
    """
    chosen, probs = record.chosen.flatten(0, -2), record.probs.flatten(0, -2)
    experts = probs.shape[-1]
    number = chosen.sum(dim=-1, keepdim=True)
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


def name_records(output: ModelOutput) -> dict[str, RoutingRecord]:
    """Return the records of a step by their layers' names, those of captions behind."""
    named = {f"MoE {place}": record for place, record in enumerate(output.routing, start=1)}
    texts = enumerate(output.text_routing, start=1)
    return named | {f"text MoE {place}": record for place, record in texts}


def take_and_check_metrics(
    meter: Meter, model: nn.Module, step: int, rate: float, last_good: str
) -> tuple[dict[str, float], dict[str, LayerTotals]]:
    """Return what the meter holds, with the learning rate, and the routing of each layer.

    Raises UserError where the loss or the weights are not finite: they must not be a checkpoint.
    """
    values, routing = meter.take(last_good)
    values["learning_rate"] = rate
    sums = torch.stack([local_shard(parameter.detach()).sum() for parameter in model.parameters()])
    if not holds_on_all_ranks(sums.isfinite().all()):
        problem = f"the weights are not finite after step {step} ({_format_means(values)})"
        raise UserError(f"{problem}; {last_good}. Lower the learning rate or a weight")
    return values, routing


def check_finite_predictions(prediction: Tensor, split: str) -> None:
    """Raise UserError where predictions (N, …) are not finite, which no score would show."""
    bad = int((~prediction.isfinite()).flatten(1).any(dim=1).sum())
    if bad:
        problem = f"{bad} of {len(prediction)} predictions of the {split} split are not finite"
        raise UserError(f"{problem}. Lower the learning rate or a weight")


def _format_means(means: dict[str, float]) -> str:
    listed = ", ".join(f"{name} {value:.4g}" for name, value in means.items())
    return f"means since the last logged point: {listed}"
