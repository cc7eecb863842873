"""Cost of a trained model at inference, and the routing's share (ERMoE, tables S2 and S4)."""

from collections.abc import Sequence

import numpy as np
import torch
from pydantic import Field

from moecore.data.prepared import evenly_spaced_indices
from moecore.measure.base import MeasuredModel, Measurement
from moecore.measure.forward_cost import (
    Images,
    WholeAndRoutingCost,
    pass_and_routing_times,
    peak_memory_and_counting_method,
    timing_quartiles,
    unwatched_times,
    whole_and_routing_flops,
)
from moecore.measure.routing_metrics.sweeps import copy_with_k
from moecore.measure.values import Metric, OnPage, Values
from moecore.nn.backbones.base_model import parameter_counts
from moecore.nn.predict import image_batches
from moecore.statistics.intervals import Interval
from moecore.training.runtime import device_name

NUMBERS_OF_EXPERTS = (1, 2, 3, 4, 6)  # per token: the k that are timed in ERMoE's table S5
# Timings have no better direction: they are of this machine, and differ from run to run.
METRICS = {
    "gflops": Metric(
        "GFLOPs / image",
        note="matrix products and convolutions; a multiplication and an addition count as two",
        paper="cost",
        limits="quartiles",
        is_fixed=True,
    ),
    "routing_gflops": Metric(
        "GFLOPs of routing",
        note="MoE layers without their experts",
        paper="cost",
        limits="quartiles",
        is_fixed=True,
    ),
    "latency_ms": Metric(
        "Latency, ms", note="of one image; median and quartiles", paper="cost", limits="quartiles"
    ),
    "inference_images_per_second": Metric(
        "Images / s, inference", form="count", note="in batches", paper="cost", limits="quartiles"
    ),
    "peak_memory": Metric(
        "Peak memory",
        form="bytes",
        note="weights and tensors of a batch, without gradients",
        paper="cost",
        limits="quartiles",
    ),
    "routing_ms": Metric(
        "Routing, ms",
        note="of one image; MoE layers without their experts",
        paper="cost",
        limits="quartiles",
    ),
    "routing_share": Metric(
        "Routing's share",
        form="share",
        note="of the time of one image",
        paper="cost",
        limits="quartiles",
    ),
    "routing_batch_share": Metric(
        "Routing's share, batch",
        form="share",
        note="of the time of a batch",
        paper="cost",
        limits="quartiles",
    ),
    "batch_ms": Metric(""),  # also with other numbers of experts per token
}


class Cost(Measurement):
    """Counts and timings of forward passes; timings are of this machine and vary between runs."""

    metrics = METRICS
    page = OnPage("cost", place=14)

    batch: int = Field(
        64, ge=1, description="Images per pass for throughput and peak memory; latency is of one."
    )
    rounds: int = Field(10, ge=2, description="Timed passes, after three warm-up passes.")
    images: int = Field(64, ge=1, description="Test images that the passes use in turn.")

    def measure(self, subject: MeasuredModel, out: Values) -> None:
        """Put counts and timings on test images; it takes seconds, so no piece is stored.

        facts: parameters; active_parameters, which an image's tokens use; the machine.
        """
        test = subject.data.test.images
        images = np.array(test[evenly_spaced_indices(len(test), self.images)])
        single = cyclic_batch_function(images, 1, subject.device)
        batches = cyclic_batch_function(images, self.batch, subject.device)
        flops = whole_and_routing_flops(subject.model, single(0))
        memory, method = peak_memory_and_counting_method(subject.model, batches(0))
        latency = quartiles_ms(unwatched_times(subject.model, single, self.rounds))
        batch_time = quartiles_ms(unwatched_times(subject.model, batches, self.rounds))
        single_passes = pass_and_routing_times(subject.model, single, self.rounds)
        batch_passes = pass_and_routing_times(subject.model, batches, self.rounds)
        out.put("gflops", flops.whole * 1e-9)
        out.put("routing_gflops", flops.routing * 1e-9)
        out.put("latency_ms", latency)
        out.put("batch_ms", batch_time)
        out.put("inference_images_per_second", 1000 * self.batch / batch_time.value)
        out.put("peak_memory", memory)
        out.put("routing_ms", median_routing_ms(single_passes))
        out.put("routing_share", routing_share(single_passes))
        out.put("routing_batch_share", routing_share(batch_passes))
        put_times_by_k(subject, batches, self, out)
        out.facts |= parameter_counts(subject.model)
        out.facts["memory_counted_as"] = method
        out.facts["device"] = device_name(subject.device)
        out.facts["threads"] = torch.get_num_threads()


def put_times_by_k(subject: MeasuredModel, batches: Images, settings: Cost, out: Values) -> None:
    """Put the time of a batch for each k; none for dense models and routers without k."""
    if subject.model.moe is None:
        return
    for k in NUMBERS_OF_EXPERTS:
        model = copy_with_k(subject.model, k)
        if model is not None:
            times = quartiles_ms(unwatched_times(model, batches, settings.rounds))
            out.put("batch_ms", times, k=model.experts_and_router.experts.scale_k(k))


def cyclic_batch_function(images: np.ndarray, batch: int, device: str) -> Images:
    """Return a function: number of the pass n → images n·batch, n·batch + 1, …, modulo N.

    images: uint8 (N, C, H, W) or float16 (N, C, D, H, W); a pass: (batch, C, …) fp32 in [0, 1].
    """
    pixels = torch.cat(list(image_batches(images, batch, device)))
    return lambda number: pixels[
        torch.arange(number * batch, (number + 1) * batch, device=device) % len(pixels)
    ]


def quartiles_ms(seconds: Sequence[float]) -> Interval:
    """Return the median in milliseconds, with the quartiles as limits."""
    return timing_quartiles([1000 * value for value in seconds])


def median_routing_ms(passes: Sequence[WholeAndRoutingCost]) -> float:
    """Return the median milliseconds of the routing in a pass."""
    return quartiles_ms([cost.routing for cost in passes]).value


def routing_share(passes: Sequence[WholeAndRoutingCost]) -> float:
    """Return the routing's median share of a pass."""
    return timing_quartiles([cost.routing / cost.whole for cost in passes]).value
