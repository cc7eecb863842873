"""What the losses on two views share: corresponding tokens of both sides, layer by layer."""

from collections.abc import Callable

from torch import Tensor

from moecore.core.files import UserError
from moecore.core.records import Step
from moecore.nn.correspondence import sides, token_pairs
from moecore.training.regularizers.balance import sum_over_layers


def sum_over_paired_layers(
    part: str, step: Step, special: bool, loss: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> Tensor:
    """The sum over MoE layers of ``loss(first, second, found)``: probs (B, T', E) of both sides of
    each pair, and (B, T') whether there is one.

    ``special``: pair special tokens (CLS) with themselves, too.  Raises UserError, naming ``part``,
    where the batch has not two views.
    """
    if step.batch.views != 2:
        found = f"the batch has {step.batch.views} view(s) of each image"
        raise UserError(f"{part}: {found}; it needs 2: train with two views, or remove {part}")
    layout = step.model.layout
    pairs = token_pairs(step.batch.affines, layout, special)
    return sum_over_layers(
        step, lambda record: loss(*sides(record.probs, pairs, layout), pairs.found)
    )
