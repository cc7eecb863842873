"""Gates: a router's logits to scores of experts, and those of the chosen to weights.

B images, T tokens per image, E experts, k chosen per token.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import softplus

Score = Literal["softmax", "sigmoid", "sqrt_softplus", "relu"]
Renormalise = bool | Literal["straight"]
EPSILON = 1e-20  # DeepSeek-V3's: beside any sum that is not 0 it is nothing


def expert_scores(logits: Tensor, score: Score) -> Tensor:
    """Return scores (B, T, E) ≥ 0 of logits (B, T, E); those of a softmax sum to 1."""
    if score == "sigmoid":
        return torch.sigmoid(logits)
    if score == "relu":
        return torch.relu(logits)
    if score == "sqrt_softplus":  # at a score of 0 the root's gradient is infinite
        return softplus(logits).clamp_min(torch.finfo(logits.dtype).tiny).sqrt()
    return torch.softmax(logits, dim=-1)


def expert_probs(logits: Tensor, score: Score) -> Tensor:
    """Return the scores over their sum, (B, T, E); all alike where every score is 0."""
    scores = expert_scores(logits, score)
    if score == "softmax":
        return scores
    positive = scores.clamp_min(torch.finfo(scores.dtype).tiny)
    return positive / positive.sum(dim=-1, keepdim=True)


def gate_weights(logits: Tensor, scores: Tensor, score: Score, renormalise: Renormalise) -> Tensor:
    """Return the weights (B, T, k) of the chosen from their logits and scores, both (B, T, k).

    renormalise: the weights sum to 1; straight: so too, with the gradient of scores over a
    constant (DeepSeek-V3, eq. 13).
    """
    if not renormalise:
        return scores
    if renormalise == "straight":
        return scores / (scores.sum(dim=-1, keepdim=True) + EPSILON).detach()
    if score == "softmax":  # = scores / their sum, without dividing by a sum that may underflow
        return torch.softmax(logits, dim=-1)
    return scores / (scores.sum(dim=-1, keepdim=True) + EPSILON)
