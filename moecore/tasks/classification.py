"""Task with one class per image: labels int64 (N,), or fp32 (B, K), shares of mixed images."""

import base64
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from moecore.statistics import comparisons, intervals
from moecore.tasks.base import ExtraTestMetrics, Reduction, label_shape_error
from moecore.tasks.class_task import ClassTask, class_nll, confusion_counts, top1_hits, topk_hits

TOP_FIVE = 5  # most likely answers that count in ``top5``


class Classification(ClassTask):
    """Classify images: softmax cross-entropy, and accuracy of the largest logit."""

    kind: Literal["classification"] = "classification"

    def loss(
        self,
        prediction: Tensor,
        labels: Tensor,
        label_smoothing: float = 0.0,
        reduction: Reduction = "mean",
    ) -> Tensor:
        """Return the softmax cross-entropy in nats; labels: (B,) classes, or (B, K) shares."""
        return cross_entropy(
            prediction.float(), labels, label_smoothing=label_smoothing, reduction=reduction
        )

    def attack_loss(self, prediction: Tensor, labels: Tensor) -> Tensor:
        if labels.ndim == 1 and not labels.is_floating_point():
            return cross_entropy(prediction, labels.long(), reduction="none")
        if labels.shape != prediction.shape or not labels.is_floating_point():
            raise ValueError(
                f"attack: labels are {labels.dtype} {tuple(labels.shape)}; classes (B,) or one "
                "share per class (B, K) are needed"
            )
        return cross_entropy(prediction, labels.to(prediction.dtype), reduction="none")

    def test_loss(self, prediction: Tensor, labels: Tensor) -> Tensor:
        return class_nll(prediction, labels)

    def scores(self, prediction: Tensor, labels: Tensor) -> Tensor:
        return top1_hits(prediction, labels)

    def top5(self, prediction: Tensor, labels: Tensor) -> Tensor | None:
        if self.outputs <= TOP_FIVE:
            return None
        return topk_hits(prediction, labels, TOP_FIVE)

    def running(self, prediction: Tensor, labels: Tensor, learned: Tensor | None = None) -> Tensor:
        # Of mixed images the label with the larger share counts.
        classes = labels.argmax(dim=-1) if labels.is_floating_point() else labels
        right = top1_hits(prediction, classes)
        if learned is None:
            return right.sum()
        return right[learned].double().mean() * len(labels)

    def difference(
        self, one: Tensor, other: Tensor, level: float = 0.95, people: np.ndarray | None = None
    ) -> intervals.Interval:
        """Return the mean of ``one`` − ``other``, hits (N,) bool, and Newcombe's interval."""
        # Newcombe (1998). With ``people``, the interval is a bootstrap over people.
        if intervals.indices_by_person(people) is not None:
            pair = (one.numpy(), other.numpy())
            return comparisons.bootstrap_interval(*pair, level=level, people=people)
        hits = comparisons.count_paired_hits(one.numpy(), other.numpy())
        return comparisons.compute_newcombe_interval(hits, level)

    def details(self, prediction: Tensor, labels: Tensor, train_labels: Tensor) -> ExtraTestMetrics:
        """Return the number of correct images, the top-5 accuracy, and the confusion matrix."""
        hits = self.top5(prediction, labels)
        return ExtraTestMetrics(
            test_correct=int(self.scores(prediction, labels).sum()),
            test_top5=None if hits is None else intervals.Estimate.of(self.interval(hits)),
            confusion=confusion_counts(prediction, labels).tolist(),
        )

    def encode_scores(self, scores: Tensor) -> str | list[float]:
        """Encode hits in base64 of numpy.packbits, the first image in the highest bit."""
        return base64.b64encode(np.packbits(scores.numpy()).tobytes()).decode()

    def decode_scores(self, kept: str | Sequence[float], images: int) -> Tensor:
        if not isinstance(kept, str):
            raise ValueError("scores of classes are stored as base64")
        bits = np.frombuffer(base64.b64decode(kept), np.uint8)
        return torch.from_numpy(np.unpackbits(bits, count=images).astype(bool))

    def by_class(self, labels: Tensor) -> tuple[Tensor, Tensor] | None:
        return torch.arange(len(labels)), labels

    def storage_format(self, images: int) -> tuple[tuple[int, ...], type]:
        return (images,), np.int64

    def check(self, labels: np.ndarray, what: str) -> None:
        if labels.ndim != 1:
            raise label_shape_error(labels, what, "(images,)")
        super().check(labels, what)

    @classmethod
    def needs_classes(cls, what: str) -> str | None:
        return None
