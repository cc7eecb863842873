"""Which caption belongs to which image: two towers bring both into one space.

B images of a batch, N images of a split, C captions of an image at most, M tokens of a caption, d
numbers of an embedding. Labels are tokens, int32 (N, C, M), NONE throughout where an image has
fewer captions; what a loss is given in their place is what the text tower made of them:

- image side, the prediction (B, d + 1): scale · u, then the bias of the sigmoid loss (else 0);
- text side, the target (B, C, d + 3): v, then 1 (0 where there is no caption), then two numbers
  that tell different captions apart.

u and v have length 1, so that image side · text side is the logit scale · u·v + bias.
"""

from typing import Literal, Self

import numpy as np
import torch
from pydantic import Field, PrivateAttr
from torch import Tensor
from torch.nn.functional import logsigmoid

from moecore.core.files import UserError
from moecore.core.ranks import all_gather_rows, current_ranks, has_process_group, total_over_ranks
from moecore.core.streams import BatchDraws
from moecore.tasks.base import Reduction, Score, Task
from moecore.tasks.image_text import MARKS, missing_caption_mask, text_to_image_recall

NONE = -1  # every token of a caption that is not there
WORDS = "captions are no classes"


class ImageText(Task):
    """Symmetric cross-entropy (CLIP; Radford et al. 2021) or sigmoid (SigLIP; Zhai et al. 2023)."""

    kind: Literal["image_text"] = "image_text"
    words: int = Field(ge=2, description="of the vocabulary")
    context: int = Field(ge=2, description="tokens of a caption, M")
    captions: int = Field(ge=1, description="of an image at most, C")
    end: int = Field(ge=0, description="the token that ends a caption")
    vocabulary: str = Field(description="sha256 of the vocabulary")
    sided: bool = Field(
        False, description="captions say left and right: no view may mirror an image"
    )
    width: int = Field(1, ge=1, description="of the joint space, d; the model says it")
    pairs: Literal["softmax", "sigmoid"] = Field(
        "softmax", description="the loss; the model says it"
    )

    _gallery: Tensor | None = PrivateAttr(default=None)

    @property
    def outputs(self) -> int:
        return self.width

    @property
    def answers(self) -> tuple[str, ...]:
        return (f"captions of {self.words} words ({self.vocabulary[:12]})",)

    @property
    def score(self) -> Score:
        return Score("recall_at_1", "text → image R@1", "", "share", "higher")

    def drawn(self, labels: Tensor, draws: BatchDraws) -> Tensor:
        """One of the captions (B, C, M) of each image, (B, M): what a step learns from."""
        there = (labels[:, :, 0] != NONE).sum(dim=1)
        chosen = (draws.rand().to(labels.device) * there).long().clamp_max(labels.shape[1] - 1)
        return labels[torch.arange(len(labels), device=labels.device), chosen]

    def loss(
        self,
        prediction: Tensor,
        labels: Tensor,
        label_smoothing: float = 0.0,
        reduction: Reduction = "mean",
    ) -> Tensor:
        """Mean over images of the loss in nats; (B,) with ``reduction`` "none".

        labels: the text side, (B, C, d + 3); of several captions each has its turn, and the mean
        counts. One and the same caption of two images is no wrong answer to either. In training the
        whole batch of all ranks is compared, with gradient.
        """
        self._check_shapes(prediction, labels)
        images = prediction.float()
        turns = [self._one_caption_loss(images, texts.float()) for texts in labels.unbind(1)]
        each = torch.stack(turns).nanmean(dim=0)
        return each.mean() if reduction == "mean" else each

    def _one_caption_loss(self, images: Tensor, texts: Tensor) -> Tensor:
        """The loss of each image with one caption of each, (B,); NaN where one has none."""
        first, every_image, every_text = 0, images, texts
        if has_process_group() and images.requires_grad:
            every_image, every_text = map(all_gather_with_gradient, (images, texts))
            first = current_ranks().rank * len(images)
        own = torch.arange(first, first + len(images), device=images.device)
        same = (texts[:, None, -MARKS:] == every_text[None, :, -MARKS:]).all(dim=-1)
        same[torch.arange(len(own), device=own.device), own] = False
        hidden = same | missing_caption_mask(every_text)
        by_image = images @ every_text[:, :-MARKS].T
        by_text = texts[:, :-MARKS] @ every_image.T
        if self.pairs == "sigmoid":
            sign = torch.full_like(by_image, -1.0)
            sign[torch.arange(len(own), device=own.device), own] = 1.0
            losses = -logsigmoid(sign * by_image).masked_fill(hidden, 0.0).sum(dim=1)
        else:
            both = [row_cross_entropy(logits, own, hidden) for logits in (by_image, by_text)]
            losses = (both[0] + both[1]) / 2
        return losses.masked_fill(missing_caption_mask(texts), float("nan"))

    def with_gallery(self, labels: Tensor) -> Self:
        """Return a copy whose attacks compare with all of these text sides (N, C, d + 3)."""
        task = self.model_copy()
        task._gallery = labels
        return task

    def attack_loss(self, prediction: Tensor, labels: Tensor) -> Tensor:
        """−log of the share that an image's own captions have among those of all images that are
        attacked (``with_gallery``), else of the batch: (B,). labels: text sides (B, C, d + 3).
        """
        self._check_shapes(prediction, labels)
        gallery = labels if self._gallery is None else self._gallery
        texts = gallery.flatten(0, 1).to(prediction)
        every = (prediction @ texts[:, :-MARKS].T).masked_fill(
            missing_caption_mask(texts), -torch.inf
        )
        texts = labels.to(prediction)
        own = (prediction[:, None] * texts[:, :, :-MARKS]).sum(dim=-1)
        own = own.masked_fill(missing_caption_mask(texts), -torch.inf)
        return every.logsumexp(dim=1) - own.logsumexp(dim=1)

    def test_loss(self, prediction: Tensor, labels: Tensor) -> Tensor:
        """The loss of each image among all, (N,) fp64."""
        return self.loss(prediction, labels, reduction="none").double()

    def scores(self, prediction: Tensor, labels: Tensor) -> Tensor:
        """Share of an image's captions that find it first among all images, (N,) fp64."""
        return text_to_image_recall(prediction, labels, (1,))[:, 0]

    def running(self, prediction: Tensor, labels: Tensor, learned: Tensor | None = None) -> Tensor:
        """Return how many captions find their image first in the batch, of all ranks."""
        every = all_gather_rows(prediction.float())
        logits = every @ labels[:, 0, :-MARKS].float().T
        own = torch.arange(logits.shape[1], device=logits.device)
        return (logits.argmax(dim=0) == own + current_ranks().rank * len(own)).sum()

    def baseline_score(self, labels: Tensor) -> float:
        """Chance: one image of all."""
        return 1 / max(1, len(labels))

    def storage_format(self, images: int) -> tuple[tuple[int, ...], type]:
        return (images, self.captions, self.context), np.int32

    def check(self, labels: np.ndarray, what: str) -> None:
        """Raise UserError unless labels are captions, each ended, one at least an image."""
        if labels.shape[1:] != (self.captions, self.context):
            allowed = f"(images, {self.captions}, {self.context})"
            raise UserError(f"{what} have the shape {labels.shape}; allowed: {allowed}")
        there = labels[:, :, 0] != NONE
        if len(labels) and not there.any(axis=1).all():
            image = int((~there.any(axis=1)).argmax())
            raise UserError(f"{what}: image {image} has no caption; allowed: one at least")
        captions = labels[there]
        if len(captions) and not 0 <= captions.min() <= captions.max() < self.words:
            problem = f"run from {captions.min()} to {captions.max()}"
            raise UserError(f"{what} {problem}; allowed: 0 to {self.words - 1}")
        if not (captions == self.end).any(axis=1).all():
            raise UserError(f"{what}: a caption does not end; allowed: token {self.end} in each")

    @classmethod
    def needs_classes(cls, what: str) -> str | None:
        if what == "share":
            return "an image has several captions, each found or not"
        if what == "mix":
            return "a mixed image has no caption of its own"
        return WORDS

    def _check_shapes(self, prediction: Tensor, labels: Tensor) -> None:
        wanted = (len(prediction), prediction.shape[1] + MARKS)
        if labels.ndim != 3 or (len(labels), labels.shape[2]) != wanted:
            problem = f"predictions {tuple(prediction.shape)} and labels {tuple(labels.shape)}"
            raise ValueError(f"image_text: {problem}; (B, d + 1) and (B, C, d + 3) are needed")


def all_gather_with_gradient(own: Tensor) -> Tensor:
    """The rows (B, …) of all ranks, of which this one has (b, …), with gradient."""
    here = current_ranks()
    before = own.new_zeros(here.rank * len(own), *own.shape[1:])
    after = own.new_zeros((here.size - here.rank - 1) * len(own), *own.shape[1:])
    return total_over_ranks(torch.cat([before, own, after]))


def row_cross_entropy(logits: Tensor, own: Tensor, hidden: Tensor) -> Tensor:
    """Cross-entropy of each row with the column ``own`` (b,); ``hidden`` ones do not count."""
    logits = logits.masked_fill(hidden, -torch.inf)
    return logits.logsumexp(dim=1) - logits.gather(1, own[:, None])[:, 0]
