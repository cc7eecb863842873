"""The next word of a text: labels int64 (N, M), the word after each of a block's M tokens;
predictions (N, M, V), logits over the vocabulary.

An item is a block of M consecutive tokens: neighbours are not independent, so intervals are over
blocks.
"""

from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import cross_entropy

from moecore.core.files import UserError
from moecore.tasks.base import Details, Reduction, Score
from moecore.tasks.errors import Errors

ROWS = 2**24  # numbers of logits that are taken to float64 at a time


class NextToken(Errors):
    """Softmax cross-entropy in nats a token; its exponential is the perplexity."""

    kind: Literal["next_token"] = "next_token"
    words: int = Field(ge=2, description="of the vocabulary")

    @property
    def outputs(self) -> int:
        return self.words

    @property
    def answers(self) -> tuple[str, ...]:
        return (f"next of {self.words} words",)

    @property
    def score(self) -> Score:
        return Score("nats", "cross-entropy", "nats a token", "number", "lower")

    @property
    def long(self) -> bool:
        return True

    @property
    def logged(self) -> str:
        return "nats"

    @property
    def head(self) -> tuple[float, float]:
        return 0.0, 1.0

    def predict(self, output: Tensor) -> Tensor:
        """Logits, as they are."""
        return output

    def loss(
        self,
        prediction: Tensor,
        labels: Tensor,
        label_smoothing: float = 0.0,
        reduction: Reduction = "mean",
    ) -> Tensor:
        """Softmax cross-entropy, mean over tokens; (B,) means of blocks with ``reduction``
        "none".
        """
        self._fit(prediction, labels)
        each = cross_entropy(
            prediction.float().flatten(0, 1),
            labels.flatten().long(),
            label_smoothing=label_smoothing,
            reduction="mean" if reduction == "mean" else "none",
        )
        return each if reduction == "mean" else each.view(labels.shape).mean(dim=1)

    def attack_loss(self, prediction: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy of each block, (B,)."""
        return self.loss(prediction, labels, reduction="none").to(prediction.dtype)

    def test_loss(self, prediction: Tensor, labels: Tensor) -> Tensor:
        """Mean nats of each block, (N,) fp64."""
        return self.token_loss(prediction, labels).mean(dim=1)

    def token_loss(self, prediction: Tensor, labels: Tensor) -> Tensor:
        """Nats of each token, (N, M) fp64; the logits of few tokens at a time are in fp64."""
        self._fit(prediction, labels)
        rows = max(1, ROWS // self.words)
        found = []
        for some, right in zip(
            prediction.flatten(0, 1).split(rows), labels.flatten().long().split(rows), strict=True
        ):
            logits = some.double()
            own = logits.gather(1, right[:, None])[:, 0]
            found.append(torch.logsumexp(logits, dim=1) - own)
        return torch.cat(found).view(labels.shape)

    def scores(self, prediction: Tensor, labels: Tensor) -> Tensor:
        """Mean nats of each block, (N,) fp64."""
        return self.test_loss(prediction, labels)

    def running(self, prediction: Tensor, labels: Tensor, learned: Tensor | None = None) -> Tensor:
        return self.loss(prediction, labels) * len(labels)

    def mean_score(self, prediction: Tensor, labels: Tensor) -> float:
        return float(self.scores(prediction, labels).mean())

    def guess(self, labels: Tensor) -> float:
        """Nats a token of the labels' own frequencies: the entropy of their words."""
        counts = torch.bincount(labels.flatten().long()).double()
        shares = counts[counts > 0] / counts.sum()
        return float(-(shares * shares.log()).sum())

    def details(self, prediction: Tensor, labels: Tensor, train_labels: Tensor) -> Details:
        """Perplexity is of whole streams, not of blocks: see the model."""
        return Details()

    def stored(self, images: int) -> tuple[tuple[int, ...], type]:
        """Text is stored as tokens; this is what a split shows of it."""
        return (images,), np.int32

    def check(self, labels: np.ndarray, what: str) -> None:
        """Raise UserError unless the labels are words, 0 … V−1."""
        if len(labels) and not 0 <= labels.min() <= labels.max() < self.words:
            found = f"run from {labels.min()} to {labels.max()}"
            raise UserError(f"{what} {found}; allowed: 0 to {self.words - 1}")

    @classmethod
    def needs_classes(cls, what: str) -> str | None:
        if what in ("label_smoothing", "confidence"):
            return None
        if what == "share":
            return "a block of words is never simply right"
        if what in ("distillation", "decision"):
            return "an answer is a word at every token, no class of a picture"
        return "the labels are the words of a text"

    def _fit(self, prediction: Tensor, labels: Tensor) -> None:
        if prediction.shape != (*labels.shape, self.words):
            found = f"predictions {tuple(prediction.shape)} and labels {tuple(labels.shape)}"
            raise ValueError(f"next_token: {found}; (N, M, {self.words}) and (N, M) are needed")
