"""Which caption belongs to which image: two towers bring both into one space.

B images of a batch, N images of a split, C captions of an image at most, M tokens of a caption, d
numbers of an embedding. Labels are tokens, int32 (N, C, M), NONE throughout where an image has
fewer captions; what a loss is given in their place is what the text tower made of them:

- image side, the prediction (B, d + 1): scale · u, then the bias of the sigmoid loss (else 0);
- text side, the target (B, C, d + 3): v, then 1 (0 where there is no caption), then two numbers
  that tell different captions apart.

u and v have length 1, so that image side · text side is the logit scale · u·v + bias. The score is
the recall at k, both ways, with ties.
"""

from typing import ClassVar, Literal, Self

import numpy as np
import torch
from pydantic import Field, PrivateAttr
from torch import Tensor
from torch.nn.functional import logsigmoid

from moecore.core.files import UserError
from moecore.core.ranks import all_gather_rows, current_ranks, has_process_group, total_over_ranks
from moecore.core.streams import BatchDraws
from moecore.tasks.base import Reduction, Score, Task

NONE = -1  # every token of a caption that is not there
WORDS = "captions are no classes"

TIE = 1e-6  # cosines that differ by less are one: two orders of a sum round otherwise
CHUNK = 2**24  # numbers of a similarity matrix at a time
MARKS = 2  # numbers behind an embedding that tell captions apart


class ImageText(Task):
    """Symmetric cross-entropy (CLIP; Radford et al. 2021) or sigmoid (SigLIP; Zhai et al. 2023)."""

    of_captions: ClassVar[bool] = True

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


def missing_caption_mask(texts: Tensor) -> Tensor:
    """Return which text sides (…, d + 3) stand for no caption: bool (…)."""
    return texts[..., -MARKS - 1] == 0


def cosine_matrix(images: Tensor, texts: Tensor) -> Tensor:
    """fp64 (N, n) of image sides (N, d + 1) and text sides (n, d + 3)."""
    left = torch.nn.functional.normalize(images[:, :-1].double(), dim=1)
    right = torch.nn.functional.normalize(texts[:, : -MARKS - 1].double(), dim=1)
    return left @ right.T


def similarity_matrix(images: Tensor, texts: Tensor) -> Tensor:
    """(N, n) of image sides (N, d + 1) and text sides (n, d + 3): scale · cosine + bias."""
    return images @ texts[:, :-MARKS].T


def text_to_image_recall(images: Tensor, texts: Tensor, at: tuple[int, ...]) -> Tensor:
    """R@k of the captions (N, C, d + 3) of each image among all images (N, d + 1): (N, k) fp64,
    means over an image's captions.

    A tie counts for the share of its orders in which the image is among the first k.
    """
    number, captions = texts.shape[:2]
    flat = texts.flatten(0, 1)
    there = ~missing_caption_mask(flat)
    owner = torch.arange(number, device=flat.device).repeat_interleave(captions)
    rows = []
    for part, who in zip(
        flat.split(max(1, CHUNK // number)), owner.split(max(1, CHUNK // number)), strict=True
    ):
        cosines = cosine_matrix(images, part)  # (N, n)
        right = cosines.gather(0, who[None])[0]
        above = (cosines > right + TIE).sum(dim=0)
        level = ((cosines - right).abs() <= TIE).sum(dim=0) - 1
        rows.append(hit_probability_under_ties(above, level, torch.ones_like(level), at))
    each = torch.cat(rows).masked_fill(~there[:, None], 0.0).view(number, captions, len(at))
    return each.sum(dim=1) / there.view(number, captions).sum(dim=1, keepdim=True)


def image_to_text_recall(images: Tensor, texts: Tensor, at: tuple[int, ...]) -> Tensor:
    """R@k of each image (N, d + 1) among all captions (N, C, d + 3): (N, k) fp64; any of its
    captions counts. Ties as in ``text_to_image_recall``, of the nearest own captions.
    """
    number, captions = texts.shape[:2]
    flat = texts.flatten(0, 1)
    there = ~missing_caption_mask(flat)
    size = max(1, CHUNK // len(flat))
    hits = []
    for first in range(0, number, size):
        cosines = cosine_matrix(images[first : first + size], flat).masked_fill(~there, -2.0)
        rows = torch.arange(len(cosines), device=cosines.device)
        own = torch.zeros_like(cosines, dtype=torch.bool)
        for caption in range(captions):
            own[rows, (first + rows) * captions + caption] = True
        best = cosines.masked_fill(~own, -2.0).amax(dim=1, keepdim=True)
        above = (cosines > best + TIE).sum(dim=1)
        equal = (cosines - best).abs() <= TIE
        hits.append(
            hit_probability_under_ties(
                above, (equal & ~own).sum(dim=1), (equal & own).sum(dim=1), at
            )
        )
    return torch.cat(hits)


def hit_probability_under_ties(
    above: Tensor, others: Tensor, own: Tensor, at: tuple[int, ...]
) -> Tensor:
    """Return the share of a tie's orders in which one of its right answers is among the first k:
    (n, k) fp64; 1 − C(others, r)/C(others + own, r) with r = k − above places for the tie.

    above: (n,), answers before the tie; others and own: (n,), wrong and right answers in it.
    """
    places = torch.tensor(at, dtype=torch.float64, device=above.device)
    room = places[None, :] - above.double()[:, None]
    share = torch.zeros_like(room)
    for right in range(1, int(own.max()) + 1):
        more = (room / (others.double()[:, None] + right)).clamp(0.0, 1.0)
        share += (1 - share) * more * (own >= right)[:, None]
    return share
