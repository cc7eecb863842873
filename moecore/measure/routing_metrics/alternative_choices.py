"""Bar experts or single choices, and compare losses under S other sets of k experts; L layers."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations
from math import comb
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from moecore.core.routing_records import RoutingRecord, chosen_first_scores
from moecore.nn.backbones.base_model import Model
from moecore.nn.dispatch import ProjectionDispatchPlan, SparsePlan
from moecore.nn.layers.moe import MoEFeedForward
from moecore.training.guide import GuidedModel


@contextmanager
def bar_experts(model: Model, barred: Sequence[Tensor | None]) -> Iterator[None]:
    """Bar experts inside the ``with``: tokens choose among the others, by the router's rule."""
    # barred: per layer a bool mask on the model's device that broadcasts to (B, T, E), or None.
    routers = list_routers(model)
    try:
        for router, mask in zip(routers, barred, strict=True):
            router.barred = mask
        yield
    finally:
        for router in routers:
            router.barred = None


def list_routers(model: Model) -> list[Any]:
    """Return the routers of the MoE layers in order, without a teacher's routers."""
    layers = find_own_model(model).modules()
    return [layer.router for layer in layers if isinstance(layer, MoEFeedForward)]


def find_own_model(model: Model) -> Model:
    """Return the model without its guide."""
    return model.model if isinstance(model, GuidedModel) else model


def no_barring_reason(model: Model) -> str | None:
    """Return the reason why experts cannot be barred, or None."""
    if model.moe is None:
        return "a dense model has no experts"
    kind = model.moe.router.kind
    routers = list_routers(model)
    if not all(hasattr(router, "barred") for router in routers):
        return f"the router {kind} does not choose by scores, so that no expert can be barred"
    if len(routers) != len(model.layouts):
        return "its text tower has experts of its own"
    if removable_expert_count(model) < 1:
        return f"the router {kind} may choose all experts of a token"
    return None


def removable_expert_count(model: Model) -> int:
    """Return how many experts can be barred without reducing a token's number of experts."""
    moe = model.experts_and_router
    choices = moe.experts.choices
    return choices - round(moe.scaled_router.active(choices))


# The other weights: unchanged; scaled to the old sum; the next expert replaces the dropped one.
Way = Literal["as_is", "renormalised", "reroute"]


@contextmanager
def drop_choices(model: Model, rank: int, way: Way) -> Iterator[None]:
    """Drop the ``rank``-th choice (from 1) of every token in every layer inside the ``with``."""
    # Tokens with fewer choices lose nothing. way: see ``Way``. ``no_barring_reason`` must be None.

    def drop(router: Any, inputs: tuple[Any, ...], decided: tuple[Any, RoutingRecord]) -> Any:
        plan, record = decided
        is_dropped = find_ranked_choice(record, rank)
        if way != "reroute":
            combine = drop_weights(record.combine, is_dropped, way == "renormalised")
            if isinstance(plan, ProjectionDispatchPlan):
                plan = plan._replace(plan=reweigh_plan(plan.plan, combine))
            else:
                plan = reweigh_plan(plan, combine)
            return plan, record._replace(chosen=record.chosen & ~is_dropped, combine=combine)
        router.barred = is_dropped
        try:
            return router.forward(*inputs)  # calling the router would run this hook again
        finally:
            router.barred = None

    hooks = [router.register_forward_hook(drop) for router in list_routers(model)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def find_ranked_choice(record: RoutingRecord, rank: int) -> Tensor:
    """Return the ``rank``-th most probable of each token's chosen experts, (B, T, E) bool."""
    order = chosen_first_scores(record.probs, record.chosen).argsort(
        dim=-1, descending=True, stable=True
    )
    is_ranked = torch.zeros_like(record.chosen).scatter(-1, order[..., rank - 1 : rank], True)
    return is_ranked & record.chosen


def drop_weights(combine: Tensor, is_dropped: Tensor, is_renormalised: bool) -> Tensor:
    """Return weights (B, T, E) without the dropped ones; renormalised: scaled to the old sum."""
    weights = combine.masked_fill(is_dropped, 0)
    if not is_renormalised:
        return weights
    total, rest = combine.sum(dim=-1, keepdim=True), weights.sum(dim=-1, keepdim=True)
    return torch.where(rest > 0, weights * total / rest, weights)


def reweigh_plan(plan: SparsePlan, combine: Tensor) -> SparsePlan:
    """Return the plan with its pairs of token and expert weighted by ``combine`` (B, T, E)."""
    experts = torch.searchsorted(plan.offsets.long(), plan.rows, right=True)
    return plan._replace(weights=combine.gather(-1, experts.view_as(plan.weights)))


MAX_SUBSETS = 512  # all sets are tried up to this number
SAMPLED_SUBSETS = 256  # drawn from larger numbers of sets
TOLERANCE = 1e-6  # differences of losses below it are rounding


def list_subsets(experts: int, k: int, seed: int = 0) -> np.ndarray:
    """Return sets of k experts, (S, E) bool: all in order, or a sample of more than MAX_SUBSETS."""
    if comb(experts, k) <= MAX_SUBSETS:
        chosen = np.array(list(combinations(range(experts), k)))
    else:
        keys = np.random.default_rng(seed).random((SAMPLED_SUBSETS, experts))
        chosen = keys.argsort(axis=1)[:, :k]
    subsets = np.zeros((len(chosen), experts), dtype=bool)
    np.put_along_axis(subsets, chosen, True, axis=1)
    return subsets


def fixed_subset_gain(losses: np.ndarray, chosen: np.ndarray, is_first: np.ndarray) -> np.ndarray:
    """Return each token's gain with one set for all tokens, (n,); below 0 if routing is better."""
    # is_first: (n,) bool, the tokens of one half. Each half uses the set that is best on the other.
    gain = np.empty(len(chosen))
    for half in (is_first, ~is_first):
        best = losses[~half].mean(axis=0).argmin()
        gain[half] = chosen[half] - losses[half, best]
    return gain
