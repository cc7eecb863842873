"""How steady a model is under noise: the choice of experts, and the prediction along a ramp.

PRC, figures 5 and 1. N images, S + 1 points of a ramp of growing noise (the first is the clean
image), K classes, T tokens, E experts.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from moecore.core.files import UserError
from moecore.core.records import RoutingRecord
from moecore.measure.routing_metrics.expert_use import iou_by_image


class RampSteps(NamedTuple):
    """How the prediction moves from point to point of each image's ramp; every field is (N,).

    Jumps are counted between neighbouring points: a steep but continuous change also counts where
    it exceeds the threshold within one step.
    """

    class_changes: Tensor  # int64, steps at which the predicted class is another one
    jumps: Tensor  # int64, steps of the true class's probability that exceed the threshold
    total_variation: Tensor  # fp64, Σ |step| of that probability: end to start where it only falls
    largest_step: Tensor  # fp64, max |step|


def ramp_steps(probs: Tensor, labels: Tensor, threshold: float) -> RampSteps:
    """What happens along the ramps of N images.

    probs: (N, S + 1, K); labels: (N,); threshold: in probability.  Raises UserError where a ramp
    has no step.
    """
    if probs.ndim != 3 or probs.shape[1] < 2:
        shape = f"{tuple(probs.shape)} (images, points, classes)"
        needed = "two points are needed"
        raise UserError(f"noise ramp: probabilities of shape {shape} have no step; {needed}")
    steps = true_probability(probs, labels).diff(dim=1).abs()
    predicted = probs.argmax(-1)
    changes = (predicted[:, 1:] != predicted[:, :-1]).sum(1)
    return RampSteps(changes, (steps > threshold).sum(1), steps.sum(1), steps.amax(1))


def true_probability(probs: Tensor, labels: Tensor) -> Tensor:
    """(N, S + 1) fp64: the probability of each image's own class along its ramp."""
    index = labels[:, None, None].expand(-1, probs.shape[1], 1)
    return probs.double().gather(2, index).squeeze(2)


def changes_by_image(
    before: Sequence[RoutingRecord], after: Sequence[RoutingRecord]
) -> list[Tensor]:
    """Routing change 1 − IoU of the chosen experts, the mean over an image's tokens.

    Per layer (N,) fp64; [] for a dense model. Two empty sets count as IoU 1; the mean over images
    is ``change_of_choice`` (see routing_metrics/expert_use.py).
    """
    return [1 - iou_by_image(a.chosen, b.chosen) for a, b in zip(before, after, strict=True)]
