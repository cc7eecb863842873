"""How steady a model's prediction is along a ramp of noise (PRC, figure 1).

N images, S + 1 points of a ramp of growing noise (the first is the clean image), K classes.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from moecore.data.image_noise import add_noise
from moecore.measure.values import Values
from moecore.nn.backbones.base_model import Model
from moecore.nn.predict import BATCH, predict_in_batches

CHUNK = 16  # images whose ramps are in memory at once; fixed, so that no result depends on `batch`


def count_jumps(probs: Tensor, labels: Tensor, threshold: float) -> Tensor:
    """Return how many steps of the true class's probability exceed a threshold, (N,) int64.

    Between neighbouring points: a steep but continuous change also counts where it exceeds the
    threshold within one step. probs: (N, S + 1, K); labels: (N,).
    """
    steps = true_probability(probs, labels).diff(dim=1).abs()
    return (steps > threshold).sum(1)


def true_probability(probs: Tensor, labels: Tensor) -> Tensor:
    """(N, S + 1) fp64: the probability of each image's own class along its ramp."""
    index = labels[:, None, None].expand(-1, probs.shape[1], 1)
    return probs.double().gather(2, index).squeeze(2)


def class_probs_by_sigma(
    model: Model, images: np.ndarray, drawn: Tensor, sigmas: Sequence[float], batch: int = BATCH
) -> Tensor:
    """Class probabilities (N, S + 1, K) fp64 of every image at every sigma along its direction.

    images: uint8 (N, C, H, W); drawn: (N, C, H, W), the directions.
    """
    chunks = []
    for start in range(0, len(images), CHUNK):
        chunk = slice(start, start + CHUNK)
        pixels = torch.stack(
            [add_noise(images[chunk], drawn[chunk], sigma) for sigma in sigmas], dim=1
        )
        logits, _ = predict_in_batches(model, pixels.flatten(0, 1), batch, routing=False)
        chunks.append(logits.double().softmax(-1).unflatten(0, pixels.shape[:2]))
    return torch.cat(chunks)


def put_ramps(
    probs: Tensor,
    labels: Tensor,
    where: np.ndarray,
    sigmas: Sequence[float],
    threshold: float,
    shown: Sequence[int] | np.ndarray,
    out: Values,
) -> None:
    """Put the jumps along the images' ramps, and the curves of those ``shown`` as facts.

    probs: (N, S + 1, K); labels: (N,); where: the images' places in the split.
    """
    out.put("jumps", count_jumps(probs, labels, threshold))
    true = true_probability(probs, labels)
    predicted = probs.argmax(-1)
    curves = [
        {
            "index": int(where[i]),
            "label": int(labels[i]),
            "probability": true[i],
            "predicted": predicted[i],
        }
        for i in shown
    ]
    out.facts["ramp"] = {"sigmas": sigmas, "shown": curves}
