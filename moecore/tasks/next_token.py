"""The next word: labels int64 (N, M), the word after each token; logits (N, M, V).

An item is a block of M tokens: neighbours are not independent, so intervals are over blocks.
"""

from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import cross_entropy

from moecore.core.files import UserError
from moecore.tasks.base import Reduction, Score, Task

LOGITS = 2**19  # that are looked at together, 2 MiB: they stay in the cache
LEAST = 8  # words, however many logits each has


class NextToken(Task):
    """Softmax cross-entropy in nats per token; its exponential is the perplexity."""

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
        """Softmax cross-entropy, mean over tokens; (B,) means of blocks with "none"."""
        self._check_shapes(prediction, labels)
        if reduction == "mean" and prediction.device.type == "cpu":
            given = prediction.flatten(0, 1), labels.flatten().long(), label_smoothing
            if torch.is_grad_enabled() and prediction.requires_grad:
                return _MeanCrossEntropy.apply(*given)
            return _MeanCrossEntropy.of(*given, None)
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
        """Nats of each token of predictions (…, V): fp64, computed in fp32."""
        self._check_shapes(prediction, labels)
        logits, right = prediction.flatten(0, -2), labels.flatten().long()
        parts = zip(_split_by_logits(logits), _split_by_logits(right, logits), strict=True)
        each = [cross_entropy(some.float(), own, reduction="none") for some, own in parts]
        return torch.cat(each).double().view(labels.shape)

    def scores(self, prediction: Tensor, labels: Tensor) -> Tensor:
        """Mean nats of each block, (N,) fp64."""
        return self.test_loss(prediction, labels)

    def running(self, prediction: Tensor, labels: Tensor, learned: Tensor | None = None) -> Tensor:
        return self.loss(prediction, labels) * len(labels)

    def baseline_score(self, labels: Tensor) -> float:
        """Nats per token of the labels' own frequencies: the entropy of their words."""
        counts = torch.bincount(labels.flatten().long()).double()
        shares = counts[counts > 0] / counts.sum()
        return float(-(shares * shares.log()).sum())

    def storage_format(self, images: int) -> tuple[tuple[int, ...], type]:
        """Text is stored as tokens; this is what a split shows of it."""
        return (images,), np.int32

    def check(self, labels: np.ndarray, what: str) -> None:
        """Raise UserError unless the labels are words, 0 … V−1."""
        if len(labels) and not 0 <= labels.min() <= labels.max() < self.words:
            problem = f"run from {labels.min()} to {labels.max()}"
            raise UserError(f"{what} {problem}; allowed: 0 to {self.words - 1}")

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
            problem = f"predictions {tuple(prediction.shape)} and labels {tuple(labels.shape)}"
            raise ValueError(f"next_token: {problem}; (N, M, {self.words}) and (N, M) are needed")


class _MeanCrossEntropy(torch.autograd.Function):
    """Softmax cross-entropy, mean over rows, with its gradient in one pass: logits (n, V), labels
    (n,), smoothing as torch's. As often as not in bf16, of 100 MB and more: half the time of
    torch's on a CPU, and a third of its memory.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
        gradient = torch.empty_like(logits)
        ctx.save_for_backward(gradient)
        return _MeanCrossEntropy.of(logits, labels, smoothing, gradient)

    @staticmethod
    def of(logits: Tensor, labels: Tensor, smoothing: float, gradient: Tensor | None) -> Tensor:
        """The mean; its gradient is written into ``gradient`` (n, V), if given."""
        total = torch.zeros((), dtype=torch.float64)
        each = smoothing / logits.shape[1]
        outs = _split_by_logits(logits if gradient is None else gradient)
        for some, right, out in zip(
            _split_by_logits(logits), _split_by_logits(labels, logits), outs, strict=True
        ):
            full = some.float()
            share = torch.softmax(full, dim=1)
            # the largest share is 1 / Σ exp(logit − the largest logit): no second exponential
            norm = full.amax(dim=1) - share.amax(dim=1).log_()
            own = full.gather(1, right[:, None])[:, 0]
            total += (norm - (1 - smoothing) * own).sum(dtype=torch.float64)
            if each:
                total -= each * full.sum(dtype=torch.float64)
                share.sub_(each)
            if gradient is not None:
                share[torch.arange(len(right)), right] -= 1 - smoothing
                out.copy_(share.div_(len(labels)))
        return (total / len(labels)).float()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple:  # type: ignore[override]
        (gradient,) = ctx.saved_tensors
        (grad,) = grads
        return gradient if float(grad) == 1 else gradient * grad, None, None


def _split_by_logits(values: Tensor, logits: Tensor | None = None) -> tuple[Tensor, ...]:
    """Rows of ``values`` that go with LOGITS logits each, which are ``values`` unless given."""
    words = (values if logits is None else logits).shape[-1]
    return values.split(max(LEAST, LOGITS // words))
