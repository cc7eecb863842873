"""Linear probes: new linear heads on a frozen model's F features (Alain & Bengio, 2016)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from moecore.core.files import UserError
from moecore.data.prepared import Prepared, evenly_spaced_indices
from moecore.nn.backbones.base_model import Model
from moecore.nn.predict import BATCH, predict_in_batches
from moecore.statistics.intervals import Interval, People, bootstrap_mean
from moecore.training.single_tissue_volumes import keep_only_tissue

if TYPE_CHECKING:
    from sklearn.pipeline import Pipeline

PENALTIES = (1e-3, 1e-2, 1e-1, 1.0, 10.0)  # per image; features have standard deviation 1
TISSUE_ORDER = ("csf", "gm", "wm")  # by how much the tissue's shape tells about age, most first


def predict_and_capture_features(
    model: Model, images: np.ndarray | Tensor, batch: int = BATCH
) -> tuple[np.ndarray, np.ndarray]:
    """Return a regression model's predictions (N,), and its head's inputs (N, F); both fp64."""
    features: list[Tensor] = []
    hook = model.head.register_forward_pre_hook(
        lambda head, inputs: features.append(inputs[0].detach().cpu())
    )
    try:
        predicted, _ = predict_in_batches(model, images, batch, routing=False)
    finally:
        hook.remove()
    return predicted[:, 0].double().numpy(), torch.cat(features).double().numpy()


def fit_ridge_probe(
    train: tuple[np.ndarray, np.ndarray], validation: tuple[np.ndarray, np.ndarray]
) -> tuple[Pipeline, float]:
    """Fit a ridge on standardised features (N, F) and targets (N,); return it and its penalty."""
    # The penalty has the smallest mean absolute error on ``validation``; in a tie the largest.
    # Imported here, as sklearn is slow to import and all stages import the measurements.
    from sklearn.linear_model import Ridge
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    if not all(np.isfinite(part).all() for part in (*train, *validation)):
        raise UserError("linear probe: a feature or a target is not a finite number")
    fitted = {
        penalty: make_pipeline(StandardScaler(), Ridge(alpha=penalty * len(train[1]))).fit(*train)
        for penalty in PENALTIES
    }
    errors = {
        penalty: float(np.abs(model.predict(validation[0]) - validation[1]).mean())
        for penalty, model in fitted.items()
    }
    best = min(sorted(errors, reverse=True), key=errors.__getitem__)
    return fitted[best], best


class ModelAndProbeErrors(NamedTuple):
    raw: np.ndarray  # (N,), |error| of the model on test volumes, years
    probe: np.ndarray  # (N,), of a linear probe


class VolumePredictions(NamedTuple):
    predicted: np.ndarray  # (N,)
    features: np.ndarray  # (N, F), inputs of the head
    ages: np.ndarray  # (N,), the true ones


def predict_volumes(
    model: Model, data: Prepared, split: str, region: int | None, batch: int, count: int | None
) -> VolumePredictions:
    """Predict ages of ``count`` volumes (None: all), with only the tissue ``region`` if given."""
    volumes = getattr(data, split).images
    ages = np.array(getattr(data, split).labels, np.float64)
    chosen = evenly_spaced_indices(len(ages), count)
    chunks = []
    for start in range(0, len(chosen), batch):
        indices = chosen[start : start + batch]
        images = torch.from_numpy(volumes[indices])
        if region is not None:
            share = torch.from_numpy(data.regions(split)[indices, region])
            images = keep_only_tissue(images, share)
        chunks.append(predict_and_capture_features(model, images, batch))
    predicted, features = (np.concatenate(column) for column in zip(*chunks, strict=True))
    return VolumePredictions(predicted, features, ages[chosen])


def model_and_probe_errors(
    model: Model, data: Prepared, region: int | None, batch: int, count: int | None
) -> ModelAndProbeErrors:
    """Return absolute errors in years of the model and of a linear probe on the test volumes."""
    # region: index of the only tissue that remains in all volumes, None for complete volumes;
    # count: training volumes that the probe is fitted to, None for all.
    train = predict_volumes(model, data, "train", region, batch, count)
    validation = predict_volumes(model, data, "validation", region, batch, None)
    test = predict_volumes(model, data, "test", region, batch, None)
    probe, _ = fit_ridge_probe((train.features, train.ages), (validation.features, validation.ages))
    return ModelAndProbeErrors(
        raw=np.abs(test.predicted - test.ages),
        probe=np.abs(probe.predict(test.features) - test.ages),
    )


def compare_probe_errors_of_tissues(
    tissues: Mapping[str, ModelAndProbeErrors], people: People = None
) -> dict[tuple[str, str], Interval]:
    """Return (b, a) → probe error, tissue b − a, b next after a in TISSUE_ORDER; {} without all."""
    if any(name not in tissues for name in TISSUE_ORDER):
        return {}
    changes = {(b, a): tissues[b].probe - tissues[a].probe for a, b in pairwise(TISSUE_ORDER)}
    mean = partial(bootstrap_mean, lowest=-math.inf, people=people)
    return {pair: mean(change) for pair, change in changes.items()}
