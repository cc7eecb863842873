"""Routing records of mixtures that others built, from what their routers return.

B sequences, T tokens of one, E experts, k chosen per token. Nothing is imported from elsewhere:
routers are known by the names of their classes.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from moecore.core.files import UserError
from moecore.core.routing_records import RoutingRecord
from moecore.nn.routers.token_choice import Score, expert_probs, expert_scores

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
    (softmax, sigmoid, sqrt_softplus, relu; all but the first over their sum).  Raises UserError for
    other shapes and scores, and for experts that have no logits or are chosen twice by a token.
    """
    shapes = [tuple(one.shape) for one in (logits, experts, weights)]
    if shapes[1] != shapes[2] or shapes[0][:-1] != shapes[1][:-1]:
        problem = "found logits {}, experts {} and weights {}".format(*shapes)
        raise UserError(f"build_record: {problem}; allowed: (..., E), (..., k) and (..., k)")
    is_number = not (experts.is_floating_point() or experts.dtype == torch.bool)
    wrong = experts[(experts < 0) | (experts >= logits.shape[-1])]
    if wrong.numel() or not is_number:
        problem = f"found {int(wrong[0]) if is_number else experts.dtype}"
        allowed = f"integers from 0 to {logits.shape[-1] - 1}, the columns of logits"
        raise UserError(f"build_record: experts: {problem}; allowed: {allowed}")
    ordered = experts.sort(dim=-1).values
    repeated = ordered[..., 1:][ordered[..., 1:] == ordered[..., :-1]]
    if repeated.numel():  # one weight would take the other's place
        problem = f"found {int(repeated[0])} twice in one token's choice"
        raise UserError(f"build_record: experts: {problem}; allowed: each expert once")
    if score not in get_args(Score):
        allowed = ", ".join(get_args(Score))
        raise UserError(f"build_record: score: found {score!r}; allowed: {allowed}")
    logits, experts = logits.float(), experts.long()
    chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, experts, True)
    combine = torch.zeros_like(logits).scatter(-1, experts, weights.float())
    return RoutingRecord(logits, expert_probs(logits, score), chosen.float(), chosen, combine)


def check_record(record: Any, where: str) -> RoutingRecord:
    """Return a record. Raises UserError unless it is one, its fields tensors (..., E) of one shape
    and ``chosen`` bool.
    """
    if not isinstance(record, RoutingRecord):
        allowed = "a RoutingRecord, as lens.build_record returns"
        raise UserError(f"{where}: found {type(record).__name__}; allowed: {allowed}")
    for name, field in zip(RoutingRecord._fields[:5], record[:5], strict=True):
        if not isinstance(field, Tensor):
            problem = f"{name}: found {type(field).__name__}"
            raise UserError(f"{where}: {problem}; allowed: a tensor (..., experts)")
    for name, field in zip(RoutingRecord._fields[:5], record[:5], strict=True):
        if field.ndim < 2 or field.shape != record.probs.shape:
            problem = f"{name}: found the shape {tuple(field.shape)}"
            raise UserError(f"{where}: {problem}; allowed: of all fields one, (..., experts)")
    if record.chosen.dtype != torch.bool:
        raise UserError(f"{where}: chosen: found {record.chosen.dtype}; allowed: torch.bool")
    return record


def read_top_k_router(
    router: nn.Module, inputs: tuple[Any, ...], output: Any, score: Score
) -> RoutingRecord:
    """Return the record of a router that returns logits, weights and numbers of its experts.

    Raises UserError where the weights are not the experts' scores, but for a factor.
    """
    if not isinstance(output, tuple) or len(output) != 3:
        problem = f"{type(router).__name__} does not return logits, weights and experts"
        raise UserError(f"trace: {problem}; allowed: transformers 5.23 and later, or an adapter")
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
