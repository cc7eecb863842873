"""The words that routers, losses, metrics and attacks share.

B images, T tokens per image, E experts, K classes. Every type is a NamedTuple, so a pytree.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

# Where a teacher's features are read: the input of a block's feed-forward, its output, or the last
# normalised tokens.
Feature = Literal["mlp_input", "block_out", "final"]


class RoutingRecord(NamedTuple):
    """What one MoE layer's router decided; the fields are (B, T, E) fp32 (``chosen`` is bool), but
    for the last.
    """

    logits: Tensor  # scores before noise
    probs: Tensor  # the router's own clean normalisation
    load: Tensor  # P(chosen) if the noise were drawn again; 0/1 where there is none
    chosen: Tensor  # selected before capacity
    combine: Tensor  # weight of each expert's output; 0 = not processed
    penalty: Tensor | None = None  # (B, T) what the router adds to the objective by itself

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> "RoutingRecord":
        """Return the record with each of its tensors changed."""
        return RoutingRecord(*(change(field) for field in self if field is not None))

    def with_penalty(self, penalty: Tensor | None) -> "RoutingRecord":
        """Return the record with this penalty; ``_replace`` stops the compiler of torch 2.11."""
        return RoutingRecord(*self[:-1], penalty)


def chosen_first_scores(scores: Tensor, chosen: Tensor) -> Tensor:
    """Return fp64 scores (B, T, E) by which the chosen experts come first, else in their order.

    A bias or groups of experts may choose others than the most probable.  chosen: (B, T, E) bool.
    """
    scores = scores.double()
    reach = scores.amax(dim=-1, keepdim=True) - scores.amin(dim=-1, keepdim=True)
    return scores + chosen * (reach + 1)


def first_choices(record: RoutingRecord) -> Tensor:
    """Return each token's most probable expert of those chosen, (B, T) int64; −1: none chosen."""
    first = chosen_first_scores(record.probs, record.chosen).argmax(dim=-1)
    return torch.where(record.chosen.any(dim=-1), first, -1)


class RoutingContext(NamedTuple):
    """What a router may look at beside its tokens (B, T, d); None if it is not in its ``wants``."""

    # (B, T, T) the block's attention, averaged over heads; each row sums to 1
    attention: Tensor | None = None
    # (B, T, d) the output of the block's attention, before the residual sum
    attended: Tensor | None = None
    # (B, T, pixels) of each token's patch, in [0, 1]; zeros for special tokens
    patches: Tensor | None = None
    words: Tensor | None = None  # (B, T) int64: the number of each token's word; of text
    teacher: Tensor | None = None  # (B, T, E) probs of the teacher's router at this layer
    basis: Tensor | None = None  # (E, d, r) the experts' bases
    progress: float = 1.0  # share of the training that is done
    truth: Tensor | None = None  # (B, T) int64: each token's kind, 1 and up; 0: unknown
    # (B, T, E, d) what every expert says of every token, where the router's ``phase`` is 0
    outputs: Tensor | None = None
    # (B, T', E) logits of the MoE layer before, where there is one; of a Swin T' may be another T
    previous: Tensor | None = None
    # (B, T) bool: tokens that only fill up a caption, whether wanted or not; None: there are none
    padding: Tensor | None = None

    def with_attention(
        self, wants: Collection[str], weights: Tensor | None, attended: Tensor
    ) -> "RoutingContext":
        """Return the context with what the router wants of the block's attention."""
        if "attended" not in wants:
            return self._replace(attention=weights)
        return self._replace(attention=weights, attended=attended)

    def with_previous(
        self, wants: Collection[str], records: Sequence[RoutingRecord]
    ) -> "RoutingContext":
        """Return the context with the logits of the last of ``records``, where they are wanted."""
        if "previous" not in wants or not records:
            return self
        return self._replace(previous=records[-1].logits)


class TokenLayout(NamedTuple):
    """How a model's T tokens lie: ``special`` ones first, then a ``grid`` of patches.

    The last axis of the grid is the fastest.
    """

    special: int
    grid: tuple[int, ...]  # patches along each axis
    size: tuple[int, ...]  # pixels along each axis


class ModelOutput(NamedTuple):
    """What ``model(images)`` gives: prediction (B, K), a record per MoE layer, each head's logits.

    A dense model has no records. The prediction of a real number is (B, 1), in the labels' unit.
    """

    prediction: Tensor
    routing: tuple[RoutingRecord, ...] = ()
    heads: tuple[Tensor, ...] = ()  # class head, then the distillation token's where there is one
    # in training with captions: what the task compares with, and the routing of their tokens
    target: Tensor | None = None
    text_routing: tuple[RoutingRecord, ...] = ()


class Batch(NamedTuple):
    """What one step learns from, or one pass looks at.

    images: in [0, 1], (B, C, H, W), or volumes (B, C, D, H, W), or word numbers (B, C, M) of text.
    labels: as the task stores them; with mixed images the shares of the classes, fp32 (B, K).
    affines: (B, A+1, A+1) over A axes; each maps a point (row, column, 1) of the original image to
    the view, (first, second, third axis, 1) of a volume; none of text. Pixel centres are at +0.5.
    With two ``views`` the second half of the batch are other views of the first half's images.
    """

    images: Tensor
    labels: Tensor
    affines: Tensor
    views: int = 1
    # (B, T) int64: the expert that a token of an isolated tissue belongs to, -1 for all other
    # tokens; None where no volume is isolated
    belongs: Tensor | None = None
    learned: Tensor | None = None  # (M,) int64: the images that the task learns from; None for all
    anew: bool = False  # text: its streams begin here, so nothing is remembered


class Guidance(NamedTuple):
    """What a frozen teacher says of a batch: prediction (B, K), its routers' probs (B, T, E)."""

    prediction: Tensor
    probs: tuple[Tensor, ...]


class ObjectiveInputs(NamedTuple):
    """All that an objective may look at in one training step."""

    batch: Batch
    output: ModelOutput
    model: Any
    guidance: Guidance | None = None
    progress: float = 0.0  # share of the training that is done, in [0, 1)
