"""How one MoE layer uses its experts: load, entropy, confidence, and which weight is left out.

ERMoE, supplement §6 and §8. B images, T tokens per image, E experts; a record's fields, scores and
probs are (B, T, E). With a threshold, a token's eligible experts are A = {e : score > threshold},
and without one all are.
"""

import math

import torch
from torch import Tensor

from moecore.core.files import UserError
from moecore.core.routing_records import RoutingRecord
from moecore.measure.routing_metrics.layer_metrics import (
    dead_expert_share,
    expert_counts,
    linearize_mean,
    load_cv2,
    max_load_violation,
    mean_token_entropy,
    normalised_load_entropy,
    routing_confidence,
)
from moecore.nn.experts.base import map_shape
from moecore.statistics.crossed import linearize_ratio

# What a score counts at least as a weight, as in the router: above a negative threshold, scores may
# be negative.
_LEAST = 1e-6


def fallback_rate(scores: Tensor, threshold: float) -> float:
    """Share of tokens without any eligible expert, which fall back to top-k. §6, figure S3."""
    return below_k_eligible_rate(scores, threshold, 1)


def below_k_eligible_rate(scores: Tensor, threshold: float, k: int) -> float:
    """Share of tokens with fewer than ``k`` eligible experts (Algorithm 1, line 13)."""
    return float(below_k_eligible_flags(scores, threshold, k).mean())


def below_k_eligible_flags(scores: Tensor, threshold: float, k: int) -> Tensor:
    """1 for each token with fewer than ``k`` eligible experts, else 0; (B, T) fp64."""
    return (_eligible_experts(scores, threshold).sum(dim=-1) < k).double()


def eligible_tail_mass(scores: Tensor, threshold: float, k: int) -> float | None:
    """Weight of the eligible experts beyond the best ``k``, over that of all eligible ones.

    Eq. 12; in [0, 1). Mean over the tokens that have an eligible expert; None where none has one.
    Weights are the scores, at least 1e-6.
    """
    eligible = _eligible_experts(scores, threshold)
    # (tokens with an eligible expert, E)
    weights = scores.double().clamp_min(_LEAST).where(eligible, 0)[eligible.any(dim=-1)]
    if not len(weights):
        return None
    return float(_share_beyond(weights, k).mean())


def eligible_tail_sums_by_image(scores: Tensor, threshold: float, k: int) -> tuple[Tensor, Tensor]:
    """Return each image's sum of ``eligible_tail_mass``, and of how many tokens; (B,) fp64."""
    eligible = _eligible_experts(scores, threshold)
    some = eligible.any(dim=-1)
    weights = scores.double().clamp_min(_LEAST).where(eligible, 0)
    tail = _share_beyond(weights, k).where(some, 0)
    return tail.sum(dim=-1), some.sum(dim=-1).double()


def tail_of_probs(probs: Tensor, k: int) -> float:
    """Share of the probability outside a token's best ``k`` experts, mean over tokens.

    Eq. 12 where every expert is eligible: Σ_{e > k} p_(e) / Σ_e p_(e), p_(1) ≥ p_(2) ≥ …; in
    [0, 1 − k/E]: 0 for k ≥ E, 1 − k/E where no expert is preferred.
    """
    return float(tail_by_token(probs, k).mean())


def tail_by_token(probs: Tensor, k: int) -> Tensor:
    """``tail_of_probs`` of each token, (B, T) fp64."""
    _check_nonempty(probs, "probs")
    return _share_beyond(probs.double(), k)


def _share_beyond(weights: Tensor, k: int) -> Tensor:
    """Share of the weights (…, E) that lies outside the best ``k``, (…)."""
    ordered = weights.sort(dim=-1, descending=True).values
    return ordered[..., k:].sum(dim=-1) / ordered.sum(dim=-1)


def _eligible_experts(scores: Tensor, threshold: float) -> Tensor:
    _check_nonempty(scores, "scores")
    return scores > threshold


def _check_nonempty(values: Tensor, name: str) -> None:
    if not values.numel():
        shape = f"{tuple(values.shape)} (images, tokens, experts)"
        raise UserError(f"eligibility: {name} of shape {shape} hold no token")


def map_border_shares(load: Tensor, mass: Tensor) -> dict[str, float]:
    """Return where on ``map_shape`` load and mass, both (E,) of sum 1, and experts (cells) lie.

    As shares: on its border, in its corners, which belong to the border, and inside it.

    MoGE's regularizer rewards the border: read a share beside that of the cells. A load of zeros
    lies nowhere, and a map with a side of two experts at most has no inside: no such values.
    """
    rows, columns = map_shape(len(load))
    row = torch.arange(rows)[:, None]
    column = torch.arange(columns)[None]
    at_row_end = (row == 0) | (row == rows - 1)
    at_column_end = (column == 0) | (column == columns - 1)
    border = (at_row_end | at_column_end).flatten()
    cells = torch.full_like(load, 1 / len(load))
    values = {}
    for place, where in (
        ("border", border),
        ("corner", (at_row_end & at_column_end).flatten()),
        ("inner", ~border),
    ):
        for name, shares in (("load", load), ("mass", mass), ("cells", cells)):
            if where.any() and shares.any():
                values[f"{place}_{name}"] = float(shares[where].sum())
    return values


def choices_by_image(chosen: Tensor) -> dict[str, Tensor]:
    """Return the mean number of experts that a token of an image chose, and the share of its tokens
    that chose none, (B,) fp64 each.  chosen: (B, T, E) bool.
    """
    numbers = chosen.sum(dim=-1).double()
    none = (numbers == 0).double()
    return {"experts_per_token": numbers.mean(dim=1), "unrouted": none.mean(dim=1)}


def load_shares(counts: Tensor) -> Tensor:
    """Return each expert's share of the choices, (E,) fp64; zeros where there is none."""
    return counts.double() / counts.sum().clamp(min=1)


def layer_use_metrics(
    layer: RoutingRecord, threshold: float | None, k: int | None
) -> dict[str, float]:
    """The metrics of one MoE layer; threshold and k: of its router, None where it has none.

    Where no token chose an expert, as the router depth may decide, the load has no values.
    """
    counts = expert_counts(layer.chosen)
    mass = layer.probs.double().flatten(0, -2).mean(dim=0)
    values: dict[str, float | None] = dict(
        map_border_shares(load_shares(counts), mass / mass.sum())
    )
    if counts.any():
        values["load_cv2"] = load_cv2(counts)
        values["max_violation"] = max_load_violation(counts)
        values["dead"] = dead_expert_share(counts)
        values["entropy"] = normalised_load_entropy(counts)
    values |= {name: float(one.mean()) for name, one in choices_by_image(layer.chosen).items()}
    sure = routing_confidence(layer.probs)._asdict()
    values |= {f"confidence_{name}": value for name, value in sure.items()}
    values["token_entropy"] = mean_token_entropy(layer.probs)
    if k is not None:
        values["tail_of_probs"] = tail_of_probs(layer.probs, k)
    if threshold is not None:
        values["fallback"] = fallback_rate(layer.logits, threshold)
        if k is not None:
            values["below_k"] = below_k_eligible_rate(layer.logits, threshold, k)
            values["tail_mass"] = eligible_tail_mass(layer.logits, threshold, k)
    return {name: value for name, value in values.items() if value is not None}


def use_metrics_by_image(
    layer: RoutingRecord, threshold: float | None, k: int | None
) -> dict[str, Tensor]:
    """The metrics of ``layer_use_metrics`` as one value per image, (B,) fp64, whose mean each is.

    The share of dead experts, and where on the map they lie, have none.
    """
    counts = layer.chosen.sum(dim=1).double()
    probs = layer.probs.double()
    ordered = probs.sort(dim=-1, descending=True).values.mean(dim=1)
    experts = counts.shape[1]

    def cv2(mean: Tensor) -> Tensor:
        return experts * mean.square().sum() / mean.sum().square() - 1

    def violation(mean: Tensor) -> Tensor:
        return experts * mean.max() / mean.sum() - 1

    def entropy(mean: Tensor) -> Tensor:
        return torch.special.entr(mean / mean.sum()).sum() / math.log(experts)

    metrics = {}
    if counts.any():
        metrics["load_cv2"] = linearize_mean(cv2, counts)
        metrics["max_violation"] = linearize_mean(violation, counts)
        metrics["entropy"] = torch.ones(len(counts), dtype=torch.float64)
        if experts > 1:
            metrics["entropy"] = linearize_mean(entropy, counts)
    metrics |= {
        "confidence_highest": ordered[:, 0],
        "confidence_second": ordered[:, 1:2].sum(dim=1),
        "confidence_others": ordered[:, 2:].sum(dim=1),
        "token_entropy": torch.special.entr(probs).sum(dim=-1).mean(dim=1),
        **choices_by_image(layer.chosen),
    }
    if k is not None:
        metrics["tail_of_probs"] = tail_by_token(layer.probs, k).mean(dim=1)
    if threshold is not None:
        metrics["fallback"] = below_k_eligible_flags(layer.logits, threshold, 1).mean(dim=1)
    if threshold is not None and k is not None:
        metrics["below_k"] = below_k_eligible_flags(layer.logits, threshold, k).mean(dim=1)
        tail, some = eligible_tail_sums_by_image(layer.logits, threshold, k)
        if some.any():
            ratio = linearize_ratio(tail.numpy(), some.numpy())
            metrics["tail_mass"] = torch.from_numpy(ratio)
    return metrics
