"""What the losses on a layer's routing share: sums over layers."""

from collections.abc import Callable
from typing import cast

from torch import Tensor

from moecore.core.files import UserError
from moecore.core.records import RoutingRecord, Step


def sum_over_layers(step: Step, loss: Callable[[RoutingRecord], Tensor]) -> Tensor:
    """The sum of ``loss(record)`` over MoE layers; a model without any is a UserError."""
    if not step.output.routing:
        mend = "give the method a router and experts, or remove its regularizers"
        raise UserError(f"regularizers: the model has no MoE layer to regularize; {mend}")
    return cast(Tensor, sum(loss(record) for record in step.output.routing))
