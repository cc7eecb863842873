"""Does the routing stay where it is when the image is moved a little? MoGE's table 1 (IMED) and the maps of its figure 2.

    python -m stages.invariance <phase> <method> <seed>
"""

import base64
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from moecore.artifacts import load_model
from moecore.config import Config
from moecore.data.prepared import spread
from moecore.data.transforms import TRANSFORMS, drawn_affines, transformed
from moecore.evaluation.class_maps import class_maps
from moecore.evaluation.imed import mean_imed
from moecore.evaluation.intervals import Interval, bootstrap_mean
from moecore.evaluation.multi_label import per_label
from moecore.evaluation.predict import predictions
from moecore.expert_map import map_shape
from moecore.kept import Kept, resumable
from moecore.params import read
from moecore.records import RoutingRecord
from moecore.routers import Router
from moecore.refusals import flat_images_with_classes
from moecore.selection import Phase
from moecore.stage import run_stage
from moecore.training.runtime import tune


NOTES = {  # by kind of router: where the distances do not tell what decides
    "hash": "a fixed hash chooses, so that neighbours on the map mean nothing; a hash of the position never moves",
    "teacher_routed": "the probs are the student's own, but the teacher's router decides",
    "expert_choice": "the probs are each token's own, but experts choose among all tokens of the image",
    "soft_slots": "an expert's probability is the sum of its slots' weights, and every token reaches every expert",
}


class Invariance(Config):
    """Which test images are moved, and how the movements are drawn."""

    images: int | None = Field(2000, ge=1, description="Test images, evenly spread over the split; null takes all.")
    batch: int = Field(256, ge=1, description="Images a forward pass; no result depends on it.")
    seed: int = Field(0, ge=0, description="Draws the movements, the same for every model.")


class Params(Config):
    invariance: Invariance


def moved(images: np.ndarray, affines: Tensor, batch: int) -> Tensor:
    """Images uint8 (N, C, H, W) under affines (N, 3, 3); made on the CPU, so the same on every device."""
    parts = (slice(start, start + batch) for start in range(0, len(images), batch))
    return torch.cat([transformed(torch.from_numpy(images[part]), affines[part]) for part in parts])


def probs(records: tuple[RoutingRecord, ...]) -> tuple[Tensor, ...]:
    return tuple(layer.probs for layer in records)


def mean_of(values: Tensor) -> Interval:
    """Mean of one value an image, (N,), with its 95 % interval."""
    return bootstrap_mean(values.numpy())


def distances(
    model: nn.Module, images: np.ndarray, clean: tuple[Tensor, ...], affines: Mapping[str, Tensor], batch: int, kept: Kept
) -> list[dict[str, Any]]:
    """One row a transform: its name, and the mean distance d, and d², of the routing of an image from that of the moved image."""

    def row(name: str) -> dict[str, Any]:
        _, after = predictions(model, moved(images, affines[name], batch), batch)
        d, d2 = (mean_of(values) for values in mean_imed(clean, probs(after)))
        return {"name": name, "d": d.value, "d_low": d.low, "d_high": d.high, "d2": d2.value, "d2_low": d2.low, "d2_high": d2.high}

    return [kept.part(name, lambda name=name: row(name)) for name in affines]


def key(name: str) -> str:
    """A transform's name in a table of metrics: "translation (0, 0.1)" → translation_0_0_1."""
    return re.sub(r"\W+", "_", name).strip("_")


def note(router: Router) -> dict[str, str]:
    """How the distances of such a router are to be read, as ``{"note": text}``; {} where its probs decide."""
    decides = router.kind == "teacher_routed" and router.inference == "student"
    return {"note": NOTES[router.kind]} if router.kind in NOTES and not decides else {}


def stored(affines: Mapping[str, Tensor]) -> dict[str, str]:
    """The first two rows of every affine, fp64 (N, 2, 3) little-endian, as base64."""
    return {name: base64.b64encode(drawn[:, :2].numpy().astype("<f8").tobytes()).decode() for name, drawn in affines.items()}


def invariance(phase: Phase, method: str, seed: int) -> None:
    params = read(Params)
    settings, data = params.invariance, flat_images_with_classes(Path("artifacts/data") / phase, "invariance")
    where = spread(len(data.test.labels), settings.images)
    images, labels = data.test.images[where], torch.from_numpy(data.test.labels[where])
    classes = data.card["classes"]
    with resumable("invariance", params, __file__, phase, method, seed) as (run, kept):
        model = load_model(Path("artifacts") / phase / method / str(seed)).to(tune().device)
        found: dict[str, Any] = {"images": len(images), "transforms": []}
        _, clean = predictions(model, images, settings.batch)
        if clean:  # a dense model has no routing to move
            affines = {name: drawn_affines(name, len(images), images.shape[-2:], settings.seed) for name in TRANSFORMS}
            moves = distances(model, images, probs(clean), affines, settings.batch, kept)
            maps = class_maps(*per_label(clean, labels), len(classes))
            run.table("imed", moves)
            run.draw("expert_maps", {f"MoE {layer + 1}": maps[:, layer].tolist() for layer in range(maps.shape[1])}, classes)
            grid = map_shape(maps.shape[-1])
            found |= {measure: {key(row["name"]): row[measure] for row in moves} for measure in ("d", "d2")}
            found |= {"transforms": moves, "grid": list(grid), "classes": classes, "class_maps": maps, "affines": stored(affines)}
            found |= note(model.moe.router)
        run.summary(found)


if __name__ == "__main__":
    run_stage(invariance)
