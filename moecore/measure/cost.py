"""What a trained model costs in use, and the routing's part of it (ERMoE, tables S2, S4)."""

from collections.abc import Sequence

import numpy as np
import torch
from pydantic import Field

from moecore.core.config import Config
from moecore.data.prepared import evenly_spaced_indices
from moecore.measure.base import MeasuredModel, Measurement, PartStore
from moecore.measure.clock import Quartiles, timing_quartiles
from moecore.measure.forward_cost import (
    Images,
    WholeAndRoutingCost,
    pass_and_routing_times,
    peak_memory_and_counting_method,
    unwatched_times,
    whole_and_routing_flops,
)
from moecore.measure.routing_metrics.sweeps import copy_with_k
from moecore.nn.backbones.base_model import parameter_counts
from moecore.nn.predict import image_batches
from moecore.training.runtime import device_name

NUMBERS_OF_EXPERTS = (1, 2, 3, 4, 6)  # per token: the k that ERMoE's table S5 times


class Cost(Measurement):
    """How the passes are timed; timings are of this machine and differ from run to run."""

    batch: int = Field(
        64, ge=1, description="Images of a pass for throughput and peak memory; latency is of one."
    )
    rounds: int = Field(10, ge=2, description="Timed passes, after three that are not counted.")
    images: int = Field(64, ge=1, description="Test images that the passes go through in turn.")

    def measure(self, subject: MeasuredModel, parts: PartStore) -> "Result":
        """Counts and timings on images of the test split, which take seconds: no parts are kept."""
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
        return Result(
            **parameter_counts(subject.model),
            flops_per_image=flops.whole,
            routing_flops_per_image=flops.routing,
            latency_ms=latency,
            batch=self.batch,
            batch_ms=whole,
            images_per_second=1000 * self.batch / whole.median,
            peak_memory_bytes=memory,
            memory_counted_as=counted,
            routing_ms=median_routing_ms(alone),
            routing_share=routing_share(alone),
            routing_batch_share=routing_share(together),
            by_k=times_by_k(subject, many, self),
            rounds=self.rounds,
            device=device_name(subject.device),
            threads=torch.get_num_threads(),
        )


class KTime(Config):
    """A batch's time with another number of experts per token."""

    k: int
    batch_ms: Quartiles


class Result(Config):
    """Counts of the model, and timings of this machine."""

    parameters: int
    active_parameters: int  # that an image's tokens use
    flops_per_image: float
    routing_flops_per_image: float
    latency_ms: Quartiles  # of one image
    batch: int
    batch_ms: Quartiles
    images_per_second: float
    peak_memory_bytes: int
    memory_counted_as: str
    routing_ms: float
    routing_share: float
    routing_batch_share: float
    by_k: tuple[KTime, ...]  # none of a model whose router has no k
    rounds: int
    device: str  # its name
    threads: int


def times_by_k(subject: MeasuredModel, many: Images, settings: Cost) -> tuple[KTime, ...]:
    """The time of a batch with each k; of a dense model none."""
    if subject.model.moe is None:
        return ()
    rows = []
    for k in NUMBERS_OF_EXPERTS:
        model = copy_with_k(subject.model, k)
        if model is not None:
            times = quartiles_ms(unwatched_times(model, many, settings.rounds))
            pieces = model.experts_and_router.experts.scale_k(k)
            rows.append(KTime(k=pieces, batch_ms=times))
    return tuple(rows)


def cyclic_batch_function(images: np.ndarray, batch: int, device: str) -> Images:
    """Pass number n gets images n·batch, n·batch + 1, …, from the start again after the last.

    images: uint8 (N, C, H, W) or float16 (N, C, D, H, W); a pass: (batch, C, …) fp32 in [0, 1].
    """
    pixels = torch.cat(list(image_batches(images, batch, device)))
    return lambda number: pixels[
        torch.arange(number * batch, (number + 1) * batch, device=device) % len(pixels)
    ]


def quartiles_ms(seconds: Sequence[float]) -> Quartiles:
    return timing_quartiles([1000 * value for value in seconds])


def median_routing_ms(passes: Sequence[WholeAndRoutingCost]) -> float:
    """Median milliseconds of the routing in a pass."""
    return quartiles_ms([one.routing for one in passes]).median


def routing_share(passes: Sequence[WholeAndRoutingCost]) -> float:
    """The routing's median share of a pass."""
    return timing_quartiles([one.routing / one.whole for one in passes]).median
