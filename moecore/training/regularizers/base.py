"""What every regularizer says of itself, and what losses on routing share.

Sums over layers, and pairs of corresponding tokens.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import ClassVar, cast

from pydantic import Field
from torch import Tensor

from moecore.core.config import Part
from moecore.core.files import UserError
from moecore.core.routing_records import ObjectiveInputs, RoutingRecord
from moecore.core.surroundings import Misfits, Surroundings
from moecore.nn.correspondence import token_pair_values, token_pairs_by_layer


class Regularizer(Part, ABC):
    """A loss beside the task's, a family of parts: its settings, which are called with a step."""

    # "routing", "load", "basis" and whatever else routers and experts provide; "guidance" of a
    # teacher; "two_views"; "truth" of the data
    needs: ClassVar[frozenset[str]] = frozenset({"routing"})
    # what provides what it needs, for messages
    allowed_with: ClassVar[str] = "a router and experts that provide it"

    # evens out the use of experts, as a router's balance does
    balances_load: ClassVar[bool] = False

    teaches_choice: ClassVar[bool] = True  # False: it looks at weights alone
    added_by: ClassVar[str] = ""  # what adds it to a method; params.yaml then lists it nowhere

    weight: float = Field(1.0, ge=0, description="factor in the objective")

    def misfits(self, around: Surroundings) -> Misfits:
        """Yield why it would fail, teach nothing, or do what a balance of the router does."""
        router = around.router
        if lacking := sorted(self.needs - around.provided):
            text = f"found {self.kind}, which needs {', '.join(lacking)}"
            if router is None:
                yield (), f"{text}, but the method has no router; allowed: one with a router"
                return
            given = ", ".join(sorted(router.provides | around.experts.provides)) or "nothing else"
            text = f"{text}, but {router.kind} and {around.experts.kind} provide {given}"
            yield (), f"{text}; allowed: {self.allowed_with}, or no such loss"
            return
        if self.added_by:
            yield (), f"found {self.kind}, which {self.added_by} adds; allowed: other losses"
        if router is not None and not router.has_expert_rows and self.teaches_choice:
            text = f"found {self.kind}, but the router {router.kind} learns nothing"
            yield (), f"{text}; allowed: no such loss, or another router"
        balance = getattr(router, "balance", None)
        if balance is not None and balance.is_alone and self.balances_load:
            text = f"{self.kind} balances the load beside the router's {balance.kind}"
            yield (), f"found {text}; allowed: one of both, or the balance loss_free"
        if "truth" in self.needs and around.truth is False:
            text = f"found {self.kind}, but nobody knows the truth of {around.data}'s tokens"
            yield (), f"{text}; allowed: data whose card says truth"
        if around.special is False and getattr(self, "special", False):
            text = "found true, but the model has no class token"
            yield ("special",), f"{text}; allowed: false"

    @abstractmethod
    def __call__(self, step: ObjectiveInputs) -> Tensor:
        """Return the term without its weight, a scalar, fp32."""


def sum_over_layers(step: ObjectiveInputs, loss: Callable[[RoutingRecord], Tensor]) -> Tensor:
    """The sum of ``loss(record)`` over MoE layers; a model without any is a UserError."""
    check_has_experts(step)
    return cast(Tensor, sum(loss(record) for record in step.output.routing))


def check_has_experts(step: ObjectiveInputs) -> None:
    """Raise UserError for a model without MoE layers."""
    if not step.output.routing:
        mend = "give the method a router and experts, or remove its regularizers"
        raise UserError(f"regularizers: the model has no MoE layer to regularize; {mend}")


def probs_of_paired_tokens(
    part: str, step: ObjectiveInputs, special: bool
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield per MoE layer both sides' probs (B, T', E) of token pairs and which exist (B, T').

    ``special``: pair special tokens (CLS) with themselves, too.  Raises UserError, naming ``part``,
    where the batch has not two views.
    """
    if step.batch.views != 2:
        number = f"the batch has {step.batch.views} view(s) of each image"
        raise UserError(f"{part}: {number}; it needs 2: train with two views, or remove {part}")
    check_has_experts(step)
    layers = token_pairs_by_layer(step.batch.affines, step.model.layouts, special)
    for record, (pairs, layout) in zip(step.output.routing, layers, strict=True):
        yield *token_pair_values(record.probs, pairs, layout), pairs.found
