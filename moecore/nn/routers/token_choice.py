"""What the routers share that let each token choose its experts: logits, gates, choice and plan.

A gate makes scores of logits, and weights of the scores of those chosen. B images, T tokens per
image, E experts, k choices per token, d width.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import linear, normalize, softplus

from moecore.core.routing_records import RoutingRecord
from moecore.nn.dispatch import SparsePlan

FLOOR = 1e-6  # of a length that is divided by: a vector of zeros has the cosine 0 with all

Score = Literal["softmax", "sigmoid", "sqrt_softplus", "relu"]
Renormalise = bool | Literal["straight"]
EPSILON = 1e-20  # DeepSeek-V3's: beside any sum that is not 0 it is nothing


def router_logits(tokens: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Logits (B, T, E) of tokens (B, T, d) by weight (E, d), in fp32 at least; no autocast."""
    dtype = torch.promote_types(weight.dtype, torch.float32)
    return linear(tokens.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))


def cosines_to_embeddings(vectors: Tensor, embeddings: Tensor) -> Tensor:
    """Cosines (B, T, E) of vectors (B, T, r) and experts' embeddings (E, r), in fp32 at least."""
    wide = vectors.to(torch.promote_types(embeddings.dtype, torch.float32))
    directions = normalize(wide, dim=-1, eps=FLOOR)
    return router_logits(directions, normalize(embeddings, dim=-1, eps=FLOOR))


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


def top_k(scores: Tensor, k: int) -> Tensor:
    """Indices (..., k) of the k largest scores (..., E), best first; ties go to the lowest index.

    k times argmax: ``topk`` promises no order among ties, and a stable sort takes 20 times longer
    at 400 experts.
    """
    left = scores.detach().clone()
    best_first = []
    for _ in range(k):
        best = left.argmax(dim=-1, keepdim=True)
        best_first.append(best)
        left.scatter_(-1, best, -torch.inf)
    return torch.cat(best_first, dim=-1)


def top_k_and_open_slots(
    preferences: Tensor, k: int, barred: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return ``top_k`` of preferences (B, T, E), and which of these slots are open, (B, T, k) bool.

    barred: bool, broadcast to (B, T, E), experts that may not be chosen: they come last, and their
    slots are closed.  None: all are open, and nothing is returned of it.
    """
    if barred is None:
        return top_k(preferences, k), None
    chosen = top_k(preferences.masked_fill(barred, torch.finfo(preferences.dtype).min), k)
    return chosen, ~barred.expand_as(preferences).gather(-1, chosen)


def plan_and_record(
    *,
    logits: Tensor,
    probs: Tensor,
    chosen: Tensor,
    weights: Tensor,
    load: Tensor | None = None,
    valid: Tensor | None = None,
    kept: Tensor | None = None,
) -> tuple[SparsePlan, RoutingRecord]:
    """The plan and the record of a token choice.

    logits, probs, load: (B, T, E); without ``load`` it is 0 or 1 as chosen.
    chosen: (B, T, k) expert ids, best first.  weights: (B, T, k) of their outputs.
    valid: (B, T, k) bool, which of them are chosen at all (None: all).
    kept: (B, T, k) bool, which lie within the experts' capacity (None: all).
    """
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
    return plan, RoutingRecord(
        logits=logits,
        probs=probs,
        load=load,
        chosen=mask,
        combine=torch.zeros_like(logits).scatter(-1, chosen, plan.weights),
    )
