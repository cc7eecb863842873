"""Routing records of mixtures that others built, from what their routers return.

B sequences, T tokens of one, E experts, k chosen per token. Nothing is imported from elsewhere:
routers are known by the names of their classes.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from moecore.core.files import UserError
from moecore.core.routing_records import RoutingRecord
from moecore.nn.routers.gates import Score, expert_probs, expert_scores

# Of a router, its positional arguments and what it returned, the record: fields (B, T, E), or
# (B · T, E) where the layer around it flattens its tokens.
RouterAdapter = Callable[[nn.Module, tuple[Any, ...], Any], RoutingRecord]
CLOSE = 0.02  # shares of weights, of bfloat16


def build_record(
    logits: Tensor, experts: Tensor, weights: Tensor, score: Score = "softmax"
) -> RoutingRecord:
    """Return the record of a router in which every token chose k experts.

    logits: (..., E), without noise.  experts: (..., k) integers, those chosen.  weights: (..., k)
    of their outputs, 0 where an expert had no room.  score: how logits become probabilities
    (softmax, sigmoid, sqrt_softplus, relu; all but the first over their sum).
    """
    logits = logits.float()
    chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, experts, True)
    combine = torch.zeros_like(logits).scatter(-1, experts, weights.float())
    return RoutingRecord(logits, expert_probs(logits, score), chosen.float(), chosen, combine)


def read_top_k_router(
    router: nn.Module, inputs: tuple[Any, ...], output: Any, score: Score
) -> RoutingRecord:
    """Return the record of a router that returns logits, weights and numbers of its experts.

    Raises UserError where the weights are not the experts' scores, but for a factor.
    """
    logits, weights, experts = output
    scores = expert_scores(logits.detach().float(), score).gather(-1, experts)
    expected, given = (each / each.sum(-1, keepdim=True) for each in (scores, weights.detach()))
    if not torch.allclose(expected, given.float(), atol=CLOSE):
        problem = f"{type(router).__name__} does not weigh experts by a {score} of its logits"
        raise UserError(f"trace: {problem}; allowed: transformers 5.23 and later, or an adapter")
    return build_record(logits, experts, weights, score)


def read_switch_router(router: nn.Module, inputs: tuple[Any, ...], output: Any) -> RoutingRecord:
    """Return the record of Switch's router: one expert a token, (B, T, E), 0 beyond its capacity,
    the probability of that expert, (B, T, 1), and logits.
    """
    processed, weight, logits = output
    probs = logits.float().softmax(dim=-1)
    best = one_hot(probs.argmax(dim=-1), probs.shape[-1]).bool()
    chosen = torch.where(processed.any(dim=-1, keepdim=True), processed.bool(), best)
    return RoutingRecord(logits.float(), probs, chosen.float(), chosen, processed * weight.float())


SOFTMAX = partial(read_top_k_router, score="softmax")
FOREIGN_ROUTERS: Mapping[str, RouterAdapter] = {  # of transformers, by the names of their classes
    "MixtralTopKRouter": SOFTMAX,
    "OlmoeTopKRouter": SOFTMAX,
    "Qwen2MoeTopKRouter": SOFTMAX,
    "Qwen3MoeTopKRouter": SOFTMAX,
    "DeepseekV2TopkRouter": SOFTMAX,
    "DeepseekV3TopkRouter": partial(read_top_k_router, score="sigmoid"),
    "SwitchTransformersTop1Router": read_switch_router,
}
