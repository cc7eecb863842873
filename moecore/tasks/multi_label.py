"""Several classes per image: labels uint8 (N, K) (adversarial-moe, pretraining on JFT)."""

from typing import Literal

import numpy as np
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from moecore.core.files import UserError
from moecore.tasks.base import ExtraTestMetrics, Reduction, Score
from moecore.tasks.class_task import one_error
from moecore.tasks.classification import Classification


class MultiLabel(Classification):
    """Sigmoid cross-entropy, summed over the classes, and precision at 1."""

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
        """Sigmoid cross-entropy in nats, *summed* over the classes, as V-MoE's authors train on JFT
        (big_vision, ``sigmoid_xent``).

        A class then has the weight that it has in the softmax, however many classes there are.
        AdamW's steps do not depend on the scale of the loss, so learning rates stay what they were;
        beside balance losses the task counts more (K ln 2 against ln K at the start). Raises
        UserError for label smoothing.
        """
        if label_smoothing:
            problem = f"label_smoothing: found {label_smoothing}"
            raise UserError(f"{problem}, but {self.needs_classes('label_smoothing')}; allowed: 0")
        logits = prediction.float()
        wanted = labels.float()
        if reduction == "none":
            return binary_cross_entropy_with_logits(logits, wanted, reduction="none").sum(dim=1)
        return binary_cross_entropy_with_logits(logits, wanted, reduction="sum") / len(labels)

    def attack_loss(self, prediction: Tensor, labels: Tensor) -> Tensor:
        """Sigmoid cross-entropy per image, summed over classes, (B,)."""
        if labels.shape != prediction.shape or labels.is_floating_point():
            problem = f"labels are {labels.dtype} {tuple(labels.shape)}"
            raise ValueError(f"attack: {problem}; 0 or 1 per class (B, K) is needed")
        wanted = labels.to(prediction.dtype)
        return binary_cross_entropy_with_logits(prediction, wanted, reduction="none").sum(dim=1)

    def top5(self, prediction: Tensor, labels: Tensor) -> None:
        """Not defined: with several labels it is not one of them that has to be among five."""
        return None

    def baseline_score(self, labels: Tensor) -> float:
        """Share of the labels among all classes: precision at 1 of a class drawn evenly."""
        return float(labels.double().mean())

    def details(self, prediction: Tensor, labels: Tensor, train_labels: Tensor) -> ExtraTestMetrics:
        """Return how many are right; several labels have no class that is taken for another."""
        right = int(self.scores(prediction, labels).sum())
        missed = one_error(prediction, labels)
        return ExtraTestMetrics(test_correct=right, false_discovery_rate=missed)

    def by_class(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        rows, classes = labels.nonzero(as_tuple=True)
        return rows, classes

    def counts(self, labels: np.ndarray) -> list[int]:
        return labels.sum(axis=0, dtype=np.int64).tolist()

    def storage_format(self, images: int) -> tuple[tuple[int, ...], type]:
        return (images, self.outputs), np.uint8

    def check(self, labels: np.ndarray, what: str) -> None:
        """Raise UserError unless the labels are sets of at least one class, (N, K) of 0 and 1."""
        if labels.ndim != 2 or labels.shape[1] != self.outputs:
            allowed = f"allowed: (images, {self.outputs}) in every split"
            raise UserError(f"{what} have the shape {labels.shape}; {allowed}")
        if not np.isin(labels, (0, 1)).all() or not labels.any(axis=1).all():
            allowed = "allowed: 0 and 1, with a 1 for each image"
            raise UserError(f"{what} are not sets of classes; {allowed}")

    @classmethod
    def needs_classes(cls, what: str) -> str | None:
        if what in ("share", "classes", "class_maps", "confidence"):
            return None
        if what in ("distillation", "decision"):
            return "these images have several labels each, and a decision is one class"
        return "these images have several labels each"
