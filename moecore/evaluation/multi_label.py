"""Metrics of images with several labels each: labels (N, K) are 1 for every class that an image has and 0 for the others.

logits: (N, K) before the sigmoid. N images, K classes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from moecore.records import RoutingRecord


def multi_hot(labels: Tensor) -> bool:
    """Whether ``labels`` are sets of classes: whole numbers (N, K). Floating (N, K) are the shares of mixed images, of one class each."""
    return labels.ndim == 2 and not labels.is_floating_point()


def precise(logits: Tensor, labels: Tensor) -> Tensor:
    """Whether the class with the largest logit is among the image's labels; (N,) bool. Its mean is precision at 1 (adversarial-moe, eq. 18)."""
    return labels.gather(1, logits.argmax(dim=1, keepdim=True))[:, 0] > 0


def false_discovery_rate(logits: Tensor, labels: Tensor) -> float:
    """1 − precision at 1 (adversarial-moe, appendix); with one label per image it is the error rate."""
    return 1 - float(precise(logits, labels).double().mean())


def sigmoid_nll(logits: Tensor, labels: Tensor) -> Tensor:
    """Sigmoid cross-entropy of each image in nats, summed over the classes; (N,) fp64."""
    logits = logits.double()
    return (torch.nn.functional.softplus(logits) - labels * logits).sum(dim=1)  # −y ln σ(z) − (1 − y) ln(1 − σ(z))


def per_label(records: Sequence[RoutingRecord], labels: Tensor) -> tuple[tuple[RoutingRecord, ...], Tensor]:
    """Records and labels (M,) in which an image stands once for each of its labels; as they are where it has one, (N,)."""
    if labels.ndim == 1:
        return tuple(records), labels
    rows, classes = labels.nonzero(as_tuple=True)
    return tuple(RoutingRecord(*(field[rows] for field in record)) for record in records), classes
