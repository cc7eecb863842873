"""What a model of age, and a linear probe of it, say of volumes with one tissue left.

The probe is a linear head fitted anew to what a frozen model's features tell of a target (Alain &
Bengio 2016, arXiv 1610.01644).

N volumes, F features that the model's head reads; ages in years.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from moecore.core.config import Config
from moecore.core.files import UserError
from moecore.data.prepared import SPLITS, Prepared, evenly_spread
from moecore.data.volumes.isolate import isolate
from moecore.nn.backbones.model import Model
from moecore.nn.predict import predictions
from moecore.statistics.intervals import bootstrap_mean

if TYPE_CHECKING:
    from sklearn.pipeline import Pipeline

ORDER = ("csf", "gm", "wm")  # by how much a tissue's shape tells of age
PENALTIES = (1e-3, 1e-2, 1e-1, 1.0, 10.0)  # per image; beside features of deviation 1


class VolumeErrors(Config):
    """Absolute errors on the test volumes, of the model as it is and of a probe for these."""

    penalty: float  # of the probe
    raw: tuple[float, ...]
    probe: tuple[float, ...]


class TissueErrors(Config):
    """The means of ``VolumeErrors``, with 95 % limits."""

    mae: float
    low: float | None
    high: float | None
    probe_mae: float
    probe_low: float | None
    probe_high: float | None
    penalty: float


class Order(Config):
    """By how much the probe errs more on one tissue than on the next, paired over the volumes."""

    less: str
    more: str
    difference: float
    low: float | None
    high: float | None


class Seen(NamedTuple):
    """What a model says of volumes: ages (N,), what its head read (N, F), true ages (N,)."""

    predicted: np.ndarray
    features: np.ndarray
    ages: np.ndarray


def seen(
    model: Model,
    data: Prepared,
    split: str,
    region: int | None,
    batch: int,
    count: int | None = None,
) -> Seen:
    """``Seen`` of a split's volumes, whole or with one tissue left, each voxel by its share of it.

    count: volumes, evenly spread over the split; None for all.
    """
    volumes = getattr(data, split).images
    ages = np.array(getattr(data, split).labels, np.float64)
    chosen = evenly_spread(len(ages), count)
    if region is None:
        regions = None
    else:
        regions = data.regions(split)
    found = []
    for start in range(0, len(chosen), batch):
        places = chosen[start : start + batch]
        if regions is None:
            found.append(read_by_head(model, volumes[places], batch))
            continue
        whole = torch.from_numpy(np.array(volumes[places]))
        share = torch.from_numpy(np.array(regions[places, region]))
        found.append(read_by_head(model, isolate(whole, share), batch))
    predicted, features = (np.concatenate(column) for column in zip(*found, strict=True))
    return Seen(predicted, features, ages[chosen])


def errors_of(
    model: Model, data: Prepared, region: int | None, batch: int, count: int | None = None
) -> VolumeErrors:
    """Errors on the test split, and of a probe fitted on ``count`` training volumes (None: all)."""
    train, validation, test = (
        seen(model, data, split, region, batch, count if split == "train" else None)
        for split in SPLITS
    )
    probe, penalty = linear_probe(
        (train.features, train.ages), (validation.features, validation.ages)
    )
    return VolumeErrors(
        penalty=penalty,
        raw=np.abs(test.predicted - test.ages).tolist(),
        probe=np.abs(probe.predict(test.features) - test.ages).tolist(),
    )


def summed(found: VolumeErrors, resamples: int) -> TissueErrors:
    """The means with their intervals."""
    raw = bootstrap_mean(np.array(found.raw), resamples)
    probe = bootstrap_mean(np.array(found.probe), resamples)
    return TissueErrors(
        mae=raw.value,
        low=raw.low,
        high=raw.high,
        probe_mae=probe.value,
        probe_low=probe.low,
        probe_high=probe.high,
        penalty=found.penalty,
    )


def order_of(tissues: Mapping[str, VolumeErrors], resamples: int) -> tuple[Order, ...] | None:
    """How much more the probe errs on one tissue than on the next; None where one is missing."""
    if any(name not in tissues for name in ORDER):
        return None
    rows = []
    for less, more in pairwise(ORDER):
        apart = np.array(tissues[more].probe) - np.array(tissues[less].probe)
        found = bootstrap_mean(apart, resamples, lowest=-math.inf)
        rows.append(
            Order(less=less, more=more, difference=found.value, low=found.low, high=found.high)
        )
    return tuple(rows)


def read_by_head(
    model: Model, images: np.ndarray | Tensor, batch: int
) -> tuple[np.ndarray, np.ndarray]:
    """Predictions (N,) of one number an image, and what ``model.head`` reads, (N, F); both fp64.

    images and batch: as ``predictions`` takes them; the model is left as it was.
    """
    read: list[Tensor] = []
    hook = model.head.register_forward_pre_hook(
        lambda head, given: read.append(given[0].detach().cpu())
    )
    try:
        predicted, _ = predictions(model, images, batch, routing=False)
    finally:
        hook.remove()
    return predicted[:, 0].double().numpy(), torch.cat(read).double().numpy()


def linear_probe(
    train: tuple[np.ndarray, np.ndarray], validation: tuple[np.ndarray, np.ndarray]
) -> tuple[Pipeline, float]:
    """Ridge regression fitted on ``train``, features (N, F) and targets (N,), and its penalty.

    The penalty is that of the least mean absolute error on ``validation``, the greatest of equal
    ones. Features are standardised by the training split.  Raises UserError for numbers that are
    not finite.
    """
    # Here: sklearn takes a second, and all stages import the table of measurements.
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
