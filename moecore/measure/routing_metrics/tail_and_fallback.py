"""Which weight the choice leaves out: functions of one MoE layer's scores or probs.

ERMoE, supplement §6 and §8. B images, T tokens per image, E experts. Scores and probs are
(B, T, E); with a threshold, a token's eligible experts are A = {e : score > threshold}, and without
one all are.  Every function raises UserError where there is no token.
"""

from torch import Tensor

from moecore.core.files import UserError

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
