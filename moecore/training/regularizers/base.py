"""The base class of regularizers, and sums of losses over layers and paired tokens."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import ClassVar, cast

from pydantic import Field
from torch import Tensor

from moecore.core.config import Misfits, Part, Surroundings
from moecore.core.files import UserError
from moecore.core.routing_records import ObjectiveInputs, RoutingRecord
from moecore.nn.correspondence import token_pairs_by_layer, values_of_pairs


class Regularizer(Part, ABC):
    """Base class of losses in addition to the task's; an instance is called with a step."""

    # "routing", "load", "basis" and others that routers and experts provide; "guidance" from a
    # teacher; "two_views"; "truth" of the data
    needs: ClassVar[frozenset[str]] = frozenset({"routing"})
    allowed_with: ClassVar[str] = "a router and experts that provide it"  # for messages
    balances_load: ClassVar[bool] = False  # True: as a router's balance does
    teaches_choice: ClassVar[bool] = True  # False: it depends on weights only
    added_by: ClassVar[str] = ""  # setting that adds it; it cannot be listed in params.yaml

    weight: float = Field(default=1.0, ge=0, description="factor in the objective")

    def misfits(self, around: Surroundings) -> Misfits:
        """Yield (keys, message) if the loss fails, is idle, or repeats the router's balancing."""
        router = around.router
        if lacking := sorted(self.needs - around.provided):
            text = f"found {self.kind}, which needs {', '.join(lacking)}"
            if router is None:
                yield (), f"{text}, but the method has no router; allowed: one with a router"
                return
            provided = ", ".join(sorted(router.provides | around.experts.provides))
            text += f", but {router.kind} and {around.experts.kind} provide "
            text += provided or "nothing else"
            yield (), f"{text}; allowed: {self.allowed_with}, or no such loss"
            return
        if self.added_by:
            yield (), f"found {self.kind}, which {self.added_by} adds; allowed: other losses"
        if router is not None and not router.has_expert_rows and self.teaches_choice:
            text = f"found {self.kind}, but the router {router.kind} learns nothing"
            yield (), f"{text}; allowed: no such loss, or another router"
        balance = getattr(router, "balance", None)
        if balance is not None and balance.is_alone and self.balances_load:
            text = f"found {self.kind}, but the router's {balance.kind} balances the load already"
            yield (), f"{text}; allowed: one of both, or the balance loss_free"
        if "truth" in self.needs and around.truth is False:
            text = f"found {self.kind}, but the truth of {around.data}'s tokens is unknown"
            yield (), f"{text}; allowed: data whose card says truth"
        if around.special is False and getattr(self, "special", False):
            text = "found true, but the model has no class token"
            yield ("special",), f"{text}; allowed: false"

    @abstractmethod
    def __call__(self, step: ObjectiveInputs) -> Tensor:
        """Return the term without its weight, a scalar, fp32."""


def sum_over_layers(step: ObjectiveInputs, loss: Callable[[RoutingRecord], Tensor]) -> Tensor:
    """Return the sum of ``loss(record)`` over the MoE layers of a step.

    Args:
        step: the inputs of the objective.
        loss: returns a scalar for the routing record of a layer.

    Raises:
        UserError: for a model without MoE layers.
    """
    check_has_experts(step)
    return cast(Tensor, sum(loss(record) for record in step.output.routing))


def check_has_experts(step: ObjectiveInputs) -> None:
    if not step.output.routing:
        raise UserError(
            "regularizers: the model has no MoE layer to regularize; give the method a router and "
            "experts, or remove its regularizers"
        )


def probs_of_paired_tokens(
    part: str, step: ObjectiveInputs, special: bool
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield per layer probs (B, T', E) of patches in views 1, 2, and a mask (B, T'): in both."""
    # A pair is one patch in two views. part: names the loss in messages. special: pair special
    # tokens (CLS) with themselves, too.
    if step.batch.views != 2:
        raise UserError(
            f"{part}: the batch has {step.batch.views} view(s) of each image; it needs 2: train "
            f"with two views, or remove {part}"
        )
    check_has_experts(step)
    layers = token_pairs_by_layer(step.batch.affines, step.model.layouts, special)
    for record, (pairs, layout) in zip(step.output.routing, layers, strict=True):
        yield *values_of_pairs(record.probs, pairs, layout), pairs.mask
