"""Base of tasks with classes, per image or per cell, and metrics: accuracy, NLL, Brier, ECE.

logits: (N, K) before the softmax; labels: (N,) in 0 … K−1, for ``top1_hits`` and ``class_nll`` also
(N, K) of 0 and 1. N images, K classes. All sums are in fp64.
"""

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from moecore.core.config import Config
from moecore.tasks.base import Score, Task, check_label_range

BINS = 15  # equal widths, as in Guo et al. (2017)


class ClassTask(Task):
    """Base of tasks with K classes; the mean score is the accuracy."""

    classes: tuple[str, ...] = Field(min_length=2, description="names, in the order of the labels")

    @property
    def outputs(self) -> int:
        return len(self.classes)

    @property
    def answers(self) -> tuple[str, ...]:
        return self.classes

    @property
    def score(self) -> Score:
        return Score("accuracy", "accuracy", "", "share", "higher")

    @property
    def history_name(self) -> str:
        return "accuracy"

    def mean_score(self, prediction: Tensor, labels: Tensor) -> float:
        return float(self.scores(prediction, labels).float().mean())

    def baseline_score(self, labels: Tensor) -> float:
        return 1 / self.outputs

    def counts(self, labels: np.ndarray) -> list[int]:
        """Return the number of images or cells per class; labels of −1 are not counted."""
        return np.bincount(labels[labels >= 0], minlength=self.outputs).tolist()

    def check(self, labels: np.ndarray, what: str) -> None:
        check_label_range(labels, self.outputs, what)


class ReliabilityBins(Config):
    """Columns of a reliability diagram, one entry per bin (low, high]; None for an empty bin."""

    low: tuple[float, ...]
    high: tuple[float, ...]
    count: tuple[int, ...]
    confidence: tuple[float | None, ...]
    accuracy: tuple[float | None, ...]


def top1_hits(logits: Tensor, labels: Tensor) -> Tensor:
    """Return whether the class with the largest logit is a label of the image, (N,) bool."""
    best = logits.argmax(dim=1)
    if labels.ndim == 1:
        return best == labels
    return labels.gather(1, best[:, None])[:, 0] > 0


def topk_hits(logits: Tensor, labels: Tensor, best: int) -> Tensor:
    """Return whether the label is among the ``best`` largest logits, (N,) bool; ties by index."""
    label_logits = logits.gather(1, labels[:, None].long())
    classes = torch.arange(logits.shape[1], device=logits.device)
    is_higher = (logits > label_logits) | ((logits == label_logits) & (classes < labels[:, None]))
    return is_higher.sum(dim=1) < best


def class_confidence(logits: Tensor) -> Tensor:
    """Return the largest probability of each image; (N,) fp64 in (0, 1]."""
    return logits.double().softmax(dim=1).amax(dim=1)


def class_nll(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the NLL in nats, (N,) fp64: of a softmax; for labels (N, K), the sum of K sigmoids."""
    logits = logits.double()
    if labels.ndim == 2:  # −y ln σ(z) − (1 − y) ln(1 − σ(z)), in a form that is finite for every z
        return (torch.nn.functional.softplus(logits) - labels * logits).sum(dim=1)
    return -logits.log_softmax(dim=1).gather(1, labels[:, None].long())[:, 0]


def brier_scores(logits: Tensor, labels: Tensor) -> Tensor:
    """Return |probabilities − one-hot label|² per image (Brier, 1950), (N,) fp64 in [0, 2]."""
    probs = logits.double().softmax(dim=1)
    return (probs - torch.nn.functional.one_hot(labels.long(), logits.shape[1])).square().sum(dim=1)


def reliability_bins(confidences: Tensor, hits: Tensor, bins: int = BINS) -> ReliabilityBins:
    """Return count, mean confidence and accuracy per bin of equal width (reliability diagram)."""
    # confidences: (N,) in [0, 1]. hits: (N,) bool, whether the prediction is right.
    bin_index = _bin_index(confidences, bins)
    count = torch.bincount(bin_index, minlength=bins).tolist()

    def means(values: Tensor) -> list[float | None]:
        sums = torch.bincount(bin_index, weights=values.double(), minlength=bins).tolist()
        return [total / n if n else None for total, n in zip(sums, count, strict=True)]

    edges = [i / bins for i in range(bins + 1)]
    return ReliabilityBins(
        low=edges[:-1],
        high=edges[1:],
        count=count,
        confidence=means(confidences),
        accuracy=means(hits),
    )


def calibration_error(confidences: Tensor, hits: Tensor, bins: int = BINS) -> float:
    """Return the ECE: mean over images of their bin's |accuracy − confidence| (Guo et al. 2017)."""
    excess = hits.double() - confidences.double()
    gap = torch.bincount(_bin_index(confidences, bins), weights=excess, minlength=bins)
    return float(gap.abs().sum() / len(confidences))


def confusion_counts(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the confusion matrix: counts by (true class, predicted class), (K, K) int64."""
    classes = logits.shape[1]
    pairs = labels.long() * classes + logits.argmax(dim=1)
    return torch.bincount(pairs, minlength=classes**2).reshape(classes, classes)


def _bin_index(confidences: Tensor, bins: int) -> Tensor:
    """Return the index of the bin (low, high] of each confidence; 0 belongs to the first."""
    return (confidences.double() * bins).ceil().long().sub(1).clamp(0, bins - 1)
