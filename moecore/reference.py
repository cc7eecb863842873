"""What the training volumes were like, so that a new volume that is unlike them can be flagged.

A model says something about any array of the right shape. Its error is known only for volumes like those that it was tested on.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moecore.data.prepared import Prepared

QUANTITIES = {
    "intensity_mean": "mean intensity in the brain", "intensity_std": "spread of the intensity in the brain", "brain_ml": "brain volume in mL",
}  # fmt: skip


def described(volume: np.ndarray, voxel_mm: Sequence[float]) -> dict[str, float]:
    """The quantities of a prepared volume (1, D, H, W) in [0, 1], background exactly 0: mean and spread inside the brain, and its volume in mL."""
    inside = volume[volume > 0].astype(np.float64)
    size = inside.size * float(np.prod(voxel_mm)) / 1000
    return {"intensity_mean": float(inside.mean()) if inside.size else 0.0, "intensity_std": float(inside.std()) if inside.size else 0.0, "brain_ml": size}


def reference_of(data: Prepared) -> dict[str, Any]:
    """The range of each quantity over the training volumes, and the facts of the card that new volumes need to be prepared alike."""
    card = data.card
    found = [described(volume, card["voxel_mm"]) for volume in data.train.images]
    ranges = {name: {"low": min(row[name] for row in found), "high": max(row[name] for row in found)} for name in QUANTITIES}
    kept = ("name", "kind", "simulated", "target", "unit", "size", "voxel_mm", "target_range", "regions", "settings", "licence", "source")
    sites = sorted({row["site"] for row in data.subjects("train") if row["site"]})
    return {"volumes": len(found), "ranges": ranges, "sites": sites, "data": {name: card[name] for name in kept}}


def unlike(volume: np.ndarray, reference: Mapping[str, Any]) -> list[str]:
    """One flag for each quantity of a prepared volume that lies outside the range of the training volumes; [] where all lie inside."""
    found = described(volume, reference["data"]["voxel_mm"])
    return [
        f"{name} {found[name]:.4g} outside training {limits['low']:.4g} to {limits['high']:.4g}"
        for name, limits in reference["ranges"].items()
        if not limits["low"] <= found[name] <= limits["high"]
    ]


def beyond_ages(predicted: float, age: float | None, reference: Mapping[str, Any]) -> list[str]:
    """Flags where the prediction or the known age lies outside the ages of training."""
    low, high = reference["data"]["target_range"]
    values = {"predicted age": predicted, "age": age}
    return [f"{name} {value:.1f} outside training {low:.1f} to {high:.1f}" for name, value in values.items() if value is not None and not low <= value <= high]
