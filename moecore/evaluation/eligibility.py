"""Eligibility metrics of a thresholded router: pure functions of one MoE layer's scores (ERMoE, supplement §6 and §8).

B images, T tokens per image, E experts. Scores are (B, T, E); a token's eligible experts are A = {e : score > threshold}.
Every function raises StageError where there is no token.
"""

from torch import Tensor

from moecore.files import StageError

_LEAST = 1e-6  # what a score counts at least as a weight, as in the router: below a negative threshold, scores may be negative


def fallback_rate(scores: Tensor, threshold: float) -> float:
    """Share of tokens without any eligible expert: the router falls back to its global top-k (§6, figure S3)."""
    return below_k_rate(scores, threshold, 1)


def below_k_rate(scores: Tensor, threshold: float, k: int) -> float:
    """Share of tokens with fewer than ``k`` eligible experts (Algorithm 1, line 13)."""
    return float((_eligible(scores, threshold).sum(dim=-1) < k).double().mean())


def tail_mass(scores: Tensor, threshold: float, k: int) -> float | None:
    """Weight of the eligible experts beyond the best ``k``, over that of all eligible ones (eq. 12); in [0, 1).

    Mean over the tokens that have an eligible expert; None where no token has one. Weights are the scores, at least 1e-6.
    """
    eligible = _eligible(scores, threshold)
    weights = scores.double().clamp_min(_LEAST).where(eligible, 0)[eligible.any(dim=-1)]  # (tokens with an eligible expert, E)
    if not len(weights):
        return None
    ordered = weights.sort(dim=-1, descending=True).values
    return float((ordered[:, k:].sum(dim=-1) / ordered.sum(dim=-1)).mean())


def _eligible(scores: Tensor, threshold: float) -> Tensor:
    if not scores.numel():
        raise StageError(f"eligibility: scores of shape {tuple(scores.shape)} (images, tokens, experts) hold no token")
    return scores > threshold
