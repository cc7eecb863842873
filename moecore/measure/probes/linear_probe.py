"""What a frozen model's features tell of a target: a linear head fitted anew (linear probe).

Alain & Bengio (2016), arXiv 1610.01644.

N images, F features.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from moecore.core.files import UserError
from moecore.nn.backbones.base_model import Model
from moecore.nn.predict import BATCH, predict_in_batches

if TYPE_CHECKING:
    from sklearn.pipeline import Pipeline

PENALTIES = (1e-3, 1e-2, 1e-1, 1.0, 10.0)  # per image; beside features of deviation 1


def predict_with_features(
    model: Model, images: np.ndarray | Tensor, batch: int = BATCH
) -> tuple[np.ndarray, np.ndarray]:
    """Predictions (N,) of one number per image, and what ``model.head`` reads, (N, F); both fp64.

    images and batch: as ``predict_in_batches`` takes them; the model is left as it was.
    """
    read: list[Tensor] = []
    hook = model.head.register_forward_pre_hook(
        lambda head, given: read.append(given[0].detach().cpu())
    )
    try:
        predicted, _ = predict_in_batches(model, images, batch, routing=False)
    finally:
        hook.remove()
    return predicted[:, 0].double().numpy(), torch.cat(read).double().numpy()


def fit_ridge_probe(
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
