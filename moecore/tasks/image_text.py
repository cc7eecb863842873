"""Task of matching images and captions, which two towers map into one space.

B images of a batch, N images of a split, up to C captions per image, M tokens per caption, d
numbers of an embedding. Labels are tokens, int32 (N, C, M), NO_CAPTION throughout if it is missing.
Losses do not get the tokens but the output of the text tower for them:

- image side, the prediction (B, d + 1): scale · u, then the bias of the sigmoid loss (else 0);
- text side, the target (B, C, d + 3): v, then 1 (0 for a missing caption), then two numbers that
  identify the caption's text.

u and v have length 1, so image side · text side is the logit scale · u·v + bias. The score is the
recall at k in both directions, with ties.
"""

from typing import ClassVar, Literal, Self

import numpy as np
import torch
from pydantic import Field, PrivateAttr
from torch import Tensor
from torch.nn.functional import logsigmoid, pad

from moecore.core.files import UserError
from moecore.core.ranks import all_gather_rows, has_process_group, rank_and_size, total_over_ranks
from moecore.core.streams import BatchDraws
from moecore.tasks.base import Reduction, Score, Task, check_label_range, label_shape_error

NO_CAPTION = -1  # every token of a missing caption

TIE = 1e-6  # cosines that differ by less are equal: the order of a sum changes its rounding
CHUNK = 2**24  # numbers of a similarity matrix at a time
ID_LENGTH = 2  # last numbers of a text side, which identify the caption's text


class ImageText(Task):
    """Match images and captions by the loss of CLIP (softmax) or of SigLIP (sigmoid)."""

    of_captions: ClassVar[bool] = True

    kind: Literal["image_text"] = "image_text"
    words: int = Field(ge=2, description="of the vocabulary")
    context: int = Field(ge=2, description="tokens per caption, M")
    captions: int = Field(ge=1, description="largest number of captions per image, C")
    end: int = Field(ge=0, description="the token that ends a caption")
    vocabulary: str = Field(description="sha256 of the vocabulary")
    sided: bool = Field(False, description="captions say left or right: no view mirrors an image")
    width: int = Field(1, ge=1, description="of the joint space, d; set by the model")
    pairs: Literal["softmax", "sigmoid"] = Field("softmax", description="loss; set by the model")

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
        """Return one random caption of each image for a training step, (B, M), from (B, C, M)."""
        index = (draws.rand().to(labels.device) * (labels[:, :, 0] != NO_CAPTION).sum(dim=1)).long()
        index = index.clamp_max(labels.shape[1] - 1)
        return labels[torch.arange(len(labels), device=labels.device), index]

    def loss(
        self,
        prediction: Tensor,
        labels: Tensor,
        label_smoothing: float = 0.0,
        reduction: Reduction = "mean",
    ) -> Tensor:
        """Return the loss in nats: the mean over images, or (B,) with ``reduction`` "none"."""
        # labels: the text side, (B, C, d + 3); several captions are taken one by one and averaged.
        # In training each image is compared with the batches of all ranks, with gradient.
        self._check_shapes(prediction, labels)
        images = prediction.float()
        by_caption = [self._one_caption_loss(images, texts.float()) for texts in labels.unbind(1)]
        losses = torch.stack(by_caption).nanmean(dim=0)
        return losses.mean() if reduction == "mean" else losses

    def _one_caption_loss(self, images: Tensor, texts: Tensor) -> Tensor:
        """Return the loss (B,) of each image with its caption in ``texts``; NaN if missing."""
        first = 0
        all_images = images
        all_texts = texts
        if has_process_group() and images.requires_grad:
            ranks = rank_and_size()
            first = ranks.rank * len(images)
            missing = (0, 0, first, (ranks.size - 1) * len(images) - first)  # other ranks' rows
            all_images, all_texts = (total_over_ranks(pad(row, missing)) for row in (images, texts))
        matching = torch.arange(first, first + len(images), device=images.device)
        rows = torch.arange(len(images), device=images.device)
        # Two images with the same caption are no wrong answers to each other.
        same = (texts[:, None, -ID_LENGTH:] == all_texts[None, :, -ID_LENGTH:]).all(dim=-1)
        same[rows, matching] = False
        hidden = same | missing_caption_mask(all_texts)
        by_image = images @ all_texts[:, :-ID_LENGTH].T
        if self.pairs == "sigmoid":
            sign = torch.full_like(by_image, -1.0)
            sign[rows, matching] = 1.0
            losses = -logsigmoid(sign * by_image).masked_fill(hidden, 0.0).sum(dim=1)
        else:
            by_text = texts[:, :-ID_LENGTH] @ all_images.T
            image_losses = row_cross_entropy(by_image, matching, hidden)
            losses = (image_losses + row_cross_entropy(by_text, matching, hidden)) / 2
        return losses.masked_fill(missing_caption_mask(texts), float("nan"))

    def with_gallery(self, labels: Tensor) -> Self:
        """Return a copy whose attack loss has all encoded captions (N, C, d + 3) as negatives."""
        task = self.model_copy()
        task._gallery = labels
        return task

    def attack_loss(self, prediction: Tensor, labels: Tensor) -> Tensor:
        """Return −log of the softmax probability of an image's own captions, (B,)."""
        # Without ``with_gallery``: among the batch's. labels: text sides (B, C, d + 3).
        self._check_shapes(prediction, labels)
        texts = (labels if self._gallery is None else self._gallery).flatten(0, 1).to(prediction)
        hidden = missing_caption_mask(texts)
        all_logits = (prediction @ texts[:, :-ID_LENGTH].T).masked_fill(hidden, -torch.inf)
        texts = labels.to(prediction)
        right_logits = (prediction[:, None] * texts[:, :, :-ID_LENGTH]).sum(dim=-1)
        right_logits = right_logits.masked_fill(missing_caption_mask(texts), -torch.inf)
        return all_logits.logsumexp(dim=1) - right_logits.logsumexp(dim=1)

    def test_loss(self, prediction: Tensor, labels: Tensor) -> Tensor:
        return self.loss(prediction, labels, reduction="none").double()

    def scores(self, prediction: Tensor, labels: Tensor) -> Tensor:
        """Return the share of an image's captions that rank it first of all images, (N,) fp64."""
        return text_to_image_recall(prediction, labels, (1,))[:, 0]

    def running(self, prediction: Tensor, labels: Tensor, learned: Tensor | None = None) -> Tensor:
        """Count this process's captions that rank their own image first of all images."""
        logits = all_gather_rows(prediction.float()) @ labels[:, 0, :-ID_LENGTH].float().T
        captions = torch.arange(logits.shape[1], device=logits.device)
        return (logits.argmax(dim=0) == captions + rank_and_size().rank * len(captions)).sum()

    def baseline_score(self, labels: Tensor) -> float:
        """Return chance level, 1 / N."""
        return 1 / max(1, len(labels))

    def storage_format(self, images: int) -> tuple[tuple[int, ...], type]:
        return (images, self.captions, self.context), np.int32

    def check(self, labels: np.ndarray, what: str) -> None:
        if labels.shape[1:] != (self.captions, self.context):
            raise label_shape_error(labels, what, f"(images, {self.captions}, {self.context})")
        exists = labels[:, :, 0] != NO_CAPTION
        if len(labels) and not exists.any(axis=1).all():
            image = int((~exists.any(axis=1)).argmax())
            raise UserError(f"{what}: image {image} has no caption; allowed: at least one")
        captions = labels[exists]
        check_label_range(captions, self.words, what)
        if not (captions == self.end).any(axis=1).all():
            raise UserError(f"{what}: a caption does not end; allowed: token {self.end} in each")

    @classmethod
    def needs_classes(cls, what: str) -> str | None:
        if what == "share":
            return "an image has several captions, each found or not"
        if what == "mix":
            return "a mixed image has no caption of its own"
        return "captions are no classes"

    def _check_shapes(self, prediction: Tensor, labels: Tensor) -> None:
        expected = (len(prediction), prediction.shape[1] + ID_LENGTH)
        if labels.ndim != 3 or (len(labels), labels.shape[2]) != expected:
            raise ValueError(
                f"image_text: predictions {tuple(prediction.shape)} and labels "
                f"{tuple(labels.shape)}; (B, d + 1) and (B, C, d + 3) are needed"
            )


def row_cross_entropy(logits: Tensor, right: Tensor, hidden: Tensor) -> Tensor:
    """Return each row's cross-entropy with target column ``right`` (b,); mask out ``hidden``."""
    logits = logits.masked_fill(hidden, -torch.inf)
    return logits.logsumexp(dim=1) - logits.gather(1, right[:, None])[:, 0]


def missing_caption_mask(texts: Tensor) -> Tensor:
    """Return which captions (…, d + 3) are missing, bool (…): number d is 0 if missing, else 1."""
    return texts[..., -ID_LENGTH - 1] == 0


def cosine_matrix(images: Tensor, texts: Tensor) -> Tensor:
    """Return the cosines, fp64 (N, n), of the first d columns of (N, d + 1) and (n, d + 3)."""
    image_directions = torch.nn.functional.normalize(images[:, :-1].double(), dim=1)
    text_directions = torch.nn.functional.normalize(texts[:, : -ID_LENGTH - 1].double(), dim=1)
    return image_directions @ text_directions.T


def similarity_logits(images: Tensor, texts: Tensor) -> Tensor:
    """Return scale · u·v + bias, (N, n), of (N, d + 1: scale · u, bias), (n, d + 3: v, 1, id)."""
    return images @ texts[:, :-ID_LENGTH].T


def text_to_image_recall(images: Tensor, texts: Tensor, at: tuple[int, ...]) -> Tensor:
    """Return recall at each k of ``at``, mean over captions of an image: (N, len(at)) fp64."""
    # Per image (N, d + 1), the share of its captions (N, C, d + 3) that rank it among the k nearest
    # of all images. Ties count by the share of their random orders that are hits.
    number, captions = texts.shape[:2]
    flat = texts.flatten(0, 1)
    exists = ~missing_caption_mask(flat)
    image_of_caption = torch.arange(number, device=flat.device).repeat_interleave(captions)
    size = max(1, CHUNK // number)
    hits = []
    for texts_chunk, owners in zip(flat.split(size), image_of_caption.split(size), strict=True):
        cosines = cosine_matrix(images, texts_chunk)  # (N, n)
        right = cosines.gather(0, owners[None])[0]
        above = (cosines > right + TIE).sum(dim=0)
        tied = ((cosines - right).abs() <= TIE).sum(dim=0) - 1
        hits.append(tie_hit_probability(above, tied, torch.ones_like(tied), at))
    recall = torch.cat(hits).masked_fill(~exists[:, None], 0.0).view(number, captions, len(at))
    return recall.sum(dim=1) / exists.view(number, captions).sum(dim=1, keepdim=True)


def image_to_text_recall(images: Tensor, texts: Tensor, at: tuple[int, ...]) -> Tensor:
    """Return image-to-text recall at each k of ``at``, per image: (N, len(at)) fp64."""
    # Whether one of an image's captions is among the k nearest of all captions (N, C, d + 3). Ties
    # of its nearest caption count as in ``text_to_image_recall``.
    number, captions = texts.shape[:2]
    flat = texts.flatten(0, 1)
    exists = ~missing_caption_mask(flat)
    size = max(1, CHUNK // len(flat))
    hits = []
    for first in range(0, number, size):
        cosines = cosine_matrix(images[first : first + size], flat).masked_fill(~exists, -2.0)
        rows = torch.arange(len(cosines), device=cosines.device)
        is_right = torch.zeros_like(cosines, dtype=torch.bool)
        for caption in range(captions):
            is_right[rows, (first + rows) * captions + caption] = True
        best = cosines.masked_fill(~is_right, -2.0).amax(dim=1, keepdim=True)
        above = (cosines > best + TIE).sum(dim=1)
        tied = (cosines - best).abs() <= TIE
        wrong_ties = (tied & ~is_right).sum(dim=1)
        hits.append(tie_hit_probability(above, wrong_ties, (tied & is_right).sum(dim=1), at))
    return torch.cat(hits)


def tie_hit_probability(above: Tensor, wrong: Tensor, right: Tensor, at: tuple[int, ...]) -> Tensor:
    """Return the probability that any right answer is in the first k, with ties in random order."""
    # (n, len(at)) fp64: 1 − C(wrong, r)/C(wrong + right, r), r = k − above ranks are for the tie.
    # above: (n,), answers before the tie; wrong, right: (n,), numbers of answers in the tie.
    cutoffs = torch.tensor(at, dtype=torch.float64, device=above.device)
    places = cutoffs[None, :] - above.double()[:, None]
    share = torch.zeros_like(places)
    for number in range(1, int(right.max()) + 1):
        gain = (places / (wrong.double()[:, None] + number)).clamp(0.0, 1.0)
        share += (1 - share) * gain * (right >= number)[:, None]
    return share
