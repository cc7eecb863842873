"""Who decides which expert sees a token, and how steadily: load, entropy, confidence, agreement with the teacher, matches, sweeps, overlays.

    python -m stages.routing <phase> <method> <seed>
"""

from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from moecore.artifacts import guide_folder, load_guide, load_model
from moecore.augmentations import Augmentation, Preset, chance, layer_matches, measured, resolved, two_views
from moecore.config import Config
from moecore.correspondence import match_tokens, token_pairs
from moecore.data.prepared import Prepared, spread
from moecore.data.views import Crop, ViewSettings
from moecore.evaluation.eligibility import below_k_rate, fallback_rate, tail_mass, tail_of_probs, unchosen_mass
from moecore.evaluation.overlays import mid_slices, overlays
from moecore.evaluation.predict import batches, predictions
from moecore.evaluation.routing import agreement, confidence, expert_counts, load_cv2, normalised_entropy, token_entropy
from moecore.kept import Kept, resumable
from moecore.params import read
from moecore.records import Layout, RoutingRecord
from moecore.selection import Phase
from moecore.stage import run_stage
from moecore.sweeps import Sweeps, sweep
from moecore.training.runtime import tune


MEANS = (
    "load_cv2", "entropy", "processed_load_cv2", "processed_entropy", "processed_share", "experts_per_token", "teacher_agreement", "token_entropy",
    "confidence_highest", "match_top1", "match_top2_ordered", "match_top2_sets", "independent_top1", "chosen_iou", "chance_iou",
    "fallback", "below_k", "tail_mass", "tail_of_probs", "unchosen_mass",
)  # fmt: skip
PRESETS: tuple[Preset, ...] = ("noise", "shift", "flip", "crop", "rotation", "affine", "brightness", "contrast", "randaugment")


class Routing(Config):
    """Which test images the routing is measured on, and what is done to them and to the router."""

    images: int = Field(2000, ge=1, description="Test images, evenly spread over the split; the same for every method.")
    batch: int = Field(256, ge=1, description="Images a forward pass; no result depends on it.")
    overlays: int = Field(4, ge=0, le=16, description="Test images whose patches are shown with their experts.")
    views: ViewSettings = Field(
        ViewSettings(crop=Crop(), flip=True), description="Two random views of each image; their corresponding patches are compared (PRC, table 4)."
    )
    augmentations: tuple[Preset | Augmentation, ...] = Field(PRESETS, description="As views, kind by kind: presets, or {name, views, noise}.")
    augmentation_images: int = Field(200, ge=1, description="Of those images, evenly spread, how many are shown under each of the augmentations.")
    sweeps: Sweeps = Field(Sweeps(), description="The trained weights under other k and other thresholds (ERMoE, figures S3 and S5).")
    seed: int = Field(0, ge=0, description="Of those views; every method sees the same ones.")

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [resolved(asked).name for asked in self.augmentations]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"augmentations: {', '.join(twice)} stands there twice; each name is allowed once")
        return self


class Params(Config):
    routing: Routing


def measure(layer: RoutingRecord, threshold: float | None, k: int | None) -> dict[str, Any]:
    """The metrics of one MoE layer: share of the choices per expert, its CV² and entropy, the router's confidence, and who is eligible.

    ``load…`` and ``entropy`` tell of the experts chosen, ``processed…`` of those that had a weight: under capacity or pruning they may differ.
    """
    counts, used, sure = expert_counts(layer.chosen), expert_counts(layer.combine != 0), confidence(layer.probs)
    values = {
        "load": (counts.double() / counts.sum()).tolist(), "load_cv2": load_cv2(counts), "entropy": normalised_entropy(counts),
        "processed_load_cv2": load_cv2(used), "processed_entropy": normalised_entropy(used), "processed_share": float(used.sum() / counts.sum()),
        "experts_per_token": float(counts.sum()) / layer.chosen[..., 0].numel(), "unchosen_mass": unchosen_mass(layer.probs, layer.chosen),
        "confidence": sure, "confidence_highest": sure.highest, "token_entropy": token_entropy(layer.probs),
    }  # fmt: skip
    if k is not None:
        values["tail_of_probs"] = tail_of_probs(layer.probs, k)
    if threshold is None:
        return values
    scores = layer.logits
    eligible = {"fallback": fallback_rate(scores, threshold), "below_k": below_k_rate(scores, threshold, k), "tail_mass": tail_mass(scores, threshold, k)}
    return values | {name: value for name, value in eligible.items() if value is not None}


def matches(model: nn.Module, images: np.ndarray, settings: Routing) -> list[dict[str, Any]]:
    """How often the experts of corresponding patches in two ``views`` of an image agree, per MoE layer (PRC, table 4)."""
    views = two_views(images, Augmentation(name="views", views=settings.views), settings.seed)
    _, records = predictions(model, views.images, settings.batch)
    pairs = token_pairs(views.affines, model.layout, special=False)
    found = (layer_matches(record, pairs, model.layout) for record in records)
    return [{name: value for name, value in layer.items() if name != "confidence"} for layer in found]


def augmented(model: nn.Module, images: np.ndarray, settings: Routing, kept: Kept) -> list[dict[str, Any]]:
    """The matches under each of the augmentations; an augmentation's draws do not depend on the others in the list."""
    images = images[spread(len(images), settings.augmentation_images)]

    def row(asked: Augmentation) -> dict[str, Any]:
        views = two_views(images, asked, settings.seed, *asked.name.encode())
        return {"name": asked.name, **measured(model, views, settings.batch)}

    chosen = [resolved(preset, images.ndim == 5) for preset in settings.augmentations]
    return [kept.part(f"views {asked.name}", lambda asked=asked: row(asked)) for asked in chosen]


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


def shown(images: np.ndarray, records: tuple[RoutingRecord, ...], number: int, layout: Layout) -> dict[str, Any]:
    """Images with their patches' experts, evenly spread over all; of volumes (N, C, D, H, W) the middle slices."""
    where = spread(len(images), number)
    few = tuple(RoutingRecord(*(field[where] for field in layer)) for layer in records)
    return mid_slices(images[where], few, layout) if images.ndim == 5 else overlays(images[where], few)


def tried(model: nn.Module, images: np.ndarray, labels: np.ndarray, settings: Routing) -> dict[str, Any]:
    """The sweeps, on images evenly spread over those measured."""
    where = spread(len(images), settings.sweeps.images)
    return sweep(model, images[where], torch.from_numpy(labels[where]), settings.sweeps, settings.batch)


def routing(phase: Phase, method: str, seed: int) -> None:
    params = read(Params)
    settings, device = params.routing, tune().device
    test = Prepared.open(Path("artifacts/data") / phase).test
    where = spread(len(test.images), settings.images)
    images, labels = test.images[where], test.labels[where]
    with resumable("routing", params, __file__, phase, method, seed) as (run, kept):
        model = load_model(Path("artifacts") / phase / method / str(seed)).to(device)
        _, records = predictions(model, images, settings.batch)
        router = None if model.moe is None else model.moe.router
        layers = [measure(layer, getattr(router, "threshold", None), getattr(router, "k", None)) for layer in records]
        for layer, found in zip(layers, matches(model, images, settings) if layers else (), strict=True):
            layer.update(found)
        if phase == "pretrain":  # the teacher's images are those of the pretraining
            teacher = teacher_probs(guide_folder(method, seed), images, settings.batch, device)
            for layer, ours, theirs in zip(layers, records, teacher, strict=True) if teacher else ():
                layer["teacher_agreement"] = agreement(ours.probs, match_tokens(theirs, ours.probs.shape))
        patches = shown(images, records, settings.overlays, model.layout)
        if layers:
            run.draw("expert_load", [layer["load"] for layer in layers])
        if layers and settings.overlays:
            run.draw("expert_overlays", patches)
        found = {"images": len(images), **means(layers, MEANS), "layers": layers, "overlays": patches}
        if layers:
            found["chance"] = chance(model.moe.experts.number, getattr(router, "k", None))
        found["augmentations"] = augmented(model, images, settings, kept) if layers else []
        run.summary(found | {"sweeps": kept.part("sweeps", lambda: tried(model, images, labels, settings))})


if __name__ == "__main__":
    run_stage(routing)
