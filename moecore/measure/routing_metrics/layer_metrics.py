"""Routing metrics: pure functions of one MoE layer's tensors, or of several layers' records.

B images, T tokens per image, E experts. Probabilities and masks are (B, T, E).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moecore.core.files import UserError
from moecore.core.routing_records import RoutingRecord, first_choices


class Confidence(NamedTuple):
    """Highest, second and remaining probability of a token, mean over tokens (PRC, table 5)."""

    highest: float
    second: float
    others: float


def expert_counts(chosen: Tensor) -> Tensor:
    """Count the tokens that chose each expert.

    Args:
        chosen: (B, T, E) bool, which experts each token chose.

    Returns:
        (E,) int64.
    """
    return chosen.flatten(0, -2).sum(dim=0)


def load_cv2(counts: Tensor) -> float:
    """Return the squared coefficient of variation of the load: population variance / mean².

    Args:
        counts: (E,), tokens per expert.

    Returns:
        0 at perfect balance, E − 1 at collapse.

    Raises:
        UserError: no token chose an expert.
    """
    _check_counts(counts)
    counts = counts.double()
    return float(counts.var(unbiased=False) / counts.mean().square())


def normalised_load_entropy(counts: Tensor) -> float:
    """Return the entropy of the load / ln E, of counts (E,) (TGR): 1 if even, 0 at collapse."""
    _check_counts(counts)
    if len(counts) == 1:
        return 1.0
    share = counts.double() / counts.sum()
    return float(torch.special.entr(share).sum() / math.log(len(counts)))


def max_load_violation(counts: Tensor) -> float:
    """Return the largest load / the mean load − 1, of counts (E,) (MaxVio; Wang et al., 2024).

    0 at perfect balance, E − 1 at collapse.
    """
    _check_counts(counts)
    counts = counts.double()
    return float(counts.max() / counts.mean() - 1)


def dead_expert_share(counts: Tensor, below: float = 0.01) -> float:
    """Return the share of experts whose count is less than ``below`` times the mean; (E,)."""
    _check_counts(counts)
    counts = counts.double()
    return float((counts < below * counts.mean()).double().mean())


def routing_confidence(probs: Tensor) -> Confidence:
    """Return how confident the router is, from probs (B, T, E)."""
    ordered = probs.double().flatten(0, -2).sort(dim=-1, descending=True).values.mean(dim=0)
    return Confidence(
        highest=float(ordered[0]), second=float(ordered[1:2].sum()), others=float(ordered[2:].sum())
    )


def mean_token_entropy(probs: Tensor) -> float:
    """Return the mean entropy of a token's probs (B, T, E), in nats: 0 (certain) to ln E."""
    return float(torch.special.entr(probs.double()).sum(dim=-1).mean())


def agreement_by_image(ours: Tensor, theirs: Tensor) -> Tensor:
    """Return each image's share of tokens with the same expert (B, T) in both (TGR); (B,) fp64."""
    _check_same_shape(ours, theirs)
    return (ours == theirs).double().mean(dim=-1)


def choice_iou(before: Tensor, after: Tensor) -> float:
    """Return the mean over tokens of |before ∩ after| / |before ∪ after|, 1 if both are empty."""
    return float(_token_iou(before, after).mean())


def iou_by_image(before: Tensor, after: Tensor) -> Tensor:
    """Return ``choice_iou`` of each image, (B,) fp64."""
    return _token_iou(before, after).mean(-1)


def _token_iou(before: Tensor, after: Tensor) -> Tensor:
    _check_same_shape(before, after)
    common = (before & after).sum(-1).double()
    either = (before | after).sum(-1).double()
    return torch.where(either > 0, common / either.clamp(min=1), 1.0)


def kept_choices(before: Tensor, after: Tensor) -> Tensor:
    """Return the share of each token's experts that it had ``before``, (…) fp64; (…, E) bool.

    |before ∩ after| / |after|; without experts after: 1 if there were none before, else 0.
    One minus this is the switch fraction; by chance, at an even load, it is k/E.
    """
    _check_same_shape(before, after)
    common, number = (before & after).sum(-1).double(), after.sum(-1)
    return torch.where(number > 0, common / number.clamp(min=1), ~before.any(dim=-1))


def linearize_mean(function: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """Return f(mean of the rows) as one value per row, (B,), with that mean; rows (B, D).

    f(m) + ∇f(m)·(x − m), each row's influence (infinitesimal jackknife; Efron, 1982).
    """
    # A column of zeros has no influence, and an entropy has no derivative there: leave it out.
    rows = rows[:, rows.any(dim=0)].double()
    mean = rows.mean(dim=0)
    with torch.enable_grad():
        leaf = mean.clone().requires_grad_()
        value = function(leaf)
        (gradient,) = torch.autograd.grad(value, leaf)
    return value.detach() + (rows - mean) @ gradient


def routing_change_by_layer(
    before: Sequence[RoutingRecord], after: Sequence[RoutingRecord]
) -> list[float]:
    """Return 1 − IoU of the experts chosen before capacity, per layer."""
    return [1 - choice_iou(a.chosen, b.chosen) for a, b in zip(before, after, strict=True)]


def changes_by_image(
    before: Sequence[RoutingRecord], after: Sequence[RoutingRecord]
) -> list[Tensor]:
    """Return ``routing_change_by_layer`` of each image: per layer (N,) fp64."""
    return [1 - iou_by_image(a.chosen, b.chosen) for a, b in zip(before, after, strict=True)]


def expert_agreement(
    before: Sequence[RoutingRecord], after: Sequence[RoutingRecord]
) -> list[Tensor]:
    """Return each image's share of tokens with the same first choice before and after.

    Args:
        before: Records of L MoE layers on N images.
        after: Records of the same layers and images, in the same order.

    Returns:
        Per layer (N,) fp64.

    Raises:
        UserError: the records have different shapes.
    """
    pairs = zip(before, after, strict=True)
    return [agreement_by_image(first_choices(a), first_choices(b)) for a, b in pairs]


def processing_change_by_layer(
    before: Sequence[RoutingRecord], after: Sequence[RoutingRecord]
) -> list[float]:
    """Return 1 − IoU of the experts that processed a token (under capacity), per layer."""
    return [
        1 - choice_iou(a.combine != 0, b.combine != 0) for a, b in zip(before, after, strict=True)
    ]


def average_layers(layers: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean over MoE layers of each metric that all of them have."""
    shared = [name for name in layers[0] if all(name in layer for layer in layers)]
    return {name: sum(layer[name] for layer in layers) / len(layers) for name in shared}


def mean_over_layers(values: Sequence[float | None]) -> float | None:
    """Return the mean of one value per layer; None if a layer has no value."""
    numbers = [value for value in values if value is not None]
    return sum(numbers) / len(numbers) if len(numbers) == len(values) else None


def _check_counts(counts: Tensor) -> None:
    if int(counts.sum()) == 0:
        raise UserError(
            f"routing: no token chose any of the {len(counts)} experts; "
            "the router's records are empty"
        )


def _check_same_shape(a: Tensor, b: Tensor) -> None:
    if a.shape != b.shape:
        shapes = f"{tuple(a.shape)} and {tuple(b.shape)} (images, tokens …)"
        raise UserError(f"routing: records of shape {shapes} cannot be compared token by token")
