"""What a model of age, and a linear probe of it, say of volumes with one tissue left.

N volumes, F features that the model's head reads; ages in years.
"""

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from moecore.data.prepared import SPLITS, Prepared, evenly_spaced_indices
from moecore.measure.probes.linear_probe import fit_ridge_probe, predict_with_features
from moecore.nn.backbones.base_model import Model
from moecore.statistics.intervals import Interval, bootstrap_mean
from moecore.training.single_tissue_volumes import keep_only_tissue

ORDER = ("csf", "gm", "wm")  # by how much a tissue's shape tells of age


class ModelAndProbeErrors(NamedTuple):
    """Absolute errors on the test volumes, (N,), of the model as it is and of a probe for these."""

    raw: np.ndarray
    probe: np.ndarray


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
        raw=np.abs(test.predicted - test.ages),
        probe=np.abs(probe.predict(test.features) - test.ages),
    )


def tissue_error_differences(
    tissues: Mapping[str, ModelAndProbeErrors], people: np.ndarray | None = None
) -> dict[tuple[str, str], Interval]:
    """Return (a tissue, the one before it) → by how much the probe errs more on the first, paired
    over the volumes; {} where a tissue is missing.
    """
    if any(name not in tissues for name in ORDER):
        return {}
    return {
        (more, less): bootstrap_mean(
            tissues[more].probe - tissues[less].probe, lowest=-math.inf, people=people
        )
        for less, more in pairwise(ORDER)
    }
