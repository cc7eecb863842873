"""What a trained model costs in use, and the routing's part of it (ERMoE, tables S2, S4)."""

from collections.abc import Sequence

import numpy as np
import torch
from pydantic import Field

from moecore.data.prepared import evenly_spaced_indices
from moecore.measure.base import MeasuredModel, Measurement
from moecore.measure.clock import timing_quartiles
from moecore.measure.forward_cost import (
    Images,
    WholeAndRoutingCost,
    pass_and_routing_times,
    peak_memory_and_counting_method,
    unwatched_times,
    whole_and_routing_flops,
)
from moecore.measure.routing_metrics.sweeps import copy_with_k
from moecore.measure.values import Metric, OnPage, Values
from moecore.nn.backbones.base_model import parameter_counts
from moecore.nn.predict import image_batches
from moecore.statistics.intervals import Interval
from moecore.training.runtime import device_name

NUMBERS_OF_EXPERTS = (1, 2, 3, 4, 6)  # per token: the k that ERMoE's table S5 times
# No timing is better or worse: it is of this machine, and differs from run to run.
METRICS = {
    "gflops": Metric(
        "GFLOPs / image",
        note="products of matrices and convolutions, a multiplication and an addition as two",
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
    "batch_ms": Metric(""),  # and with other numbers of experts per token
}


class Cost(Measurement):
    """How the passes are timed; timings are of this machine and differ from run to run."""

    metrics = METRICS
    page = OnPage("cost", place=14)

    batch: int = Field(
        64, ge=1, description="Images of a pass for throughput and peak memory; latency is of one."
    )
    rounds: int = Field(10, ge=2, description="Timed passes, after three that are not counted.")
    images: int = Field(64, ge=1, description="Test images that the passes go through in turn.")

    def measure(self, subject: MeasuredModel, out: Values) -> None:
        """Put counts and timings on images of the test split, within seconds: no piece is kept.

        facts: parameters; active_parameters, which an image's tokens use; the machine.
        """
        test = subject.data.test.images
        images = np.array(test[evenly_spaced_indices(len(test), self.images)])
        one = cyclic_batch_function(images, 1, subject.device)
        many = cyclic_batch_function(images, self.batch, subject.device)
        flops = whole_and_routing_flops(subject.model, one(0))
        memory, counted = peak_memory_and_counting_method(subject.model, many(0))
        latency = quartiles_ms(unwatched_times(subject.model, one, self.rounds))
        whole = quartiles_ms(unwatched_times(subject.model, many, self.rounds))
        alone = pass_and_routing_times(subject.model, one, self.rounds)
        together = pass_and_routing_times(subject.model, many, self.rounds)
        out.put("gflops", flops.whole * 1e-9)
        out.put("routing_gflops", flops.routing * 1e-9)
        out.put("latency_ms", latency)
        out.put("batch_ms", whole)
        out.put("inference_images_per_second", 1000 * self.batch / whole.value)
        out.put("peak_memory", memory)
        out.put("routing_ms", median_routing_ms(alone))
        out.put("routing_share", routing_share(alone))
        out.put("routing_batch_share", routing_share(together))
        put_times_by_k(subject, many, self, out)
        out.facts |= parameter_counts(subject.model)
        out.facts["memory_counted_as"] = counted
        out.facts["device"] = device_name(subject.device)
        out.facts["threads"] = torch.get_num_threads()


def put_times_by_k(subject: MeasuredModel, many: Images, settings: Cost, out: Values) -> None:
    """Put the time of a batch with each k; of a dense model, or a router without k, none."""
    if subject.model.moe is None:
        return
    for k in NUMBERS_OF_EXPERTS:
        model = copy_with_k(subject.model, k)
        if model is not None:
            times = quartiles_ms(unwatched_times(model, many, settings.rounds))
            out.put("batch_ms", times, k=model.experts_and_router.experts.scale_k(k))


def cyclic_batch_function(images: np.ndarray, batch: int, device: str) -> Images:
    """Pass number n gets images n·batch, n·batch + 1, …, from the start again after the last.

    images: uint8 (N, C, H, W) or float16 (N, C, D, H, W); a pass: (batch, C, …) fp32 in [0, 1].
    """
    pixels = torch.cat(list(image_batches(images, batch, device)))
    return lambda number: pixels[
        torch.arange(number * batch, (number + 1) * batch, device=device) % len(pixels)
    ]


def quartiles_ms(seconds: Sequence[float]) -> Interval:
    """Return the median in milliseconds and the quartiles, which are no interval of a mean."""
    return timing_quartiles([1000 * value for value in seconds])


def median_routing_ms(passes: Sequence[WholeAndRoutingCost]) -> float:
    """Median milliseconds of the routing in a pass."""
    return quartiles_ms([one.routing for one in passes]).value


def routing_share(passes: Sequence[WholeAndRoutingCost]) -> float:
    """The routing's median share of a pass."""
    return timing_quartiles([one.routing / one.whole for one in passes]).value
