"""Floor 0: the words that routers, losses, metrics and attacks share.

B images, T tokens per image, E experts, K classes. Every type is a NamedTuple, so a pytree.
"""

from typing import Any, Literal, NamedTuple

from torch import Tensor

# Where a teacher's features are read: the input of a block's feed-forward, its output, or the last normalised tokens.
Feature = Literal["mlp_input", "block_out", "final"]


class RoutingRecord(NamedTuple):
    """What one MoE layer's router decided; every field is (B, T, E) and fp32 (``chosen`` is bool)."""

    logits: Tensor  # scores before noise
    probs: Tensor  # the router's own clean normalisation
    load: Tensor  # P(chosen) if the noise were drawn again; 0/1 where there is none
    chosen: Tensor  # selected before capacity
    combine: Tensor  # weight of each expert's output; 0 = not processed


class ModelOutput(NamedTuple):
    """``model(images)``: the prediction (B, K) and one record per MoE layer (none for a dense model)."""

    prediction: Tensor
    routing: tuple[RoutingRecord, ...] = ()


class Batch(NamedTuple):
    """Images in [0, 1] (B, C, H, W), their labels, and the affine (B, 3, 3) that made each view.

    An affine maps a point (row, column, 1) of the original image to the view; pixel centres are at +0.5.
    """

    images: Tensor
    labels: Tensor
    affines: Tensor


class Guidance(NamedTuple):
    """What a frozen teacher says of a batch: its prediction (B, K) and, per MoE layer, its router's probs (B, T, E)."""

    prediction: Tensor
    probs: tuple[Tensor, ...]


class Step(NamedTuple):
    """All that an objective may look at in one training step."""

    batch: Batch
    output: ModelOutput
    model: Any
    guidance: Guidance | None = None
    progress: float = 0.0  # share of the training that is done, in [0, 1)
