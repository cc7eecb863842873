"""What losses on routing share: sums over layers, and pairs of corresponding tokens."""

from collections.abc import Callable, Iterator
from typing import cast

from torch import Tensor

from moecore.core.files import UserError
from moecore.core.records import RoutingRecord, Step
from moecore.nn.correspondence import layer_pairs, paired_values


def sum_over_layers(step: Step, loss: Callable[[RoutingRecord], Tensor]) -> Tensor:
    """The sum of ``loss(record)`` over MoE layers; a model without any is a UserError."""
    check_has_experts(step)
    return cast(Tensor, sum(loss(record) for record in step.output.routing))


def check_has_experts(step: Step) -> None:
    """Raise UserError for a model without MoE layers."""
    if not step.output.routing:
        mend = "give the method a router and experts, or remove its regularizers"
        raise UserError(f"regularizers: the model has no MoE layer to regularize; {mend}")


def paired_layers(part: str, step: Step, special: bool) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield for each MoE layer the probs (B, T', E) of both sides of each pair of tokens, and
    (B, T') whether there is one.

    ``special``: pair special tokens (CLS) with themselves, too.  Raises UserError, naming ``part``,
    where the batch has not two views.
    """
    if step.batch.views != 2:
        number = f"the batch has {step.batch.views} view(s) of each image"
        raise UserError(f"{part}: {number}; it needs 2: train with two views, or remove {part}")
    check_has_experts(step)
    layers = layer_pairs(step.batch.affines, step.model.layouts, special)
    for record, (pairs, layout) in zip(step.output.routing, layers, strict=True):
        yield *paired_values(record.probs, pairs, layout), pairs.found
