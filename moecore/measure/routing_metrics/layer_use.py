"""How one MoE layer uses its experts: load, entropy, confidence, and ERMoE's eligibility.

ERMoE, supplement §6 and §8: a token's eligible experts are A = {e : score > threshold}; without a
threshold all experts are eligible. B images, T tokens per image, E experts; a record's fields,
scores and probs are (B, T, E).
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
    normalised_load_entropy,
    routing_confidence,
)
from moecore.nn.experts.base import map_shape
from moecore.statistics.crossed import linearize_ratio

# Lower bound of a score used as a weight, as in the router: scores above a negative threshold may
# be negative.
_MIN_WEIGHT = 1e-6


def fallback_rate(scores: Tensor, threshold: float) -> float:
    """Return the share of tokens without an eligible expert: they use top-k (§6, figure S3)."""
    return below_k_eligible_rate(scores, threshold, 1)


def below_k_eligible_rate(scores: Tensor, threshold: float, k: int) -> float:
    """Return the share of tokens with fewer than ``k`` eligible experts (Algorithm 1, line 13)."""
    return float(below_k_eligible_flags(scores, threshold, k).mean())


def below_k_eligible_flags(scores: Tensor, threshold: float, k: int) -> Tensor:
    """Return 1 for each token with fewer than ``k`` eligible experts, else 0; (B, T) fp64."""
    return (_eligible_experts(scores, threshold).sum(dim=-1) < k).double()


def eligible_tail_mass(scores: Tensor, threshold: float, k: int) -> float | None:
    """Return the weight of eligible experts beyond the best ``k`` / that of all eligible (eq. 12).

    In [0, 1): mean over the tokens with an eligible expert; None without such a token.
    """
    eligible = _eligible_experts(scores, threshold)
    # (tokens with an eligible expert, E)
    weights = scores.double().clamp_min(_MIN_WEIGHT).where(eligible, 0)[eligible.any(dim=-1)]
    if not len(weights):
        return None
    return float(_share_beyond(weights, k).mean())


def eligible_tail_sums_by_image(scores: Tensor, threshold: float, k: int) -> tuple[Tensor, Tensor]:
    """Return each image's sum of ``eligible_tail_mass``, and its number of tokens; (B,) fp64."""
    eligible = _eligible_experts(scores, threshold)
    is_eligible = eligible.any(dim=-1)
    weights = scores.double().clamp_min(_MIN_WEIGHT).where(eligible, 0)
    tail = _share_beyond(weights, k).where(is_eligible, 0)
    return tail.sum(dim=-1), is_eligible.sum(dim=-1).double()


def tail_of_probs(probs: Tensor, k: int) -> float:
    """Return the share of the probability outside a token's best ``k`` experts, mean over tokens.

    Eq. 12 with all experts eligible: Σ_{e > k} p_(e) / Σ_e p_(e), p_(1) ≥ p_(2) ≥ …; from 0
    (k ≥ E) to 1 − k/E (no expert is preferred).
    """
    return float(tail_by_token(probs, k).mean())


def tail_by_token(probs: Tensor, k: int) -> Tensor:
    """Return ``tail_of_probs`` of each token, (B, T) fp64."""
    _check_nonempty(probs, "probs")
    return _share_beyond(probs.double(), k)


def _share_beyond(weights: Tensor, k: int) -> Tensor:
    """Return the share of the weights (…, E) outside the best ``k``, (…)."""
    ordered = weights.sort(dim=-1, descending=True).values
    return ordered[..., k:].sum(dim=-1) / ordered.sum(dim=-1)


def _eligible_experts(scores: Tensor, threshold: float) -> Tensor:
    _check_nonempty(scores, "scores")
    return scores > threshold


def _check_nonempty(values: Tensor, name: str) -> None:
    if not values.numel():
        raise UserError.at(
            "eligibility",
            found=f"{name} of shape {tuple(values.shape)} (images, tokens, experts)",
            allowed="at least one token",
        )


def map_border_shares(load: Tensor, mass: Tensor) -> dict[str, float]:
    """Return the shares of load, mass (E,) and experts (cells) on border, corners and inside.

    Of the map of experts (``map_shape``). Load and mass sum to 1; corners belong to the border.
    MoGE's regularizer rewards the border: compare a share with that of the cells. There are no
    values for a load of zeros, and none for the inside of a map with a side of one or two experts.
    """
    rows, columns = map_shape(len(load))
    row = torch.arange(rows)[:, None]
    column = torch.arange(columns)[None]
    at_row_end = (row == 0) | (row == rows - 1)
    at_column_end = (column == 0) | (column == columns - 1)
    border = (at_row_end | at_column_end).flatten()
    cells = torch.full_like(load, 1 / len(load))
    values = {}
    for place, is_there in (
        ("border", border),
        ("corner", (at_row_end & at_column_end).flatten()),
        ("inner", ~border),
    ):
        for name, shares in (("load", load), ("mass", mass), ("cells", cells)):
            if is_there.any() and shares.any():
                values[f"{place}_{name}"] = float(shares[is_there].sum())
    return values


def choices_by_image(chosen: Tensor) -> dict[str, Tensor]:
    """Return each image's mean experts per token, and share of tokens without; (B,) fp64 each."""
    numbers = chosen.sum(dim=-1).double()
    none = (numbers == 0).double()
    return {"experts_per_token": numbers.mean(dim=1), "unrouted": none.mean(dim=1)}


def load_shares(counts: Tensor) -> Tensor:
    """Return each expert's share of the choices, (E,) fp64; zeros without choices."""
    return counts.double() / counts.sum().clamp(min=1)


def _token_metrics(
    layer: RoutingRecord, threshold: float | None, k: int | None
) -> dict[str, Tensor]:
    """Return the metrics that are defined for every token, (B, T) fp64 each."""
    metrics = {"token_entropy": torch.special.entr(layer.probs.double()).sum(dim=-1)}
    if k is not None:
        metrics["tail_of_probs"] = tail_by_token(layer.probs, k)
    if threshold is not None:
        metrics["fallback"] = below_k_eligible_flags(layer.logits, threshold, 1)
    if threshold is not None and k is not None:
        metrics["below_k"] = below_k_eligible_flags(layer.logits, threshold, k)
    return metrics


def measure_layer_use(
    layer: RoutingRecord, threshold: float | None, k: int | None
) -> dict[str, float]:
    """Return the metrics of one MoE layer; threshold and k: of its router, None without.

    The load has no values where no token chose an expert, as the router ``depth`` may decide.
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
    by_image = choices_by_image(layer.chosen)
    values |= {name: float(numbers.mean()) for name, numbers in by_image.items()}
    confidence = routing_confidence(layer.probs)._asdict()
    values |= {f"confidence_{name}": value for name, value in confidence.items()}
    by_token = _token_metrics(layer, threshold, k)
    values |= {name: float(numbers.mean()) for name, numbers in by_token.items()}
    if threshold is not None and k is not None:
        values["tail_mass"] = eligible_tail_mass(layer.logits, threshold, k)
    return {name: value for name, value in values.items() if value is not None}


def measure_layer_use_by_image(
    layer: RoutingRecord, threshold: float | None, k: int | None
) -> dict[str, Tensor]:
    """Return the metrics of ``measure_layer_use`` per image, (B,) fp64, with the same mean.

    The share of dead experts and the shares on the map have no values per image.
    """
    counts = layer.chosen.sum(dim=1).double()
    ordered = layer.probs.double().sort(dim=-1, descending=True).values.mean(dim=1)
    experts = counts.shape[1]
    by_token = _token_metrics(layer, threshold, k)

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
        "token_entropy": by_token.pop("token_entropy").mean(dim=1),
        **choices_by_image(layer.chosen),
        **{name: numbers.mean(dim=1) for name, numbers in by_token.items()},
    }
    if threshold is not None and k is not None:
        tail, tokens = eligible_tail_sums_by_image(layer.logits, threshold, k)
        if tokens.any():
            ratio = linearize_ratio(tail.numpy(), tokens.numpy())
            metrics["tail_mass"] = torch.from_numpy(ratio)
    return metrics
