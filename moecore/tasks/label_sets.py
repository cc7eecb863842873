"""Metrics of images with several labels each.

labels: (N, K), 1 for every class that an image has and 0 for the others. logits: (N, K) before the
sigmoid. N images, K classes.
"""

import torch
from torch import Tensor


def precise(logits: Tensor, labels: Tensor) -> Tensor:
    """Whether the class with the largest logit is among the image's labels; (N,) bool.

    Its mean is precision at 1 (adversarial-moe, eq. 18).
    """
    return labels.gather(1, logits.argmax(dim=1, keepdim=True))[:, 0] > 0


def false_discovery_rate(logits: Tensor, labels: Tensor) -> float:
    """1 − precision at 1 (adversarial-moe, appendix); with one label an image, the error rate."""
    return 1 - float(precise(logits, labels).double().mean())


def sigmoid_nll(logits: Tensor, labels: Tensor) -> Tensor:
    """Sigmoid cross-entropy of each image in nats, summed over the classes; (N,) fp64."""
    logits = logits.double()
    # −y ln σ(z) − (1 − y) ln(1 − σ(z)), which is finite for every z in this form
    return (torch.nn.functional.softplus(logits) - labels * logits).sum(dim=1)
