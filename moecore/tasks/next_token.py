"""Task of predicting the next word: labels int64 (N, M), logits (N, M, V) of V words.

Intervals are over blocks of M tokens, as neighbouring tokens are not independent.
"""

from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import cross_entropy

from moecore.tasks.base import Reduction, Score, Task, check_label_range

CHUNK_SIZE = 2**19  # logits that are processed together, 2 MiB: they stay in the cache
MIN_CHUNK_ROWS = 8  # words per chunk at least, for large vocabularies


class NextToken(Task):
    """Predict the next word: cross-entropy in nats per token, whose exp is the perplexity."""

    of_text: ClassVar[bool] = True

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
        return Score("nats", "cross-entropy", "nats per token", "number", "lower")

    @property
    def long(self) -> bool:
        return True

    def loss(
        self,
        prediction: Tensor,
        labels: Tensor,
        label_smoothing: float = 0.0,
        reduction: Reduction = "mean",
    ) -> Tensor:
        """Return the softmax cross-entropy: mean over tokens, or per block, (B,), with "none"."""
        self._check_shapes(prediction, labels)
        if reduction == "mean" and prediction.device.type == "cpu":
            inputs = prediction.flatten(0, 1), labels.flatten().long(), label_smoothing
            if torch.is_grad_enabled() and prediction.requires_grad:
                return _MeanCrossEntropy.apply(*inputs)
            return _MeanCrossEntropy.of(*inputs, None)
        losses = cross_entropy(
            prediction.float().flatten(0, 1),
            labels.flatten().long(),
            label_smoothing=label_smoothing,
            reduction="mean" if reduction == "mean" else "none",
        )
        if reduction == "mean":
            return losses
        return losses.view(labels.shape).mean(dim=1)

    def attack_loss(self, prediction: Tensor, labels: Tensor) -> Tensor:
        return self.loss(prediction, labels, reduction="none").to(prediction.dtype)

    def test_loss(self, prediction: Tensor, labels: Tensor) -> Tensor:
        return self.token_loss(prediction, labels).mean(dim=1)

    def token_loss(self, prediction: Tensor, labels: Tensor) -> Tensor:
        """Return the cross-entropy of each token in nats, fp64, from predictions (…, V)."""
        self._check_shapes(prediction, labels)
        logits = prediction.flatten(0, -2)
        targets = labels.flatten().long()
        chunks = zip(_split_by_logits(logits), _split_by_logits(targets, logits), strict=True)
        losses = [cross_entropy(rows.float(), right, reduction="none") for rows, right in chunks]
        return torch.cat(losses).double().view(labels.shape)

    def scores(self, prediction: Tensor, labels: Tensor) -> Tensor:
        return self.test_loss(prediction, labels)

    def running(self, prediction: Tensor, labels: Tensor, learned: Tensor | None = None) -> Tensor:
        return self.loss(prediction, labels) * len(labels)

    def baseline_score(self, labels: Tensor) -> float:
        """Return the entropy of the labels' word frequencies, in nats per token."""
        counts = torch.bincount(labels.flatten().long()).double()
        shares = counts[counts > 0] / counts.sum()
        return float(-(shares * shares.log()).sum())

    def storage_format(self, images: int) -> tuple[tuple[int, ...], type]:
        """Return (images,) and int32, which are not used: a text's labels are its stored words."""
        return (images,), np.int32

    def check(self, labels: np.ndarray, what: str) -> None:
        check_label_range(labels, self.words, what)

    @classmethod
    def needs_classes(cls, what: str) -> str | None:
        if what in ("label_smoothing", "confidence"):
            return None
        if what == "share":
            return "a block of words is never simply right"
        if what in ("distillation", "decision"):
            return "an answer is a word at every token, no class of a picture"
        return "the labels are the words of a text"

    def _check_shapes(self, prediction: Tensor, labels: Tensor) -> None:
        if prediction.shape != (*labels.shape, self.words):
            raise ValueError(
                f"next_token: predictions {tuple(prediction.shape)} and labels "
                f"{tuple(labels.shape)}; (N, M, {self.words}) and (N, M) are needed"
            )


# For logits (n, V) of 100 MB and more; half the time of torch's, and a third of its memory.
class _MeanCrossEntropy(torch.autograd.Function):
    """Mean softmax cross-entropy of rows; one pass computes the loss and its gradient."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
        gradient = torch.empty_like(logits)
        ctx.save_for_backward(gradient)
        return _MeanCrossEntropy.of(logits, labels, smoothing, gradient)

    @staticmethod
    def of(logits: Tensor, labels: Tensor, smoothing: float, gradient: Tensor | None) -> Tensor:
        """Return the mean loss in nats; write its gradient into ``gradient`` (n, V), if given."""
        total = torch.zeros((), dtype=torch.float64)
        smoothed = smoothing / logits.shape[1]
        gradients = _split_by_logits(logits if gradient is None else gradient)
        parts = (_split_by_logits(logits), _split_by_logits(labels, logits), gradients)
        for rows, right, rows_gradient in zip(*parts, strict=True):
            full = rows.float()
            probs = torch.softmax(full, dim=1)
            # The largest prob is 1 / Σ exp(logit − the largest logit): no second exponential.
            norm = full.amax(dim=1) - probs.amax(dim=1).log_()
            right_logits = full.gather(1, right[:, None])[:, 0]
            total += (norm - (1 - smoothing) * right_logits).sum(dtype=torch.float64)
            if smoothed:
                total -= smoothed * full.sum(dtype=torch.float64)
                probs.sub_(smoothed)
            if gradient is not None:
                probs[torch.arange(len(right)), right] -= 1 - smoothing
                rows_gradient.copy_(probs.div_(len(labels)))
        return (total / len(labels)).float()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple:  # type: ignore[override]
        (gradient,) = ctx.saved_tensors
        (grad,) = grads
        return gradient if float(grad) == 1 else gradient * grad, None, None


def _split_by_logits(values: Tensor, logits: Tensor | None = None) -> tuple[Tensor, ...]:
    """Split ``values`` into chunks of rows, each with CHUNK_SIZE ``logits`` (or ``values``)."""
    vocabulary = values.shape[-1] if logits is None else logits.shape[-1]
    return values.split(max(MIN_CHUNK_ROWS, CHUNK_SIZE // vocabulary))
