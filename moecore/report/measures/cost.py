"""What a trained model takes for an image (ERMoE, tables S2 and S4)."""

from functools import partial
from operator import attrgetter

from moecore.measure.cost import Result
from moecore.report.column import Column
from moecore.report.measures.result_display import Shown
from moecore.statistics.intervals import Interval

PRODUCTS = "products of matrices and convolutions, a multiplication and an addition as two"
ROUTING = "MoE layers without their experts"


def latency_quartiles(result: Result) -> Interval:
    """The median and the quartiles, which are no interval of a mean."""
    timed = result.latency_ms
    return Interval(timed.median, timed.low, timed.high)


# No timing is better or worse: it is of this machine, and differs from run to run.
cost_column = partial(Column, paper="cost", limits="quartiles")
COLUMNS = (
    cost_column(
        "gflops",
        "GFLOPs / image",
        lambda result: result.flops_per_image * 1e-9,
        note=PRODUCTS,
        is_fixed=True,
    ),
    cost_column(
        "routing_gflops",
        "GFLOPs of routing",
        lambda result: result.routing_flops_per_image * 1e-9,
        note=ROUTING,
        is_fixed=True,
    ),
    cost_column(
        "latency_ms", "Latency, ms", latency_quartiles, note="of one image; median and quartiles"
    ),
    cost_column(
        "inference_images_per_second",
        "Images / s, inference",
        attrgetter("images_per_second"),
        form="count",
        note="in batches",
    ),
    cost_column(
        "peak_memory",
        "Peak memory",
        attrgetter("peak_memory_bytes"),
        form="bytes",
        note="weights and tensors of a batch, without gradients",
    ),
    cost_column(
        "routing_ms", "Routing, ms", attrgetter("routing_ms"), note=f"of one image; {ROUTING}"
    ),
    cost_column(
        "routing_share",
        "Routing's share",
        attrgetter("routing_share"),
        form="share",
        note="of the time of one image",
    ),
    cost_column(
        "routing_batch_share",
        "Routing's share, batch",
        attrgetter("routing_batch_share"),
        form="share",
        note="of the time of a batch",
    ),
)
SHOWN = Shown("cost", "cost", Result, COLUMNS, place=14)
