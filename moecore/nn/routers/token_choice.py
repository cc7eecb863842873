"""Steps of routers that choose experts per token: logits, scores, weights, top k, plan."""

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import linear, normalize, softplus

from moecore.core.routing_records import RoutingRecord
from moecore.nn.dispatch import SparsePlan

MAX_LOG_FACTOR = math.log(100)  # of the learned factor 1 / temperature of a cosine router
MIN_NORM = 1e-6  # of a divisor; a vector of zeros has cosine 0 with every other

PlanAndRecord = tuple[SparsePlan, RoutingRecord]
Score = Literal["softmax", "sigmoid", "sqrt_softplus", "relu"]
Renormalise = bool | Literal["straight"]
EPSILON = 1e-20  # as in DeepSeek-V3; negligible except for a sum of 0


def router_logits(tokens: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Map tokens (B, T, d) linearly to logits (B, T, E), in fp32 or fp64."""
    dtype = torch.promote_types(weight.dtype, torch.float32)
    return linear(tokens.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))


def cosines_to_embeddings(vectors: Tensor, embeddings: Tensor) -> Tensor:
    """Return cosines (B, T, E) between vectors (B, T, r) and embeddings (E, r)."""
    wide = vectors.to(torch.promote_types(embeddings.dtype, torch.float32))
    directions = normalize(wide, dim=-1, eps=MIN_NORM)
    return router_logits(directions, normalize(embeddings, dim=-1, eps=MIN_NORM))


def scores_from_logits(logits: Tensor, score: Score) -> Tensor:
    """Apply a score function to logits (B, T, E); scores are ≥ 0, and softmax sums to 1."""
    if score == "sigmoid":
        return torch.sigmoid(logits)
    if score == "relu":
        return torch.relu(logits)
    if score == "sqrt_softplus":  # at a score of 0 the root's gradient is infinite
        return softplus(logits).clamp_min(torch.finfo(logits.dtype).tiny).sqrt()
    return torch.softmax(logits, dim=-1)


def expert_probs(logits: Tensor, score: Score) -> Tensor:
    """Return a token's scores divided by their sum, (B, T, E); 1/E if all scores are 0."""
    scores = scores_from_logits(logits, score)
    if score == "softmax":
        return scores
    positive = scores.clamp_min(torch.finfo(scores.dtype).tiny)
    return positive / positive.sum(dim=-1, keepdim=True)


def safe_log(probs: Tensor) -> Tensor:
    """Return the logarithm of probs, in fp32 or fp64; 0 counts as the smallest normal number."""
    probs = probs.to(torch.promote_types(probs.dtype, torch.float32))
    return probs.clamp_min(torch.finfo(probs.dtype).tiny).log()


def gate_weights(logits: Tensor, scores: Tensor, score: Score, renormalise: Renormalise) -> Tensor:
    """Return the weights (B, T, k) of chosen experts from their logits and scores, (B, T, k)."""
    if not renormalise:
        return scores
    # sums to 1, with the gradient of scores over a constant (DeepSeek-V3, eq. 13)
    if renormalise == "straight":
        return scores / (scores.sum(dim=-1, keepdim=True) + EPSILON).detach()
    if score == "softmax":  # = scores / their sum, without dividing by a sum that may underflow
        return torch.softmax(logits, dim=-1)
    return scores / (scores.sum(dim=-1, keepdim=True) + EPSILON)


def top_k(scores: Tensor, k: int) -> Tensor:
    """Return indices (..., k) of the k largest scores (..., E), best first; ties: the lowest."""
    # k times argmax: ``topk`` guarantees no order of ties, and a stable sort takes 20 times as long
    # with 400 experts.
    remaining = scores.detach().clone()
    best_first = []
    for _ in range(k):
        best = remaining.argmax(dim=-1, keepdim=True)
        best_first.append(best)
        remaining.scatter_(-1, best, -torch.inf)
    return torch.cat(best_first, dim=-1)


def top_k_and_unbarred_mask(
    preferences: Tensor, k: int, barred: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return ``top_k`` expert ids (B, T, k), and which of these are allowed, (B, T, k) bool."""
    # barred: bool, broadcast to (B, T, E), experts that a measurement forbids; they rank last.
    # None: all experts are allowed, and the mask is None.
    if barred is None:
        return top_k(preferences, k), None
    chosen = top_k(preferences.masked_fill(barred, torch.finfo(preferences.dtype).min), k)
    return chosen, ~barred.expand_as(preferences).gather(-1, chosen)


def plan_and_record(
    *,
    logits: Tensor,  # (B, T, E)
    probs: Tensor,  # (B, T, E)
    chosen: Tensor,  # (B, T, k) expert ids, best first
    weights: Tensor,  # (B, T, k) of their outputs
    load: Tensor | None = None,  # (B, T, E); None: 1 for chosen experts, else 0
    valid: Tensor | None = None,  # (B, T, k) bool, choices that count; None: all
    kept: Tensor | None = None,  # (B, T, k) bool, choices within capacity; None: all
) -> PlanAndRecord:
    """Return plan and record; invalid choices are in neither, those not ``kept`` only in record."""
    processed = valid
    if valid is None:
        processed = kept
    elif kept is not None:
        processed = valid & kept
    plan = SparsePlan.build(chosen, weights, processed, logits.shape[-1])
    nothing = torch.zeros_like(logits, dtype=torch.bool)
    mask = nothing.scatter(-1, chosen, True if valid is None else valid)
    if load is None:
        load = mask.to(logits.dtype)
    combine = torch.zeros_like(logits).scatter(-1, chosen, plan.weights)
    return plan, RoutingRecord(logits, probs, load, mask, combine)
