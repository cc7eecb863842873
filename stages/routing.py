"""Who decides which expert sees a token, and how steadily: load, entropy, confidence, agreement with the teacher, overlays.

    python -m stages.routing <phase> <method> <seed>
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from moecore.artifacts import load_model
from moecore.config import Config
from moecore.data.prepared import Prepared
from moecore.evaluation.overlays import overlays
from moecore.evaluation.predict import batches, predictions
from moecore.evaluation.routing import agreement, confidence, expert_counts, load_cv2, normalised_entropy
from moecore.history import record
from moecore.params import read
from moecore.records import RoutingRecord
from moecore.selection import Phase
from moecore.stage import run_stage
from moecore.teachers.guide import load_guide
from moecore.training.runtime import tune


class Routing(Config):
    """Which test images the routing is measured on."""

    images: int = Field(2000, ge=1, description="Test images, evenly spread over the split; the same for every method.")
    batch: int = Field(256, ge=1, description="Images a forward pass; no result depends on it.")
    overlays: int = Field(4, ge=0, le=16, description="Test images whose patches are shown with their experts.")


class Params(Config):
    routing: Routing


def measure(layer: RoutingRecord) -> dict[str, Any]:
    """The metrics of one MoE layer: share of the choices per expert, its CV² and entropy, and the router's confidence."""
    counts = expert_counts(layer.chosen)
    load = (counts.double() / counts.sum()).tolist()
    return {"load": load, "load_cv2": load_cv2(counts), "entropy": normalised_entropy(counts), "confidence": confidence(layer.probs)}


def teacher_probs(folder: Path, images: np.ndarray, batch: int, device: str) -> list[Tensor]:
    """The teacher's router on the images, (N, T, E) per MoE layer; [] for a method that has no teacher."""
    guide = load_guide(folder)
    if guide is None:
        return []
    parts = [tuple(probs.cpu() for probs in guide.to(device)(pixels).probs) for pixels in batches(images, batch, device)]
    return [torch.cat(layer) for layer in zip(*parts, strict=True)]


def means(layers: list[dict[str, Any]], names: tuple[str, ...]) -> dict[str, float]:
    """Means over the MoE layers of whatever they have; {} for a dense model."""
    return {name: sum(layer[name] for layer in layers) / len(layers) for name in names if layers and name in layers[0]}


def spread(total: int, number: int) -> np.ndarray:
    """``number`` indices evenly spread over ``total``, so that a set sorted by class gives every class; all where there are fewer."""
    return np.unique(np.linspace(0, total - 1, min(number, total)).astype(int))


def shown(images: np.ndarray, records: tuple[RoutingRecord, ...], number: int) -> dict[str, Any]:
    """Images with their patches' experts, evenly spread over all."""
    where = spread(len(images), number)
    return overlays(images[where], tuple(RoutingRecord(*(field[where] for field in layer)) for layer in records))


def routing(phase: Phase, method: str, seed: int) -> None:
    params = read(Params)
    settings, device = params.routing, tune().device
    images = Prepared.open(Path("artifacts/data") / phase).test.images
    images = images[spread(len(images), settings.images)]
    with record("routing", params, phase=phase, method=method, seed=seed) as run:
        _, records = predictions(load_model(Path("artifacts") / phase / method / str(seed)).to(device), images, settings.batch)
        layers = [measure(layer) for layer in records]
        if phase == "pretrain":  # the teacher's images are those of the pretraining
            teacher = teacher_probs(Path("artifacts/teacher_router") / method, images, settings.batch, device)
            for layer, ours, theirs in zip(layers, records, teacher, strict=True) if teacher else ():
                layer["teacher_agreement"] = agreement(ours.probs, theirs)
        patches = shown(images, records, settings.overlays)
        if layers:
            run.draw("expert_load", [layer["load"] for layer in layers])
        if layers and settings.overlays:
            run.draw("expert_overlays", patches)
        run.summary({"images": len(images), **means(layers, ("load_cv2", "entropy", "teacher_agreement")), "layers": layers, "overlays": patches})


if __name__ == "__main__":
    run_stage(routing)
