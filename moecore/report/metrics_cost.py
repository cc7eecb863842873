"""The metrics of cost: what a training takes beside the baseline's, and what a trained model takes for an image (ERMoE, tables S2 and S4)."""

from moecore.evaluation.intervals import Interval
from moecore.report.metric import Metric, Reader
from moecore.report.relative import Relative
from moecore.report.results import Measured


def overhead(relative: Relative) -> list[Metric]:
    """Training time relative to the baseline MoE's; no column without one."""
    if not relative.seconds:
        return []
    note = f"training time / mean training time of {relative.method}"
    return [Metric("training_overhead", f"Training time / {relative.method}", lambda m: m.trained["seconds"] / relative.seconds, "", "number", note)]


def cost() -> list[Metric]:
    """No column where it was not measured. Timings mark no method: their quartiles are of this machine, not an interval of a mean."""
    timed = "of one image; median and quartiles"
    counted = "products of matrices and convolutions, a multiplication and an addition as two"
    return [
        Metric("gflops", "GFLOPs / image", _scaled("flops_per_image", 1e-9), "", "number", counted, "cost"),
        Metric("routing_gflops", "GFLOPs of routing", _scaled("routing_flops_per_image", 1e-9), "", "number", "MoE layers without their experts", "cost"),
        Metric("latency_ms", "Latency, ms", _latency, "", "number", timed, "cost", limits="quartiles"),
        Metric("inference_images_per_second", "Images / s, inference", _scaled("images_per_second", 1), "", "count", "in batches", "cost"),
        Metric("peak_memory", "Peak memory", _scaled("peak_memory_bytes", 1), "", "bytes", "weights and tensors of a batch, without gradients", "cost"),
        Metric("routing_ms", "Routing, ms", _scaled("routing_ms", 1), "", "number", "of one image; MoE layers without their experts", "cost"),
        Metric("routing_share", "Routing's share", _scaled("routing_share", 1), "", "share", "of the time of one image", "cost"),
        Metric("routing_batch_share", "Routing's share, batch", _scaled("routing_batch_share", 1), "", "share", "of the time of a batch", "cost"),
    ]


def _scaled(name: str, factor: float) -> Reader:
    def read(m: Measured) -> float | None:
        found = m.cost.get(name)
        return None if found is None else found * factor

    return read


def _latency(m: Measured) -> Interval | None:
    found = m.cost.get("latency_ms")
    return Interval(found["median"], found["low"], found["high"]) if found else None
