"""Routing metrics: pure functions of one MoE layer's tensors, or of several layers' records.

IMED is a distance of two vectors of expert probabilities in which neighbours on a grid are close.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from moecore.core.files import UserError
from moecore.core.routing_records import RoutingRecord, first_choices
from moecore.nn.experts.base import expert_grid_shape
from moecore.statistics.comparisons import linearize_ratio


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
    _check_any_choice(counts)
    counts = counts.double()
    return float(counts.var(unbiased=False) / counts.mean().square())


def normalised_load_entropy(counts: Tensor) -> float:
    """Return the entropy of the load / ln E, of counts (E,) (TGR): 1 if even, 0 at collapse."""
    _check_any_choice(counts)
    if len(counts) == 1:
        return 1.0
    return float(torch.special.entr(counts.double() / counts.sum()).sum() / math.log(len(counts)))


def max_load_violation(counts: Tensor) -> float:
    """Return MaxVio of counts (E,): largest / mean load − 1, 0 to E − 1 (Wang et al., 2024)."""
    _check_any_choice(counts)
    counts = counts.double()
    return float(counts.max() / counts.mean() - 1)


def dead_expert_share(counts: Tensor, below: float = 0.01) -> float:
    """Return the share of experts whose count, of (E,), is less than ``below`` times the mean."""
    _check_any_choice(counts)
    counts = counts.double()
    return float((counts < below * counts.mean()).double().mean())


def compute_confidence_by_rank(probs: Tensor) -> dict[str, float]:
    """Return "confidence_highest", "…_second", "…_others" → mean probability; probs: (B, T, E)."""
    ordered = probs.double().flatten(0, -2).sort(dim=-1, descending=True).values.mean(dim=0)
    return {
        "confidence_highest": float(ordered[0]),
        "confidence_second": float(ordered[1:2].sum()),
        "confidence_others": float(ordered[2:].sum()),
    }


def mean_token_entropy(probs: Tensor) -> float:
    """Return the mean entropy of a token's probs (B, T, E), in nats: 0 (certain) to ln E."""
    return float(torch.special.entr(probs.double()).sum(dim=-1).mean())


def agreement_by_image(ours: Tensor, theirs: Tensor) -> Tensor:
    """Return each image's share of tokens with the same expert (B, T) in both (TGR); (B,) fp64."""
    _check_same_shape(ours, theirs)
    return (ours == theirs).double().mean(dim=-1)


def choice_iou(before: Tensor, after: Tensor) -> Tensor:
    """Return |before ∩ after| / |before ∪ after| of each token, (B, T); 1 if both are empty."""
    _check_same_shape(before, after)
    common = (before & after).sum(-1).double()
    either = (before | after).sum(-1).double()
    return torch.where(either > 0, common / either.clamp(min=1), 1.0)


def inherited_share(before: Tensor, after: Tensor) -> Tensor:
    """Return the share of each token's experts in ``after`` that ``before`` has, (…) fp64."""
    # Without experts after: 1 if none before, else 0. One minus this is the switch fraction; by
    # chance, at an even load, it is k/E.
    _check_same_shape(before, after)
    common = (before & after).sum(-1).double()
    number = after.sum(-1)
    return torch.where(number > 0, common / number.clamp(min=1), ~before.any(dim=-1))


def linearize_at_mean(function: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """Return jackknife pseudo-values, (B,), whose mean is f(mean of the rows); rows: (B, D)."""
    # f(m) + ∇f(m)·(x − m), each row's influence (infinitesimal jackknife; Efron, 1982).
    # A column of zeros has no influence, and an entropy has no derivative there: leave it out.
    rows = rows[:, rows.any(dim=0)].double()
    mean = rows.mean(dim=0)
    with torch.enable_grad():
        leaf = mean.clone().requires_grad_()
        value = function(leaf)
        (gradient,) = torch.autograd.grad(value, leaf)
    return value.detach() + (rows - mean) @ gradient


def compute_choice_iou_drop(
    before: Sequence[RoutingRecord], after: Sequence[RoutingRecord]
) -> list[Tensor]:
    """Return 1 − IoU of each token's experts, its mean over an image, per layer (N,) fp64."""
    return [1 - choice_iou(a.chosen, b.chosen).mean(-1) for a, b in zip(before, after, strict=True)]


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


def average_layers(layers: Sequence[Mapping[str, float]]) -> dict[str, float]:
    shared = [name for name in layers[0] if all(name in layer for layer in layers)]
    return {name: sum(layer[name] for layer in layers) / len(layers) for name in shared}


def _check_any_choice(counts: Tensor) -> None:
    if int(counts.sum()) == 0:
        fault = f"no token chose any of {len(counts)} experts"
        raise UserError(f"routing: {fault}; the router's records are empty")


def _check_same_shape(a: Tensor, b: Tensor) -> None:
    if a.shape != b.shape:
        shapes = f"{tuple(a.shape)} and {tuple(b.shape)} (images, tokens …)"
        raise UserError(f"routing: records of shape {shapes} cannot be compared token by token")


# Lower bound of a score used as a weight, as in the router: scores above a negative threshold may
# be negative.
_MIN_WEIGHT = 1e-6


def below_k_eligible_flags(scores: Tensor, threshold: float, k: int) -> Tensor:
    """Return (B, T) fp64: 1 for tokens with fewer than ``k`` scores above the threshold, else 0."""
    # Algorithm 1, line 13. With a ``k`` of 1: tokens that fall back on top-k (figure S3).
    return (_mask_experts_above_threshold(scores, threshold).sum(dim=-1) < k).double()


def eligible_tail_mass(scores: Tensor, threshold: float, k: int) -> float | None:
    """Return the share beyond the best ``k`` of scores > ``threshold`` (ERMoE eq. 12), or None."""
    # Eligible: score above the threshold. Mean over the tokens with an eligible expert.
    tails, has_eligible = _eligible_tail_mass_by_token(scores, threshold, k)
    if has_eligible.any():
        return float(tails[has_eligible].mean())
    return None


def _eligible_tail_mass_by_token(scores: Tensor, threshold: float, k: int) -> tuple[Tensor, Tensor]:
    """Return each token's ``eligible_tail_mass`` or NaN, and whether it is defined; both (B, T)."""
    eligible = _mask_experts_above_threshold(scores, threshold)
    weights = scores.double().clamp_min(_MIN_WEIGHT).where(eligible, 0)
    return _share_beyond(weights, k), eligible.any(dim=-1)


def compute_tails_beyond_k(probs: Tensor, k: int) -> Tensor:
    """Return the share of the probability outside each token's best ``k`` experts, (B, T) fp64."""
    # Eq. 12 with all experts eligible: Σ_{e > k} p_(e) / Σ_e p_(e), p_(1) ≥ p_(2) ≥ …; from 0
    # (k ≥ E) to 1 − k/E (no expert is preferred).
    _check_nonempty(probs, "probs")
    return _share_beyond(probs.double(), k)


def _share_beyond(weights: Tensor, k: int) -> Tensor:
    """Return the share of the weights (…, E) outside the best ``k``, (…)."""
    ordered = weights.sort(dim=-1, descending=True).values
    return ordered[..., k:].sum(dim=-1) / ordered.sum(dim=-1)


def _mask_experts_above_threshold(scores: Tensor, threshold: float) -> Tensor:
    _check_nonempty(scores, "scores")
    return scores > threshold


def _check_nonempty(values: Tensor, name: str) -> None:
    if not values.numel():
        raise UserError.at(
            "eligibility",
            found=f"{name} of shape {tuple(values.shape)} (images, tokens, experts)",
            allowed="at least one token",
        )


def expert_map_border_shares(load: Tensor, mass: Tensor) -> dict[str, float]:
    """Return "corner_mass" … → share of load (E,), mass (E,), cells at border, corners, inside."""
    # Of the map of experts (``expert_grid_shape``). Load and mass sum to 1; corners are border.
    # MoGE's regularizer rewards the border: compare a share with that of the cells.
    rows, columns = expert_grid_shape(len(load))
    row = torch.arange(rows)[:, None]
    column = torch.arange(columns)[None]
    at_row_end = (row == 0) | (row == rows - 1)
    at_column_end = (column == 0) | (column == columns - 1)
    border = (at_row_end | at_column_end).flatten()
    cells = torch.full_like(load, 1 / len(load))
    values = {}
    corner = (at_row_end & at_column_end).flatten()
    for place, is_there in (("border", border), ("corner", corner), ("inner", ~border)):
        for name, shares in (("load", load), ("mass", mass), ("cells", cells)):
            if is_there.any() and shares.any():
                values[f"{place}_{name}"] = float(shares[is_there].sum())
    return values


def experts_per_token_by_image(chosen: Tensor) -> dict[str, Tensor]:
    """Return "experts_per_token" and "unrouted" (share of tokens) → means per image, (B,) fp64."""
    numbers = chosen.sum(dim=-1).double()
    none = (numbers == 0).double()
    return {"experts_per_token": numbers.mean(dim=1), "unrouted": none.mean(dim=1)}


def load_shares(counts: Tensor) -> Tensor:
    """Return each expert's share of the choices, (E,) fp64; zeros without choices."""
    return counts.double() / counts.sum().clamp(min=1)


def _token_metrics(
    layer: RoutingRecord, threshold: float | None, k: int | None
) -> dict[str, Tensor]:
    """Return entropy; with k, tail; with threshold, fallback; with both, below_k; (B, T) fp64."""
    metrics = {"token_entropy": torch.special.entr(layer.probs.double()).sum(dim=-1)}
    if k is not None:
        metrics["tail_of_probs"] = compute_tails_beyond_k(layer.probs, k)
    if threshold is not None:
        metrics["fallback"] = below_k_eligible_flags(layer.logits, threshold, 1)
    if threshold is not None and k is not None:
        metrics["below_k"] = below_k_eligible_flags(layer.logits, threshold, k)
    return metrics


def measure_layer_use(
    layer: RoutingRecord, threshold: float | None, k: int | None
) -> dict[str, float]:
    """Return metric → value of one MoE layer; threshold, k: of its router, None without one."""
    counts = expert_counts(layer.chosen)
    mass = layer.probs.double().flatten(0, -2).mean(dim=0)
    values = expert_map_border_shares(load_shares(counts), mass / mass.sum())
    # the router ``depth`` may choose no expert for any token
    if counts.any():
        values["load_cv2"] = load_cv2(counts)
        values["max_violation"] = max_load_violation(counts)
        values["dead"] = dead_expert_share(counts)
        values["entropy"] = normalised_load_entropy(counts)
    by_image = experts_per_token_by_image(layer.chosen)
    values |= {name: float(numbers.mean()) for name, numbers in by_image.items()}
    values |= compute_confidence_by_rank(layer.probs)
    by_token = _token_metrics(layer, threshold, k)
    values |= {name: float(numbers.mean()) for name, numbers in by_token.items()}
    if threshold is not None and k is not None:
        tail_mass = eligible_tail_mass(layer.logits, threshold, k)
        if tail_mass is not None:
            values["tail_mass"] = tail_mass
    return values


def measure_layer_use_by_image(
    layer: RoutingRecord, threshold: float | None, k: int | None
) -> dict[str, Tensor]:
    """Return metric of ``measure_layer_use`` → values per image, (B,) fp64, with the same mean."""
    # The share of dead experts and the shares on the map have no values per image.
    counts = layer.chosen.sum(dim=1).double()
    ordered = layer.probs.double().sort(dim=-1, descending=True).values.mean(dim=1)
    experts = counts.shape[1]
    by_token = _token_metrics(layer, threshold, k)
    metrics = {}
    if counts.any():
        metrics["load_cv2"] = linearize_at_mean(
            lambda mean: experts * mean.square().sum() / mean.sum().square() - 1, counts
        )
        metrics["max_violation"] = linearize_at_mean(
            lambda mean: experts * mean.max() / mean.sum() - 1, counts
        )
        metrics["entropy"] = torch.ones(len(counts), dtype=torch.float64)
        if experts > 1:
            metrics["entropy"] = linearize_at_mean(
                lambda mean: torch.special.entr(mean / mean.sum()).sum() / math.log(experts), counts
            )
    metrics |= {
        "confidence_highest": ordered[:, 0],
        "confidence_second": ordered[:, 1:2].sum(dim=1),
        "confidence_others": ordered[:, 2:].sum(dim=1),
        "token_entropy": by_token.pop("token_entropy").mean(dim=1),
        **experts_per_token_by_image(layer.chosen),
        **{name: numbers.mean(dim=1) for name, numbers in by_token.items()},
    }
    if threshold is not None and k is not None:
        tails, has_eligible = _eligible_tail_mass_by_token(layer.logits, threshold, k)
        if has_eligible.any():
            sums = tails.where(has_eligible, 0).sum(dim=-1)
            ratio = linearize_ratio(sums.numpy(), has_eligible.sum(dim=-1).double().numpy())
            metrics["tail_mass"] = torch.from_numpy(ratio)
    return metrics


SIGMA = 1.0  # of Wang, Zhang & Feng (2005), which MoGE's table 1 uses


def imed_matrix(rows: int, columns: int, sigma: float = SIGMA) -> Tensor:
    """Return G (E, E) fp64, G_ij = exp(−|P_i − P_j|² / 2σ²) / (2πσ²), P the grid positions."""
    # Wang et al. (2005), eq. 8. Positive definite.
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    places = torch.stack([row.flatten(), column.flatten()], dim=1).double()
    squared = (places[:, None] - places[None]).square().sum(dim=-1)
    return torch.exp(-squared / (2 * sigma**2)) / (2 * math.pi * sigma**2)


def squared_imed(before: Tensor, after: Tensor, sigma: float = SIGMA) -> Tensor:
    """Return the squared distance d² = (u − v)ᵀ G (u − v) of maps (…, E), (…) fp64 ≥ 0."""
    # Two distant one-hot maps have d² = 1/π = 0.318, two adjacent ones (1 − exp(−1/2))/π = 0.125.
    if before.shape != after.shape:
        shapes = f"{tuple(before.shape)} and {tuple(after.shape)}"
        raise ValueError(f"IMED of maps of shapes {shapes}; they must be equal")
    change = before.double() - after.double()
    weights = imed_matrix(*expert_grid_shape(change.shape[-1]), sigma).to(change.device)
    return ((change @ weights) * change).sum(dim=-1).clamp_min(0)  # rounding may fall below 0


def imed_by_image(before: tuple[Tensor, ...], after: tuple[Tensor, ...]) -> Tensor:
    """Return each image's IMED, √``squared_imed``, mean over tokens and layers, (N,) fp64."""
    # before, after: probs (N, T, E) per MoE layer.
    layers = [squared_imed(u, v) for u, v in zip(before, after, strict=True)]
    return torch.stack([d2.sqrt().mean(dim=1) for d2 in layers]).mean(dim=0)


def draw_partners(images: int, seed: int) -> Tensor:
    """Return another image for each of N images, (N,) int64: the next on a random circle."""
    # No image is its own partner and each is a partner once: all methods compare the same N pairs.
    if images < 2:
        raise ValueError(f"pairs of different images among {images}; two are needed")
    circle = np.random.default_rng(seed).permutation(images)
    partner = torch.empty(images, dtype=torch.int64)
    partner[torch.from_numpy(circle)] = torch.from_numpy(np.roll(circle, -1))
    return partner


def imed_to_others(probs: tuple[Tensor, ...], seed: int) -> Tensor:
    """Return each image's IMED to another image (``draw_partners``), untransformed; (N,) fp64."""
    # The reference for IMED under a transform: a router that does not distinguish images has small
    # distances of both kinds. probs: (N, T, E) per MoE layer.
    partners = draw_partners(len(probs[0]), seed)
    return imed_by_image(probs, tuple(layer[partners] for layer in probs))


def class_expert_probs(records: Sequence[RoutingRecord], labels: Tensor, classes: int) -> Tensor:
    """Return each expert's mean probability per class, (K, layers, E) fp64."""
    # NaN for classes without images; other maps sum to 1 over E. labels: (N,) int in [0, K).
    if not records:
        raise UserError("class maps: the model has no MoE layers")
    if any(len(record.probs) != len(labels) for record in records):
        routed = f"{len(records[0].probs)} images were routed"
        raise UserError(f"class maps: {routed}, but there are {len(labels)} labels")
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        extremes = f"labels {int(labels.min())} to {int(labels.max())}"
        raise UserError.at("class maps", found=extremes, allowed=f"0 to {classes - 1}")
    members = torch.nn.functional.one_hot(labels.long(), classes).double()  # (N, K)
    counts = members.sum(dim=0)[:, None]
    means = [members.T @ record.probs.double().mean(dim=1) / counts for record in records]
    return torch.stack(means, dim=1)
