"""What the training volumes were like, so that a new volume that is unlike them can be flagged.

A model's error is known only for volumes like those that it was tested on.
"""

from collections.abc import Sequence

import numpy as np
from pydantic import Field

from moecore.core.config import Config
from moecore.data.prepared import Prepared
from moecore.statistics.intervals import Estimate


class QuantityRange(Config):
    """The smallest and the largest value over the training volumes."""

    low: float
    high: float


class PreparationFacts(Config):
    """The facts of the data card that new volumes need to be prepared and compared."""

    size: tuple[int, ...]
    voxel_mm: tuple[float, ...]
    target_range: tuple[float, float]


class ConformalInterval(Config):
    """The conformal interval of a single prediction."""

    level: float
    radius: float | None = Field(description="half its width, years; null: too few participants")
    n: int = Field(description="validation participants behind it")
    coverage: Estimate | None = Field(description="share of the test volumes inside")
    method: str


class TrainingCohortRanges(Config):
    """Content of ``reference.json``, beside a calibrator."""

    ranges: dict[str, QuantityRange] = Field(
        description="of each quantity over the training volumes"
    )
    sites: tuple[str, ...]
    data: PreparationFacts
    interval: ConformalInterval
    predictor_sha256: str


def describe_volume(volume: np.ndarray, voxel_mm: Sequence[float]) -> dict[str, float]:
    """The quantities of a prepared volume (1, D, H, W) in [0, 1], background exactly 0."""
    inside = volume[volume > 0].astype(np.float64)
    return {
        "intensity_mean": float(inside.mean()),
        "intensity_std": float(inside.std()),
        "brain_ml": inside.size * float(np.prod(voxel_mm)) / 1000,
    }


def collect_training_ranges(
    data: Prepared, interval: ConformalInterval, sha256: str
) -> TrainingCohortRanges:
    """The ranges over the training volumes, and the card's facts; sha256: of the weights."""
    facts = PreparationFacts(**{name: data.card[name] for name in PreparationFacts.model_fields})
    quantities = [describe_volume(volume, facts.voxel_mm) for volume in data.train.images]
    ranges = {}
    for name in quantities[0]:
        values = [one[name] for one in quantities]
        ranges[name] = QuantityRange(low=min(values), high=max(values))
    sites = sorted({row["site"] for row in data.subjects("train")} - {""})
    return TrainingCohortRanges(
        ranges=ranges, sites=sites, data=facts, interval=interval, predictor_sha256=sha256
    )


def out_of_range_flags(volume: np.ndarray, reference: TrainingCohortRanges) -> list[str]:
    """One flag for each quantity of a prepared volume that lies outside that of training."""
    quantities = describe_volume(volume, reference.data.voxel_mm)
    return [
        f"{name} {quantities[name]:.4g} outside training {limits.low:.4g} to {limits.high:.4g}"
        for name, limits in reference.ranges.items()
        if not limits.low <= quantities[name] <= limits.high
    ]


def age_range_flags(
    predicted: float, age: float | None, reference: TrainingCohortRanges
) -> list[str]:
    """Flags where the prediction or the known age lies outside the ages of training."""
    low, high = reference.data.target_range
    values = {"predicted age": predicted, "age": age}
    return [
        f"{name} {value:.1f} outside training {low:.1f} to {high:.1f}"
        for name, value in values.items()
        if value is not None and not low <= value <= high
    ]


def unknown_site_flags(site: str, reference: TrainingCohortRanges) -> list[str]:
    """A flag where a site is named that training did not have."""
    return [f"site {site} not in training"] if site and site not in reference.sites else []
