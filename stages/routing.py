"""Who decides which expert sees a token, and how steadily: load, entropy, confidence, agreement with the teacher, overlays.

    python -m stages.routing <phase> <method> <seed>
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from moecore.artifacts import guide_folder, load_guide, load_model
from moecore.config import Config
from moecore.correspondence import match_tokens, paired
from moecore.data.loader import generator_for
from moecore.data.prepared import Prepared, spread
from moecore.data.views import Crop, ViewSettings, make_views
from moecore.evaluation.consistency import match_ratios
from moecore.evaluation.eligibility import below_k_rate, fallback_rate, tail_mass
from moecore.evaluation.overlays import overlays
from moecore.evaluation.predict import batches, predictions
from moecore.evaluation.routing import agreement, confidence, expert_counts, load_cv2, normalised_entropy, token_entropy
from moecore.history import record
from moecore.params import read
from moecore.records import RoutingRecord
from moecore.selection import Phase
from moecore.stage import run_stage
from moecore.training.runtime import tune


MEANS = (
    "load_cv2", "entropy", "teacher_agreement", "token_entropy", "confidence_highest", "match_top1", "match_top2_ordered", "match_top2_sets",
    "fallback", "below_k", "tail_mass",
)  # fmt: skip


class Routing(Config):
    """Which test images the routing is measured on."""

    images: int = Field(2000, ge=1, description="Test images, evenly spread over the split; the same for every method.")
    batch: int = Field(256, ge=1, description="Images a forward pass; no result depends on it.")
    overlays: int = Field(4, ge=0, le=16, description="Test images whose patches are shown with their experts.")
    views: ViewSettings = Field(
        ViewSettings(crop=Crop(), flip=True), description="Two random views of each image; their corresponding patches are compared (PRC, table 4)."
    )
    seed: int = Field(0, ge=0, description="Of those views; every method sees the same ones.")


class Params(Config):
    routing: Routing


def measure(layer: RoutingRecord, threshold: float | None, k: int) -> dict[str, Any]:
    """The metrics of one MoE layer: share of the choices per expert, its CV² and entropy, the router's confidence, and who is eligible."""
    counts, sure = expert_counts(layer.chosen), confidence(layer.probs)
    values = {
        "load": (counts.double() / counts.sum()).tolist(), "load_cv2": load_cv2(counts), "entropy": normalised_entropy(counts),
        "confidence": sure, "confidence_highest": sure.highest, "token_entropy": token_entropy(layer.probs),
    }  # fmt: skip
    if threshold is None:
        return values
    scores = layer.logits
    eligible = {"fallback": fallback_rate(scores, threshold), "below_k": below_k_rate(scores, threshold, k), "tail_mass": tail_mass(scores, threshold, k)}
    return values | {name: value for name, value in eligible.items() if value is not None}


def matches(model: nn.Module, images: np.ndarray, settings: Routing) -> list[dict[str, float]]:
    """How often the experts of corresponding patches in two views of an image agree, per MoE layer (PRC, table 4)."""
    made = [[], []]
    for start in range(0, len(images), 100):  # of fixed size: no result may depend on settings.batch
        part = torch.from_numpy(np.array(images[start : start + 100]))
        for number, views in enumerate(made):
            views.append(make_views(part, settings.views, generator_for(settings.seed, start, number)))
    pixels = torch.cat([view.images for views in made for view in views])
    affines = torch.cat([view.affines for views in made for view in views])
    _, records = predictions(model, pixels, settings.batch)
    found = [match_ratios(*paired(record.probs, affines, model.layout, False)) for record in records]
    return [{f"match_{name}": value for name, value in ratios._asdict().items()} for ratios in found]


def teacher_probs(folder: Path, images: np.ndarray, batch: int, device: str) -> list[Tensor]:
    """The teacher's router on the images, (N, T, E) per MoE layer; [] for a method that has no teacher."""
    guide = load_guide(folder)
    if guide is None or not guide.blocks:
        return []
    parts = [tuple(probs.cpu() for probs in guide.to(device)(pixels).probs) for pixels in batches(images, batch, device)]
    return [torch.cat(layer) for layer in zip(*parts, strict=True)]


def means(layers: list[dict[str, Any]], names: tuple[str, ...]) -> dict[str, float]:
    """Means over the MoE layers of whatever they have; {} for a dense model."""
    there = [name for name in names if layers and all(name in layer for layer in layers)]
    return {name: sum(layer[name] for layer in layers) / len(layers) for name in there}


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
        model = load_model(Path("artifacts") / phase / method / str(seed)).to(device)
        _, records = predictions(model, images, settings.batch)
        router = None if model.moe is None else model.moe.router
        layers = [measure(layer, getattr(router, "threshold", None), getattr(router, "k", 0)) for layer in records]
        for layer, found in zip(layers, matches(model, images, settings) if layers else (), strict=True):
            layer.update(found)
        if phase == "pretrain":  # the teacher's images are those of the pretraining
            teacher = teacher_probs(guide_folder(method, seed), images, settings.batch, device)
            for layer, ours, theirs in zip(layers, records, teacher, strict=True) if teacher else ():
                layer["teacher_agreement"] = agreement(ours.probs, match_tokens(theirs, ours.probs.shape))
        patches = shown(images, records, settings.overlays)
        if layers:
            run.draw("expert_load", [layer["load"] for layer in layers])
        if layers and settings.overlays:
            run.draw("expert_overlays", patches)
        run.summary({"images": len(images), **means(layers, MEANS), "layers": layers, "overlays": patches})


if __name__ == "__main__":
    run_stage(routing)
