"""Routing records, batches and other types that routers, losses, metrics and attacks share."""

from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor

# Where a teacher's features are read: the input of a block's feed-forward layer, the block's
# output, or the final normalised tokens.
Feature = Literal["mlp_input", "block_out", "final"]


class RoutingRecord(NamedTuple):
    """The decisions of one MoE layer's router.

    Fields are fp32 (B images, T tokens, E experts), except ``chosen`` (bool) and ``penalty``: (B,
    T), the router's own loss. ``load``: chance of being chosen; ``combine``: weight of the output.
    """

    logits: Tensor  # scores before noise
    probs: Tensor  # the router's normalised scores, without noise
    load: Tensor  # P(chosen) over draws of the noise; 0 or 1 without noise
    chosen: Tensor  # selected before capacity
    combine: Tensor  # weight of each expert's output; 0 = not processed
    penalty: Tensor | None = None  # (B, T) the router's term of the objective

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> "RoutingRecord":
        """Return the record with ``change`` applied to each tensor."""
        return RoutingRecord(*(change(field) for field in self if field is not None))

    def with_penalty(self, penalty: Tensor | None) -> "RoutingRecord":
        """Return a copy with this penalty; ``_replace`` does not compile in torch 2.11."""
        return RoutingRecord(*self[:-1], penalty)


def raise_scores_of_chosen(scores: Tensor, chosen: Tensor) -> Tensor:
    """Return scores (B, T, E) fp64 in which chosen experts rank first, otherwise in score order."""
    # With a bias or groups of experts, the chosen experts may not be the most probable.
    scores = scores.double()
    reach = scores.amax(dim=-1, keepdim=True) - scores.amin(dim=-1, keepdim=True)
    return scores + chosen * (reach + 1)


def choice_margin(scores: Tensor, chosen: Tensor) -> Tensor:
    """Return each token's lowest chosen score minus its highest other score, (B, T) fp64."""
    # scores: (B, T, E), −∞ for experts that could not be chosen. Negative if other scores decided,
    # as with a balance; NaN if a token chose none, or all that it could.
    scores = scores.double()
    lowest = scores.where(chosen, torch.inf).amin(dim=-1)
    highest = scores.where(~chosen, -torch.inf).amax(dim=-1)
    margin = lowest - highest
    return margin.where(margin.isfinite(), torch.nan)


def first_choices(record: RoutingRecord) -> Tensor:
    """Return each token's most probable chosen expert, (B, T) int64; −1 if none is chosen."""
    first = raise_scores_of_chosen(record.probs, record.chosen).argmax(dim=-1)
    return torch.where(record.chosen.any(dim=-1), first, -1)


class RoutingContext(NamedTuple):
    """Inputs of a router in addition to tokens (B, T, d); None for fields not in its ``wants``."""

    # (B, T, T) the block's attention, averaged over heads; each row sums to 1
    attention: Tensor | None = None
    # (B, T, d) the output of the block's attention, before the residual sum
    attended: Tensor | None = None
    # (B, T, pixels) of each token's patch, in [0, 1]; zeros for special tokens
    patches: Tensor | None = None
    words: Tensor | None = None  # (B, T) int64: each token's word number, in text
    teacher: Tensor | None = None  # (B, T, E) probs of the teacher's router at this layer
    basis: Tensor | None = None  # (E, d, r) the experts' bases
    progress: float = 1.0  # share of the training that is done
    truth: Tensor | None = None  # (B, T) int64: each token's kind, from 1; 0: unknown
    # (B, T, E, d) output of every expert for every token, if the router's ``phase`` is 0
    outputs: Tensor | None = None
    # (B, T', E) logits of the previous MoE layer, if any; in a Swin, T' may differ from T
    previous: Tensor | None = None
    # (B, T) bool: padding of captions, set even if not in ``wants``; None: no padding
    padding: Tensor | None = None

    def with_attention(
        self, wants: Collection[str], weights: Tensor | None, attended: Tensor
    ) -> Self:
        """Return a copy with attention ``weights``, and output ``attended`` if ``wants`` has it."""
        if "attended" not in wants:
            return self._replace(attention=weights)
        return self._replace(attention=weights, attended=attended)

    def with_previous(self, wants: Collection[str], records: Sequence[RoutingRecord]) -> Self:
        """Return a copy with the last record's logits if ``wants`` contains "previous"."""
        if "previous" not in wants or not records:
            return self
        return self._replace(previous=records[-1].logits)


NO_CONTEXT = RoutingContext()


class TokenLayout(NamedTuple):
    """The order of T tokens: ``special``, then a row-major ``grid`` of patches; size: pixels."""

    special: int  # number of tokens that are no patches: class and distillation tokens
    grid: tuple[int, ...]  # patches along each axis
    size: tuple[int, ...]  # pixels along each axis


class ModelOutput(NamedTuple):
    """The output of ``model(images)``: the prediction and one routing record per MoE layer.

    A dense model has no records. The prediction of a real number is (B, 1), in the labels' unit.
    """

    prediction: Tensor  # (B, K) logits, or (B, 1) of a number
    routing: tuple[RoutingRecord, ...] = ()  # per MoE layer, from the first
    heads: tuple[Tensor, ...] = ()  # class head, then the distillation token's head, if any
    target: Tensor | None = None  # in training with captions: the task's targets
    text_routing: tuple[RoutingRecord, ...] = ()  # then also the routing of the captions' tokens


class Batch(NamedTuple):
    """Images, labels and view geometry (``affines``) of a training step or an evaluation pass."""

    # (B, C, H, W) in [0, 1], volumes (B, C, D, H, W), or word numbers (B, C, M) of text
    images: Tensor
    labels: Tensor  # as the task stores them; of mixed images the shares of classes, fp32 (B, K)
    # (B, A+1, A+1) over A axes; each maps a point (row, column, 1) of the original image to the
    # view, (first, second, third axis, 1) of a volume; none for text. Pixel centres are at +0.5.
    affines: Tensor
    views: int = 1  # 2: the second half of the batch shows other views of the first half's images
    # (B, T) int64: the expert of a token of an isolated tissue, -1 for other tokens; None if no
    # volume is isolated
    belongs: Tensor | None = None
    learned: Tensor | None = None  # (M,) int64: the images that the task learns from; None for all
    anew: bool = False  # text: its streams begin here, so models clear their memory


class Guidance(NamedTuple):
    """A frozen teacher's output for B images: K predictions per image, and its routers' probs."""

    prediction: Tensor  # (B, K)
    probs: tuple[Tensor, ...]  # (B, T, E) of each of its routers


class ObjectiveInputs(NamedTuple):
    """The inputs of an objective in one training step."""

    batch: Batch  # of the step
    output: ModelOutput  # of the model for this batch
    model: Any  # the BackboneModel in training
    guidance: Guidance | None = None  # of the frozen teacher, if the method has one
    progress: float = 0.0  # share of the training that is done, in [0, 1)
