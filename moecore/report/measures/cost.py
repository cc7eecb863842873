"""What a trained model takes for an image (ERMoE, tables S2 and S4)."""

from moecore.measure.cost import Result
from moecore.report.column import Column
from moecore.report.measures.shown import Figures
from moecore.statistics.intervals import Interval


def latency(result: Result) -> Interval:
    """The median and the quartiles, which are no interval of a mean."""
    timed = result.latency_ms
    return Interval(timed.median, timed.low, timed.high)


# No timing is better or worse: it is of this machine, and differs from run to run.
COLUMNS = (
    Column(
        "gflops",
        "GFLOPs / image",
        lambda result: result.flops_per_image * 1e-9,
        note="products of matrices and convolutions, a multiplication and an addition as two",
        paper="cost",
    ),
    Column(
        "routing_gflops",
        "GFLOPs of routing",
        lambda result: result.routing_flops_per_image * 1e-9,
        note="MoE layers without their experts",
        paper="cost",
    ),
    Column(
        "latency_ms",
        "Latency, ms",
        latency,
        note="of one image; median and quartiles",
        paper="cost",
        limits="quartiles",
    ),
    Column(
        "inference_images_per_second",
        "Images / s, inference",
        lambda result: result.images_per_second,
        form="count",
        note="in batches",
        paper="cost",
    ),
    Column(
        "peak_memory",
        "Peak memory",
        lambda result: result.peak_memory_bytes,
        form="bytes",
        note="weights and tensors of a batch, without gradients",
        paper="cost",
    ),
    Column(
        "routing_ms",
        "Routing, ms",
        lambda result: result.routing_ms,
        note="of one image; MoE layers without their experts",
        paper="cost",
    ),
    Column(
        "routing_share",
        "Routing's share",
        lambda result: result.routing_share,
        form="share",
        note="of the time of one image",
        paper="cost",
    ),
    Column(
        "routing_batch_share",
        "Routing's share, batch",
        lambda result: result.routing_batch_share,
        form="share",
        note="of the time of a batch",
        paper="cost",
    ),
)


def figures(result: Result) -> Figures:
    """None: a few numbers need no picture."""
    yield from ()
