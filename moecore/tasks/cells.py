"""Task with one class per cell of G × G mosaics: predictions (B, G²·K), labels int64 (B, G²)."""

from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import cross_entropy

from moecore.tasks import base, class_task

SEVERAL_LABELS_REASON = "these mosaics have a label for each cell"


class Cells(class_task.ClassTask):
    """Classify every cell of a mosaic: softmax cross-entropy and share of right cells."""

    kind: Literal["cells"] = "cells"
    grid: int = Field(ge=1, description="cells along each side of a mosaic")

    @property
    def cells(self) -> int:
        return self.grid**2

    def loss(
        self,
        prediction: Tensor,
        labels: Tensor,
        label_smoothing: float = 0.0,
        reduction: base.Reduction = "mean",
    ) -> Tensor:
        """Return the softmax cross-entropy in nats, mean over cells: a scalar, or (B,)."""
        logits = self._by_cell(prediction).float().transpose(1, 2)
        losses = cross_entropy(logits, labels, label_smoothing=label_smoothing, reduction="none")
        if reduction == "mean":
            return losses.mean()
        return losses.mean(dim=1)

    def attack_loss(self, prediction: Tensor, labels: Tensor) -> Tensor:
        logits = self._by_cell(prediction).transpose(1, 2)
        return cross_entropy(logits, labels.long(), reduction="none").mean(dim=1)

    def test_loss(self, prediction: Tensor, labels: Tensor) -> Tensor:
        losses = class_task.class_nll(self._by_cell(prediction).flatten(0, 1), labels.flatten())
        return losses.view(labels.shape).mean(dim=1)

    def scores(self, prediction: Tensor, labels: Tensor) -> Tensor:
        """Return the share of correctly classified cells of each mosaic, (N,) fp64."""
        return (self._by_cell(prediction).argmax(dim=-1) == labels).double().mean(dim=1)

    def running(self, prediction: Tensor, labels: Tensor, learned: Tensor | None = None) -> Tensor:
        scores = self.scores(prediction, labels)
        if learned is None:
            return scores.sum()
        return scores[learned].mean() * len(labels)

    def by_class(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        return torch.arange(len(labels)).repeat_interleave(self.cells), labels.flatten()

    def storage_format(self, images: int) -> tuple[tuple[int, ...], type]:
        return (images, self.cells), np.int64

    def check(self, labels: np.ndarray, what: str) -> None:
        if labels.ndim != 2 or labels.shape[1] != self.cells:
            raise base.label_shape_error(labels, what, f"(images, {self.cells})")
        super().check(labels, what)

    @classmethod
    def needs_classes(cls, what: str) -> str | None:
        return None if what in ("label_smoothing", "classes") else SEVERAL_LABELS_REASON

    def _by_cell(self, prediction: Tensor) -> Tensor:
        return prediction.unflatten(1, (self.cells, self.outputs))
