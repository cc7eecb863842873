"""Trained models whose tokens choose otherwise, and what that costs.

Without some experts, by the router's own rule; without the r-th of a token's experts; the loss
under the router's experts against that under other sets of k of E. L MoE layers, B images, T tokens
per image, n tokens, S sets.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations
from math import comb
from typing import Any, Literal, NamedTuple

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
    """Forbid experts inside the ``with``: tokens choose again, among the others.

    barred: a bool mask for each of L layers, which broadcasts to (B, T, E), on the model's device;
    None: the layer chooses as always.
    """
    routers = list_routers(model)
    try:
        for router, mask in zip(routers, barred, strict=True):
            router.barred = mask
        yield
    finally:
        for router in routers:
            router.barred = None


def list_routers(model: Model) -> list[Any]:
    """Return the routers of the MoE layers in their order, without those of a teacher."""
    own = find_own_model(model)
    return [layer.router for layer in own.modules() if isinstance(layer, MoEFeedForward)]


def find_own_model(model: Model) -> Model:
    """Return the model without the teacher that its router asks."""
    return model.model if isinstance(model, GuidedModel) else model


def no_barring_reason(model: Model) -> str | None:
    """Return why experts cannot be barred, in words; None where they can."""
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
    """Return how many experts can be barred so that a token still has those that it uses."""
    moe = model.experts_and_router
    choices = moe.experts.choices
    return choices - round(moe.scaled_router.active(choices))


# what becomes of the others: nothing; they are scaled to the old sum; the next one steps in
Way = Literal["as_is", "renormalised", "reroute"]


@contextmanager
def drop_choices(model: Model, rank: int, way: Way) -> Iterator[None]:
    """Take the ``rank``-th choice (from 1) from every token in every layer inside the ``with``.

    A token that chose fewer loses nothing.  model: one that ``no_barring_reason`` has none for.
    """

    def drop(router: Any, inputs: tuple[Any, ...], decided: tuple[Any, RoutingRecord]) -> Any:
        plan, record = decided
        is_dropped = find_ranked_choice(record, rank)
        if way != "reroute":
            combine = drop_weights(record.combine, is_dropped, way == "renormalised")
            chosen = record.chosen & ~is_dropped
            return reweigh_router_plan(plan, combine), record._replace(
                chosen=chosen, combine=combine
            )
        router.barred = is_dropped
        try:
            return router.forward(*inputs)  # not the call, which would come here again
        finally:
            router.barred = None

    hooks = [router.register_forward_hook(drop) for router in list_routers(model)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def find_ranked_choice(record: RoutingRecord, rank: int) -> Tensor:
    """Return each token's ``rank``-th most probable expert of those chosen, (B, T, E) bool."""
    order = chosen_first_scores(record.probs, record.chosen).argsort(
        dim=-1, descending=True, stable=True
    )
    nobody = torch.zeros_like(record.chosen)
    return nobody.scatter(-1, order[..., rank - 1 : rank], True) & record.chosen


def drop_weights(combine: Tensor, is_dropped: Tensor, is_renormalised: bool) -> Tensor:
    """Return weights (B, T, E) without the dropped ones (B, T, E) bool.

    is_renormalised: scaled to the old sum, where any is left.
    """
    left = combine.masked_fill(is_dropped, 0)
    if not is_renormalised:
        return left
    total, rest = combine.sum(dim=-1, keepdim=True), left.sum(dim=-1, keepdim=True)
    return torch.where(rest > 0, left * total / rest, left)


def reweigh_router_plan(
    plan: SparsePlan | ProjectionDispatchPlan, combine: Tensor
) -> SparsePlan | ProjectionDispatchPlan:
    """Return the plan with weights from (B, T, E); its experts compute what they did."""
    if isinstance(plan, ProjectionDispatchPlan):
        return plan._replace(plan=reweigh_plan(plan.plan, combine))
    return reweigh_plan(plan, combine)


def reweigh_plan(plan: SparsePlan, combine: Tensor) -> SparsePlan:
    """Return the plan with each pair's weight from (B, T, E), by the expert whose row it has."""
    experts = torch.searchsorted(plan.offsets.long(), plan.rows, right=True)
    return plan._replace(weights=combine.gather(-1, experts.view_as(plan.weights)))


EXACT = 512  # sets of experts, of which all are tried
SAMPLED = 256  # of more sets so many are drawn
TOLERANCE = 1e-6  # of a loss: below it is rounding


class SubsetRegret(NamedTuple):
    """One value a token, (n,)."""

    regret: np.ndarray  # loss − smallest loss, ≥ 0
    room: np.ndarray  # mean loss over the sets − smallest loss: the regret of a random set
    better: np.ndarray  # share of the sets with a smaller loss


def list_subsets(experts: int, k: int, seed: int = 0) -> np.ndarray:
    """Return sets of k experts, (S, E) bool: all in their order, or SAMPLED of more than EXACT."""
    if comb(experts, k) <= EXACT:
        chosen = np.array(list(combinations(range(experts), k)))
    else:
        drawn = np.random.default_rng(seed).random((SAMPLED, experts))
        chosen = drawn.argsort(axis=1)[:, :k]
    subsets = np.zeros((len(chosen), experts), dtype=bool)
    np.put_along_axis(subsets, chosen, True, axis=1)
    return subsets


def subset_regret(losses: np.ndarray, own: np.ndarray) -> SubsetRegret:
    """Return what tokens would gain by their best sets.

    losses: (n, S) of the sets.  own: (n,) of the chosen set, which counts among them: of sampled
    sets the regret is a lower bound.
    """
    smallest = np.minimum(losses.min(axis=1), own)
    better = losses < (own - TOLERANCE)[:, None]
    return SubsetRegret(own - smallest, losses.mean(axis=1) - smallest, better.mean(axis=1))


def fixed_subset_gain(losses: np.ndarray, own: np.ndarray, is_first: np.ndarray) -> np.ndarray:
    """Return what each token would gain by one set for all tokens, (n,); below 0: routing gains.

    is_first: (n,) bool, the tokens of one half.  A half has the set that is best for the other.
    """
    gain = np.empty(len(own))
    for half in (is_first, ~is_first):
        best = losses[~half].mean(axis=0).argmin()
        gain[half] = own[half] - losses[half, best]
    return gain
