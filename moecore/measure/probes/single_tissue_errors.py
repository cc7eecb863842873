"""What a model of age, and a linear probe of it, say of volumes with one tissue left.

N volumes, F features that the model's head reads; ages in years.
"""

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from moecore.core.config import Config
from moecore.data.prepared import SPLITS, Prepared, evenly_spaced_indices
from moecore.measure.probes.linear_probe import fit_ridge_probe, predict_with_features
from moecore.nn.backbones.base_model import Model
from moecore.statistics.crossed import encode_item_values
from moecore.statistics.intervals import bootstrap_mean
from moecore.training.single_tissue_volumes import keep_only_tissue

ORDER = ("csf", "gm", "wm")  # by how much a tissue's shape tells of age


class ModelAndProbeErrors(Config):
    """Absolute errors on the test volumes, of the model as it is and of a probe for these."""

    raw: tuple[float, ...]
    probe: tuple[float, ...]


class MeanAgeErrors(Config):
    """The means of ``ModelAndProbeErrors``, with 95 % limits."""

    mae: float
    low: float | None
    high: float | None
    probe_mae: float
    probe_low: float | None
    probe_high: float | None
    # Both errors, one number a person, as ``encode_item_values`` packs them.
    items: str | None = None
    probe_items: str | None = None


class TissueErrorDifference(Config):
    """By how much the probe errs more on one tissue than on the next, paired over the volumes."""

    less: str
    more: str
    difference: float
    low: float | None
    high: float | None


class VolumePredictions(NamedTuple):
    """What a model says of volumes: ages (N,), what its head read (N, F), true ages (N,)."""

    predicted: np.ndarray
    features: np.ndarray
    ages: np.ndarray


def predict_volumes(
    model: Model, data: Prepared, split: str, region: int | None, batch: int, count: int | None
) -> VolumePredictions:
    """Predict ``count`` volumes of a split (None: all), whole or with one tissue left."""
    volumes = getattr(data, split).images
    ages = np.array(getattr(data, split).labels, np.float64)
    chosen = evenly_spaced_indices(len(ages), count)
    chunks = []
    for start in range(0, len(chosen), batch):
        places = chosen[start : start + batch]
        images = torch.from_numpy(volumes[places])
        if region is not None:
            share = torch.from_numpy(data.regions(split)[places, region])
            images = keep_only_tissue(images, share)
        chunks.append(predict_with_features(model, images, batch))
    predicted, features = (np.concatenate(column) for column in zip(*chunks, strict=True))
    return VolumePredictions(predicted, features, ages[chosen])


def model_and_probe_errors(
    model: Model, data: Prepared, region: int | None, batch: int, count: int | None
) -> ModelAndProbeErrors:
    """Errors on the test split, and of a probe fitted on ``count`` training volumes (None: all)."""
    train, validation, test = (
        predict_volumes(model, data, split, region, batch, count if split == "train" else None)
        for split in SPLITS
    )
    probe, _ = fit_ridge_probe((train.features, train.ages), (validation.features, validation.ages))
    return ModelAndProbeErrors(
        raw=np.abs(test.predicted - test.ages).tolist(),
        probe=np.abs(probe.predict(test.features) - test.ages).tolist(),
    )


def summarize_errors(errors: ModelAndProbeErrors, people: np.ndarray | None) -> MeanAgeErrors:
    """The means with their intervals, over people where they are given."""
    raw = bootstrap_mean(np.array(errors.raw), people=people)
    probe = bootstrap_mean(np.array(errors.probe), people=people)
    return MeanAgeErrors(
        mae=raw.value,
        low=raw.low,
        high=raw.high,
        probe_mae=probe.value,
        probe_low=probe.low,
        probe_high=probe.high,
        items=encode_item_values(np.array(errors.raw), people),
        probe_items=encode_item_values(np.array(errors.probe), people),
    )


def tissue_error_differences(
    tissues: Mapping[str, ModelAndProbeErrors], people: np.ndarray | None = None
) -> tuple[TissueErrorDifference, ...] | None:
    """Return how much more the probe errs on one tissue than on the next, or None."""
    if any(name not in tissues for name in ORDER):
        return None
    rows = []
    for less, more in pairwise(ORDER):
        apart = np.array(tissues[more].probe) - np.array(tissues[less].probe)
        difference = bootstrap_mean(apart, lowest=-math.inf, people=people)
        rows.append(
            TissueErrorDifference(
                less=less,
                more=more,
                difference=difference.value,
                low=difference.low,
                high=difference.high,
            )
        )
    return tuple(rows)
