"""A ramp of growing noise: each image along one fixed direction of its own (PRC, figure 1).

N images, S + 1 points of a ramp (the first is the clean image), K classes.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from moecore.core.config import Config
from moecore.data.corruptions.draws import with_noise
from moecore.measure.base import Estimate
from moecore.measure.noisy.noise import ramp_steps, true_probability
from moecore.nn.backbones.model import Model
from moecore.nn.predict import predictions
from moecore.statistics.crossed import kept_items
from moecore.statistics.intervals import bootstrap_mean

CHUNK = 16  # images whose ramps are in memory at once; fixed, so that no result depends on `batch`


class Curve(Config):
    """One image along its ramp, from the clean image to ``sigma_max``."""

    index: int  # in the test split
    label: int
    probability: tuple[float, ...]  # of the label
    predicted: tuple[int, ...]


class Ramp(Config):
    """What happens along the ramps of growing noise: means over the images, and a few of them."""

    sigmas: tuple[float, ...]
    threshold: float  # above which a step is a jump
    class_changes: Estimate
    jumps_mean: Estimate
    jumps_items: str | None = None  # of each image, as ``kept_items`` packs them
    total_variation: Estimate
    largest_step: Estimate
    mean_probability: tuple[float, ...]
    score: tuple[float, ...]
    shown: tuple[Curve, ...]


def ramp_probs(
    model: Model, images: np.ndarray, drawn: Tensor, sigmas: Sequence[float], batch: int
) -> Tensor:
    """Class probabilities (N, S + 1, K) fp64 of every image at every sigma along its direction.

    images: uint8 (N, C, H, W); drawn: (N, C, H, W), the directions.
    """
    found = []
    for start in range(0, len(images), CHUNK):
        chunk = slice(start, start + CHUNK)
        pixels = torch.stack(
            [with_noise(images[chunk], drawn[chunk], sigma) for sigma in sigmas], dim=1
        )
        logits, _ = predictions(model, pixels.flatten(0, 1), batch, routing=False)
        found.append(logits.double().softmax(-1).unflatten(0, pixels.shape[:2]))
    return torch.cat(found)


def ramp(
    probs: Tensor,
    labels: Tensor,
    where: np.ndarray,
    sigmas: Sequence[float],
    threshold: float,
    shown: Sequence[int] | np.ndarray,
) -> Ramp:
    """Means over the images of what happens along their ramps, and the curves of those ``shown``.

    probs: (N, S + 1, K); labels: (N,); where: the images' places in the split.
    """
    steps = ramp_steps(probs, labels, threshold)
    true = true_probability(probs, labels)
    predicted = probs.argmax(-1)
    curves = [
        Curve(
            index=int(where[i]),
            label=int(labels[i]),
            probability=true[i].tolist(),
            predicted=predicted[i].tolist(),
        )
        for i in shown
    ]
    return Ramp(
        sigmas=sigmas,
        threshold=threshold,
        class_changes=_mean(steps.class_changes),
        jumps_mean=_mean(steps.jumps),
        jumps_items=kept_items(steps.jumps.double().numpy()),
        total_variation=_mean(steps.total_variation),
        largest_step=_mean(steps.largest_step),
        mean_probability=true.mean(0).tolist(),
        score=(predicted == labels[:, None]).double().mean(0).tolist(),
        shown=curves,
    )


def _mean(values: Tensor) -> Estimate:
    return Estimate.of(bootstrap_mean(values.double().numpy()))
