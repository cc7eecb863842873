"""Objectives of attacks on the routers: they change the choice of experts (B images, T tokens)."""

from collections.abc import Sequence

from torch import Tensor

from moecore.core.routing_records import ModelOutput, choice_margin

# In logits. Beyond it a token counts as turned, so that others decide the gradient.
MAX_EXCESS = 0.1


def routing_margin_loss(output: ModelOutput, before: Sequence[Tensor]) -> Tensor:
    """Return by how much the next expert exceeds the k-th, (B,): a token's choice turns above 0."""
    # before: (B, T, E) bool per MoE layer, the clean choice. Its lowest logit is the k-th. Sum over
    # layers of the mean over tokens; 0 for a token that chose no or every expert. 0 · prediction,
    # as a hash has no gradient.
    values = 0.0 * output.prediction.float().sum(dim=1)
    for record, chosen in zip(output.routing, before, strict=True):
        excess = -choice_margin(record.logits, chosen).nan_to_num(0.0)
        values = values + excess.clamp(max=MAX_EXCESS).mean(dim=1).to(values.dtype)
    return values
