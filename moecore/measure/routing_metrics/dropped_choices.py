"""Let each token of a trained model go without the r-th of the experts that it chose.

B images, T tokens per image, E experts, k chosen per token.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from moecore.core.routing_records import RoutingRecord, chosen_first_scores
from moecore.measure.routing_metrics.barred_experts import list_routers
from moecore.nn.backbones.base_model import Model
from moecore.nn.dispatch import ProjectionDispatchPlan, SparsePlan

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
