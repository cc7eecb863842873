"""What a trained model costs when it is used: parameters, FLOPs, latency, memory, and the routing's part of it (ERMoE, tables S2 and S4).

    python -m stages.cost <phase> <method> <seed>
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import Field

from moecore.artifacts import load_model
from moecore.config import Config
from moecore.costs import Images, Parts, flops_per_image, peak_memory, plain_times, watched_times
from moecore.data.prepared import Prepared, spread
from moecore.evaluation.cost import Spread, spread_of
from moecore.evaluation.predict import batches
from moecore.history import record
from moecore.parameters import parameter_counts
from moecore.params import read
from moecore.selection import Phase
from moecore.stage import run_stage
from moecore.training.runtime import tune


class Cost(Config):
    """How the passes are timed. Counts do not depend on it; timings are of this machine and differ from run to run."""

    batch: int = Field(64, ge=1, description="Images of a pass for throughput and peak memory; the latency is that of one image.")
    rounds: int = Field(10, ge=2, description="Timed passes, after three that are not counted; median and quartiles are kept.")
    images: int = Field(64, ge=1, description="Test images, evenly spread over the split, that the passes go through in turn.")


class Params(Config):
    cost: Cost


def in_turn(images: np.ndarray, batch: int, device: str) -> Images:
    """Pass number n gets images n·batch, n·batch + 1, … (batch, C, …) fp32 in [0, 1], from the start again after the last."""
    pixels = torch.cat(list(batches(images, batch, device)))
    return lambda number: pixels[torch.arange(number * batch, (number + 1) * batch, device=device) % len(pixels)]


def milliseconds(seconds: Sequence[float]) -> Spread:
    return spread_of([1000 * value for value in seconds])


def measure(model: torch.nn.Module, images: np.ndarray, settings: Cost, device: str) -> dict[str, Any]:
    """All that is measured of a model on images uint8 (N, C, H, W), or volumes float16 (N, C, D, H, W)."""
    one, many = (in_turn(images, size, device) for size in (1, settings.batch))
    flops, (memory, counted) = flops_per_image(model, one(0)), peak_memory(model, many(0))
    single, whole = (milliseconds(plain_times(model, source, settings.rounds)) for source in (one, many))
    watched = {"": watched_times(model, one, settings.rounds), "_batch": watched_times(model, many, settings.rounds)}
    return {
        **parameter_counts(model), "flops_per_image": flops.whole, "routing_flops_per_image": flops.routing, "latency_ms": single._asdict(),
        "batch": settings.batch, "batch_ms": whole._asdict(), "images_per_second": 1000 * settings.batch / whole.median,
        "peak_memory_bytes": memory, "memory_counted_as": counted, **routing_parts(watched),
    }  # fmt: skip


def routing_parts(watched: dict[str, list[Parts]]) -> dict[str, float]:
    """Median milliseconds of the routing in a pass, and its median share of the pass, for one image and for a batch."""
    parts = {}
    for name, passes in watched.items():
        parts[f"routing{name}_ms"] = milliseconds([one.routing for one in passes]).median
        parts[f"routing{name}_share"] = spread_of([one.routing / one.whole for one in passes]).median
    return parts


def cost(phase: Phase, method: str, seed: int) -> None:
    params, runtime = read(Params), tune()
    images = Prepared.open(Path("artifacts/data") / phase).test.images
    images = np.array(images[spread(len(images), params.cost.images)])
    with record("cost", params, phase=phase, method=method, seed=seed) as run:
        model = load_model(Path("artifacts") / phase / method / str(seed)).to(runtime.device)
        found = measure(model, images, params.cost, runtime.device)
        run.summary({**found, "rounds": params.cost.rounds, "device": runtime.device_name, "threads": runtime.threads})


if __name__ == "__main__":
    run_stage(cost)
