"""How sure a language model is of the next words: logits over the vocabulary are made of few tokens
at a time, as those of a whole text are gigabytes.

N blocks of M tokens, d width, V words.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from moecore.data.prepared import Split, evenly_spaced_indices
from moecore.measure.calibrators.temperature import nll_derivative_by_row
from moecore.nn.backbones.language_model import LanguageTransformer
from moecore.nn.predict import eval_mode, image_batches, model_device, words_at_once

FITTED = 2**14  # tokens of the validation text that the temperature, one number, is fitted to


class FinalTokens(NamedTuple):
    """Final tokens (N, M, d) of blocks, on the model's device, and the words after them (N, M)."""

    model: LanguageTransformer
    final: Tensor
    labels: Tensor

    def parts(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Logits (n, V) fp32 of some tokens after the other, and their labels (n,)."""
        rows = words_at_once(self.model.image.task.outputs, self.final.device)
        final, labels = self.final.flatten(0, 1).split(rows), self.labels.flatten().split(rows)
        with torch.no_grad():
            for some, right in zip(final, labels, strict=True):
                yield self.model.predict(some[None])[0].float(), right

    def nll_slope(self, beta: float) -> float:
        """Return the derivative of the mean nats in β = 1/T."""
        total = 0.0
        for logits, right in self.parts():
            total += float(nll_derivative_by_row(logits, right, beta).double().sum())
        return total / self.labels.numel()

    def answers(self, *temperatures: float) -> list["TokenLossAndConfidence"]:
        """Return what the logits over each temperature are worth."""
        by_temperature: list[list[tuple[Tensor, ...]]] = [[] for _ in temperatures]
        for logits, right in self.parts():
            for each, temperature in zip(by_temperature, temperatures, strict=True):
                scaled = (logits / temperature).log_softmax(dim=1)
                own = scaled.gather(1, right[:, None])[:, 0]
                best, place = scaled.max(dim=1)
                squares = scaled.exp_().square().sum(dim=1) - 2 * own.exp() + 1
                each.append((-own, squares, best.exp(), place == right))
        return [self._concat_answers(each) for each in by_temperature]

    def _concat_answers(self, parts: list[tuple[Tensor, ...]]) -> "TokenLossAndConfidence":
        every = [torch.cat(one).cpu().view(self.labels.shape) for one in zip(*parts, strict=True)]
        nats, squares, sure, hits = every
        return TokenLossAndConfidence(nats.double(), squares.double(), sure.double(), hits)


class TokenLossAndConfidence(NamedTuple):
    """Of every token, (N, M); of an image, (N,)."""

    nats: Tensor
    squares: Tensor  # Brier's distance from the right word
    sure: Tensor  # the largest probability
    hits: Tensor  # bool, whether that is the right word


def final_tokens(
    model: LanguageTransformer, split: Split, batch: int, most: int | None = None
) -> FinalTokens:
    """The final tokens, fp32, of blocks spread over a split, ``most`` tokens in all."""
    block = split.labels.shape[1]
    where = evenly_spaced_indices(len(split.labels), most and max(1, most // block))
    device = model_device(model)
    chunks = []
    with eval_mode(model), torch.no_grad(), torch.autocast(device.type, enabled=False):
        for words in image_batches(np.array(split.images[where]), batch, device):
            chunks.append(model.encode(words)[0].float())
    labels = torch.from_numpy(np.array(split.labels[where])).long().to(device)
    return FinalTokens(model, torch.cat(chunks), labels)
