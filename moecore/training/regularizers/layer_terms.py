"""What losses on routing share: sums over layers, and pairs of corresponding tokens."""

from collections.abc import Callable, Iterator
from typing import cast

from torch import Tensor

from moecore.core.files import UserError
from moecore.core.routing_records import ObjectiveInputs, RoutingRecord
from moecore.nn.correspondence import token_pair_values, token_pairs_by_layer


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
