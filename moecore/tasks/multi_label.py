"""Task with several classes per image: labels uint8 (N, K) (adversarial-moe, JFT pretraining)."""

from typing import Literal

import numpy as np
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from moecore.core.files import UserError
from moecore.tasks.base import ExtraTestMetrics, Reduction, Score, label_shape_error
from moecore.tasks.classification import Classification


class MultiLabel(Classification):
    """Predict several classes: sigmoid cross-entropy, precision at 1 (adversarial-moe, eq. 18)."""

    kind: Literal["multi_label"] = "multi_label"  # pyrefly: ignore[bad-override]

    @property
    def score(self) -> Score:
        return Score("precision_at_1", "precision at 1", "", "share", "higher")

    def loss(
        self,
        prediction: Tensor,
        labels: Tensor,
        label_smoothing: float = 0.0,
        reduction: Reduction = "mean",
    ) -> Tensor:
        """Return the sigmoid cross-entropy in nats, *summed* over classes (big_vision's JFT)."""
        self.refuse_label_smoothing(label_smoothing)
        # With the sum a class weighs as much as in the softmax, for any number of classes. AdamW's
        # steps do not depend on the loss's scale, so learning rates need no change. Relative to
        # balance losses the task weighs more (at the start K ln 2 instead of ln K).
        logits, targets = prediction.float(), labels.float()
        if reduction == "none":
            return binary_cross_entropy_with_logits(logits, targets, reduction="none").sum(dim=1)
        return binary_cross_entropy_with_logits(logits, targets, reduction="sum") / len(labels)

    def attack_loss(self, prediction: Tensor, labels: Tensor) -> Tensor:
        if labels.shape != prediction.shape or labels.is_floating_point():
            raise ValueError(
                f"attack: labels are {labels.dtype} {tuple(labels.shape)}; 0 or 1 per class (B, K) "
                "is needed"
            )
        targets = labels.to(prediction.dtype)
        return binary_cross_entropy_with_logits(prediction, targets, reduction="none").sum(dim=1)

    def top5(self, prediction: Tensor, labels: Tensor) -> None:
        return None

    def baseline_score(self, labels: Tensor) -> float:
        """Return the share of labels among all classes: precision at 1 of a random class."""
        return float(labels.double().mean())

    def details(self, prediction: Tensor, labels: Tensor, train_labels: Tensor) -> ExtraTestMetrics:
        """Return the number of correct images and the false discovery rate, 1 − precision at 1."""
        hits = self.scores(prediction, labels)
        rate = 1 - float(hits.double().mean())
        return ExtraTestMetrics(test_correct=int(hits.sum()), false_discovery_rate=rate)

    def by_class(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        rows, classes = labels.nonzero(as_tuple=True)
        return rows, classes

    def counts(self, labels: np.ndarray) -> list[int]:
        return labels.sum(axis=0, dtype=np.int64).tolist()

    def storage_format(self, images: int) -> tuple[tuple[int, ...], type]:
        return (images, self.outputs), np.uint8

    def check(self, labels: np.ndarray, what: str) -> None:
        if labels.ndim != 2 or labels.shape[1] != self.outputs:
            raise label_shape_error(labels, what, f"(images, {self.outputs})")
        if not np.isin(labels, (0, 1)).all() or not labels.any(axis=1).all():
            raise UserError(f"{what} are not sets of classes; allowed: 0 and 1, a 1 per image")

    @classmethod
    def needs_classes(cls, what: str) -> str | None:
        if what in ("share", "classes", "class_maps", "confidence"):
            return None
        if what in ("distillation", "decision"):
            return "these images have several labels each, and a decision is one class"
        return "these images have several labels each"
