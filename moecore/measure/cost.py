"""Cost of a trained model at inference, and the routing's share (ERMoE, tables S2 and S4)."""

from collections.abc import Sequence

import numpy as np
import torch
from pydantic import Field

from moecore.data.prepared import evenly_spaced_indices
from moecore.measure import forward_cost
from moecore.measure.base import MeasuredModel, Measurement
from moecore.measure.routing_metrics.k_and_threshold_sweeps import copy_with_k
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
        is_fixed=True,
    ),
    "routing_gflops": Metric(
        "GFLOPs of routing", note="MoE layers without their experts", is_fixed=True
    ),
    "latency_ms": Metric("Latency, ms", note="of one image; median and quartiles"),
    "inference_images_per_second": Metric("Images / s, inference", form="count", note="in batches"),
    "peak_memory": Metric(
        "Peak memory", form="bytes", note="weights and tensors of a batch, without gradients"
    ),
    "routing_ms": Metric("Routing, ms", note="of one image; MoE layers without their experts"),
    "routing_share": Metric("Routing's share", form="share", note="of the time of one image"),
    "routing_batch_share": Metric(
        "Routing's share, batch", form="share", note="of the time of a batch"
    ),
}
METRICS = {
    name: metric._replace(paper="cost", limits="quartiles") for name, metric in METRICS.items()
}
METRICS["batch_ms"] = Metric("")  # also with other numbers of experts per token


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
        """Put FLOPs, milliseconds per pass, images per second, peak bytes and the routing's share.

        facts: parameters; active_parameters, which an image's tokens use; the machine.
        """
        test = subject.data.test.images
        images = np.array(test[evenly_spaced_indices(len(test), self.images)])
        single = cyclic_batch_function(images, 1, subject.device)
        batches = cyclic_batch_function(images, self.batch, subject.device)
        flops = forward_cost.whole_and_routing_flops(subject.model, single(0))
        memory, method = forward_cost.peak_memory_and_counting_method(subject.model, batches(0))
        latency = quartiles_ms(forward_cost.unwatched_times(subject.model, single, self.rounds))
        batch_time = quartiles_ms(forward_cost.unwatched_times(subject.model, batches, self.rounds))
        single_passes = forward_cost.pass_and_routing_times(subject.model, single, self.rounds)
        batch_passes = forward_cost.pass_and_routing_times(subject.model, batches, self.rounds)
        out.put("gflops", flops.total * 1e-9)
        out.put("routing_gflops", flops.routing * 1e-9)
        out.put("latency_ms", latency)
        out.put("batch_ms", batch_time)
        out.put("inference_images_per_second", 1000 * self.batch / batch_time.value)
        out.put("peak_memory", memory)
        out.put("routing_ms", quartiles_ms([cost.routing for cost in single_passes]).value)
        out.put("routing_share", routing_share(single_passes))
        out.put("routing_batch_share", routing_share(batch_passes))
        for k in NUMBERS_OF_EXPERTS if subject.model.moe is not None else ():
            model = copy_with_k(subject.model, k)  # None: a router without k, or too few experts
            if model is not None:
                times = quartiles_ms(forward_cost.unwatched_times(model, batches, self.rounds))
                out.put("batch_ms", times, k=model.experts_and_router.experts.scale_k(k))
        out.facts |= parameter_counts(subject.model)
        out.facts["memory_counted_as"] = method
        out.facts["device"] = device_name(subject.device)
        out.facts["threads"] = torch.get_num_threads()


def cyclic_batch_function(images: np.ndarray, batch: int, device: str) -> forward_cost.Images:
    """Return a function: number n of a pass → its images n·batch, n·batch + 1, …, modulo N.

    images: uint8 (N, C, H, W) or float16 (N, C, D, H, W); a pass: (batch, C, …) fp32 in [0, 1].
    """
    pixels = torch.cat(list(image_batches(images, batch, device)))
    return lambda number: pixels[
        torch.arange(number * batch, (number + 1) * batch, device=device) % len(pixels)
    ]


def quartiles_ms(seconds: Sequence[float]) -> Interval:
    """Return the median in milliseconds, with the quartiles as limits."""
    return forward_cost.timing_quartiles([1000 * value for value in seconds])


def routing_share(passes: Sequence[forward_cost.WholeAndRoutingCost]) -> float:
    """Return the median over passes of the routing's share of a pass's time."""
    return forward_cost.timing_quartiles([cost.routing / cost.total for cost in passes]).value
