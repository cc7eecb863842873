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
    """How sure a router is: highest, second and other probs, mean over tokens (PRC, table 5)."""

    highest: float
    second: float
    others: float


def expert_counts(chosen: Tensor) -> Tensor:
    """Tokens that chose each expert; (B, T, E) bool to (E,) int64."""
    return chosen.flatten(0, -2).sum(dim=0)


def load_cv2(counts: Tensor) -> float:
    """Squared coefficient of variation of the counts (E,): population variance / mean².

    0 at perfect balance, E − 1 at collapse.
    Raises UserError where no token chose an expert.
    """
    _check_counts(counts)
    counts = counts.double()
    return float(counts.var(unbiased=False) / counts.mean().square())


def normalised_load_entropy(counts: Tensor) -> float:
    """Entropy of expert use / ln E, from the counts (E,) (TGR).

    1 at perfect balance, 0 at collapse; 1 where there is one expert.
    Raises UserError where no token chose an expert.
    """
    _check_counts(counts)
    if len(counts) == 1:
        return 1.0
    share = counts.double() / counts.sum()
    return float(torch.special.entr(share).sum() / math.log(len(counts)))


def max_load_violation(counts: Tensor) -> float:
    """Load of the most used expert over the mean − 1, from counts (E,) (Wang et al. 2024, MaxVio).

    0 at perfect balance, E − 1 at collapse.
    Raises UserError where no token chose an expert.
    """
    _check_counts(counts)
    counts = counts.double()
    return float(counts.max() / counts.mean() - 1)


def dead_expert_share(counts: Tensor, below: float = 0.01) -> float:
    """Share of experts whose count is less than ``below`` times the mean; counts (E,)."""
    _check_counts(counts)
    counts = counts.double()
    return float((counts < below * counts.mean()).double().mean())


def routing_confidence(probs: Tensor) -> Confidence:
    """Mean highest, second and remaining probability of a token (PRC, table 5); probs (B, T, E)."""
    ordered = probs.double().flatten(0, -2).sort(dim=-1, descending=True).values.mean(dim=0)
    return Confidence(
        highest=float(ordered[0]), second=float(ordered[1:2].sum()), others=float(ordered[2:].sum())
    )


def mean_token_entropy(probs: Tensor) -> float:
    """Mean entropy of a token's probs (B, T, E), in nats.

    0 where every token is certain, ln E where none prefers an expert.
    """
    return float(torch.special.entr(probs.double()).sum(dim=-1).mean())


def agreement_by_image(ours: Tensor, theirs: Tensor) -> Tensor:
    """Share of an image's tokens with the same expert in both (TGR), (B,) fp64; experts (B, T)."""
    _check_same_shape(ours, theirs)
    return (ours == theirs).double().mean(dim=-1)


def choice_iou(before: Tensor, after: Tensor) -> float:
    """Mean over tokens of |before ∩ after| / |before ∪ after|, 1 for empty ones; (B, T, E)."""
    return float(_token_iou(before, after).mean())


def iou_by_image(before: Tensor, after: Tensor) -> Tensor:
    """``choice_iou`` of each image by itself, (B,) fp64."""
    return _token_iou(before, after).mean(-1)


def _token_iou(before: Tensor, after: Tensor) -> Tensor:
    _check_same_shape(before, after)
    common = (before & after).sum(-1).double()
    either = (before | after).sum(-1).double()
    return torch.where(either > 0, common / either.clamp(min=1), 1.0)


def kept_choices(before: Tensor, after: Tensor) -> Tensor:
    """Return the share of each token's experts that it had ``before``, fp64 (…); (…, E) bool.

    |before ∩ after| / |after|: of a token that has none, 1 where it had none either, else 0. 1 less
    this is the switch fraction; by chance at an even load it is k/E.
    """
    _check_same_shape(before, after)
    common, number = (before & after).sum(-1).double(), after.sum(-1)
    return torch.where(number > 0, common / number.clamp(min=1), ~before.any(dim=-1))


def linearize_mean(function: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """A function of the mean of ``rows`` (B, D) as one value a row, (B,), whose mean it is.

    f(m) + ∇f(m)·(x − m): what each image does to it (infinitesimal jackknife; Efron, 1982). The
    function is given the columns that are not all 0.
    """
    # A column of zeros has no influence, and an entropy no derivative there.
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
    """Routing change 1 − IoU of the experts chosen before capacity, per layer."""
    return [1 - choice_iou(a.chosen, b.chosen) for a, b in zip(before, after, strict=True)]


def changes_by_image(
    before: Sequence[RoutingRecord], after: Sequence[RoutingRecord]
) -> list[Tensor]:
    """``routing_change_by_layer`` of each image by itself: per layer (N,) fp64."""
    return [1 - iou_by_image(a.chosen, b.chosen) for a, b in zip(before, after, strict=True)]


def expert_agreement(
    before: Sequence[RoutingRecord], after: Sequence[RoutingRecord]
) -> list[Tensor]:
    """Share of an image's tokens with the same first choice in both: per layer (N,) fp64."""
    pairs = zip(before, after, strict=True)
    return [agreement_by_image(first_choices(a), first_choices(b)) for a, b in pairs]


def processing_change_by_layer(
    before: Sequence[RoutingRecord], after: Sequence[RoutingRecord]
) -> list[float]:
    """Routing change 1 − IoU of the experts that processed a token (under capacity)."""
    return [
        1 - choice_iou(a.combine != 0, b.combine != 0) for a, b in zip(before, after, strict=True)
    ]


def average_layers(layers: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each number over the MoE layers, of those that every layer has."""
    shared = [name for name in layers[0] if all(name in layer for layer in layers)]
    return {name: sum(layer[name] for layer in layers) / len(layers) for name in shared}


def mean_over_layers(values: Sequence[float | None]) -> float | None:
    """Return the mean of one value per layer; None where a layer has none."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if len(known) == len(values) else None


def _check_counts(counts: Tensor) -> None:
    if int(counts.sum()) == 0:
        none = f"no token chose any of the {len(counts)} experts"
        raise UserError(f"routing: {none}; the router's records are empty")


def _check_same_shape(a: Tensor, b: Tensor) -> None:
    if a.shape != b.shape:
        shapes = f"{tuple(a.shape)} and {tuple(b.shape)} (images, tokens …)"
        raise UserError(f"routing: records of shape {shapes} cannot be compared token by token")
