"""Measure FLOPs, latency and memory at inference, and routing's share (ERMoE, S2 and S4).

Routing is an MoE layer without its experts: router, dispatch and combination. Where a teacher
routes (``teacher_routed``), the whole teacher counts as routing.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from moecore.data.prepared import evenly_spaced_indices
from moecore.measure.base import MeasuredModel, Measurement
from moecore.measure.routing_metrics.interventions import copy_with_k
from moecore.measure.values import Metric, OnPage, Values
from moecore.nn.backbones.base_model import count_total_and_active_parameters
from moecore.nn.dispatch import SparsePlan
from moecore.nn.kernels.grouped import register_flop_formulas
from moecore.nn.layers.moe import MoEFeedForward
from moecore.nn.predict import eval_mode, image_batches, model_device
from moecore.statistics.intervals import Interval
from moecore.training import meter, runtime
from moecore.training.method import Guide

WARM_UP = 3  # passes that are not timed, before the others

# number of a pass → images (B, C, H, W) in [0, 1], on the model's device
Images = Callable[[int], Tensor]


class WholeAndRoutingCost(NamedTuple):
    total: float  # FLOPs or seconds
    routing: float  # the part of the routing


class ForwardPassSegment(NamedTuple):
    part: str  # "layer", "experts" or "teacher"
    start: Any  # time, or FLOPs so far, at its start
    end: Any  # the same at its end
    padding: float  # share of the experts' rows that only pad


def compute_median_and_quartiles(values: Sequence[float]) -> Interval:
    """Return median and quartiles (linear interpolation), as timings have a long upper tail."""
    if len(values) == 0:
        raise ValueError("quartiles: no values")
    low, median, high = (float(value) for value in np.quantile(values, [0.25, 0.5, 0.75]))
    return Interval(median, low, high)


# On CUDA a mark is an event in the stream, as waiting for the device would change the timing.
class Clock:
    """Measures seconds between two calls of ``mark``, on the CPU or on a CUDA device."""

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
        """Return the seconds between two marks; call ``wait`` before."""
        if self.cuda:
            return start.elapsed_time(end) / 1000
        return end - start

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)


def whole_and_routing_flops(model: nn.Module, images: Tensor) -> WholeAndRoutingCost:
    """Return FLOPs per image in evaluation mode; a multiplication and an addition count as two."""
    # images: (B, C, H, W) in [0, 1], on the model's device.
    # Of matrix products (also grouped ones), convolutions and attention, not of element-wise work.
    register_flop_formulas()
    counter = FlopCounterMode(display=False)
    with (
        eval_mode(model),
        torch.no_grad(),
        counter,
        measuring_moe_and_teacher_calls(model, counter.get_total_flops) as spans,
    ):
        model(images)
    # of experts on CPU: subtracted, so that the count does not depend on the machine
    padded = sum((span.end - span.start) * span.padding for span in spans if span.part == "experts")
    routing = sum_routing_cost(spans, lambda start, end: end - start)
    total = counter.get_total_flops() - padded
    return WholeAndRoutingCost(total / len(images), routing / len(images))


def pass_and_routing_times(
    model: nn.Module, images: Images, rounds: int
) -> list[WholeAndRoutingCost]:
    """Return seconds of each of ``rounds`` passes, and of its routing, after WARM_UP passes."""
    clock = Clock(model_device(model))
    times = []
    with eval_mode(model), torch.no_grad():
        for number in range(WARM_UP + rounds):
            pixels = images(number)
            clock.wait()
            with measuring_moe_and_teacher_calls(model, clock.mark) as spans:
                start = clock.mark()
                model(pixels)
                end = clock.mark()
            clock.wait()
            routing = sum_routing_cost(spans, clock.seconds)
            times.append(WholeAndRoutingCost(clock.seconds(start, end), routing))
    return times[WARM_UP:]


def forward_pass_times(model: nn.Module, images: Images, rounds: int) -> list[float]:
    """Return seconds of each of ``rounds`` passes without hooks, after WARM_UP passes."""
    clock = Clock(model_device(model))
    durations = []
    with eval_mode(model), torch.no_grad():
        for number in range(WARM_UP + rounds):
            clock.wait()
            start = time.perf_counter()
            model(images(number))
            clock.wait()
            durations.append(time.perf_counter() - start)
    return durations[WARM_UP:]


def peak_memory_and_counting_method(model: nn.Module, images: Tensor) -> tuple[int, str]:
    """Return peak bytes of weights and a pass without gradients, and how bytes were counted."""
    tensors = (*model.parameters(), *model.buffers(), images)
    device = model_device(model)
    with eval_mode(model), torch.no_grad(), meter.measuring_peak_memory(tensors, device) as peak:
        model(images)
    return peak.size, "CUDA allocator" if device.type == "cuda" else "live tensors"


def sum_routing_cost(spans: list[ForwardPassSegment], length: Callable[[Any, Any], float]) -> float:
    """Return routing's seconds or FLOPs: MoE layers minus experts, plus the teacher that routes."""
    sign = {"layer": 1, "experts": -1, "teacher": 1}
    return sum(sign[span.part] * length(span.start, span.end) for span in spans)


@contextmanager
def measuring_moe_and_teacher_calls(
    model: nn.Module, mark: Callable[[], Any]
) -> Iterator[list[ForwardPassSegment]]:
    """Yield a list of calls of MoE layers, experts, teacher; mark: returns time or FLOPs so far."""
    spans: list[ForwardPassSegment] = []
    with ExitStack() as stack:

        def record(module: nn.Module, part: str, padding: dict[str, float]) -> None:
            """Record calls of a module; padding["share"]: share of padding rows as a call ends."""
            starts: list[Any] = []

            def end_span(*_: Any) -> None:
                segment = (starts.pop(), mark(), padding.get("share", 0.0))
                spans.append(ForwardPassSegment(part, *segment))

            begin = module.register_forward_pre_hook(lambda *_: starts.append(mark()))
            stack.callback(begin.remove)
            stack.callback(module.register_forward_hook(end_span).remove)

        def record_layer(layer: MoEFeedForward) -> None:
            padding: dict[str, float] = {}

            def store_padding(router: nn.Module, inputs: tuple, output: tuple) -> None:
                padding["share"] = padding_share(layer.plan_without_zero_computation(output[0]))

            stack.callback(layer.router.register_forward_hook(store_padding).remove)
            record(layer, "layer", {})
            record(layer.experts, "experts", padding)
            if layer.shared is not None:
                record(layer.shared, "experts", {})

        for module in model.modules():
            if isinstance(module, Guide):
                record(module, "teacher", {})
            if isinstance(module, MoEFeedForward):
                record_layer(module)
        yield spans


def padding_share(plan: Any) -> float:
    """Return the share of a ``SparsePlan``'s rows that only pad; 0 for other or empty plans."""
    inner = getattr(plan, "plan", plan)
    if isinstance(inner, SparsePlan) and len(inner.order):
        computed = len(inner.rows) if inner.computed is None else int(inner.computed)
        return 1 - computed / len(inner.order)
    return 0.0


TIMED_EXPERTS_PER_TOKEN = (1, 2, 3, 4, 6)  # per token: the k that are timed in ERMoE's table S5
# Timings have no better direction: they are of this machine, and differ from run to run.
METRICS = {
    "gflops": Metric(
        "GFLOPs / image",
        note="matrix products and convolutions; a multiplication and an addition count as two",
        is_fixed=True,
    ),
    "routing_gflops": Metric("GFLOPs of routing", note="MoE layers, no experts", is_fixed=True),
    "latency_ms": Metric("Latency, ms", note="of one image; median and quartiles"),
    "inference_images_per_second": Metric("Images / s, inference", form="count", note="in batches"),
    "peak_memory": Metric("Peak memory", form="bytes", note="weights and a batch, no gradients"),
    "routing_ms": Metric("Routing, ms", note="of one image; MoE layers, no experts"),
    "routing_share": Metric("Routing's share", form="share", note="of the time of one image"),
    "routing_batch_share": Metric("Routing's share, batch", form="share", note="of a batch's time"),
}
METRICS = {name: row._replace(paper="cost", limits="quartiles") for name, row in METRICS.items()}
METRICS["batch_ms"] = Metric("")  # also with other numbers of experts per token


class Cost(Measurement):
    """Counts and timings of forward passes; timings are of this machine and vary between runs."""

    metrics = METRICS
    page = OnPage("cost", place=14)

    batch: int = Field(64, ge=1, description="For throughput and peak memory; latency: one image.")
    rounds: int = Field(10, ge=2, description="Timed passes, after three warm-up passes.")
    images: int = Field(64, ge=1, description="Test images that the passes use in turn.")

    def measure(self, subject: MeasuredModel, out: Values) -> None:
        # facts: parameters; active_parameters, which an image's tokens use; the machine.
        test = subject.data.test.images
        images = np.array(test[evenly_spaced_indices(len(test), self.images)])
        single = build_cyclic_batch_getter(images, 1, subject.device)
        batches = build_cyclic_batch_getter(images, self.batch, subject.device)
        flops = whole_and_routing_flops(subject.model, single(0))
        memory, method = peak_memory_and_counting_method(subject.model, batches(0))
        latency = quartiles_in_ms(forward_pass_times(subject.model, single, self.rounds))
        batch_time = quartiles_in_ms(forward_pass_times(subject.model, batches, self.rounds))
        single_passes = pass_and_routing_times(subject.model, single, self.rounds)
        batch_passes = pass_and_routing_times(subject.model, batches, self.rounds)
        out.put("gflops", flops.total * 1e-9)
        out.put("routing_gflops", flops.routing * 1e-9)
        out.put("latency_ms", latency)
        out.put("batch_ms", batch_time)
        out.put("inference_images_per_second", 1000 * self.batch / batch_time.value)
        out.put("peak_memory", memory)
        out.put("routing_ms", quartiles_in_ms([cost.routing for cost in single_passes]).value)
        out.put("routing_share", routing_time_share(single_passes))
        out.put("routing_batch_share", routing_time_share(batch_passes))
        for k in TIMED_EXPERTS_PER_TOKEN if subject.model.moe is not None else ():
            model = copy_with_k(subject.model, k)  # None: a router without k, or too few experts
            if model is not None:
                times = quartiles_in_ms(forward_pass_times(model, batches, self.rounds))
                out.put("batch_ms", times, k=model.experts_and_router.experts.scale_k(k))
        out.facts |= count_total_and_active_parameters(subject.model)
        out.facts["memory_counted_as"] = method
        out.facts["device"] = runtime.device_name(subject.device)
        out.facts["threads"] = torch.get_num_threads()


def build_cyclic_batch_getter(images: np.ndarray, batch: int, device: str) -> Images:
    """Return a function from a pass's number n to its images n·batch, n·batch + 1, …, modulo N."""
    # images: uint8 (N, C, H, W) or float16 (N, C, D, H, W); a pass: (batch, C, …) fp32 in [0, 1].
    pixels = torch.cat(list(image_batches(images, batch, device)))
    return lambda number: pixels[
        torch.arange(number * batch, (number + 1) * batch, device=device) % len(pixels)
    ]


def quartiles_in_ms(seconds: Sequence[float]) -> Interval:
    return compute_median_and_quartiles([1000 * value for value in seconds])


def routing_time_share(passes: Sequence[WholeAndRoutingCost]) -> float:
    return compute_median_and_quartiles([cost.routing / cost.total for cost in passes]).value
