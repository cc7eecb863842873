"""What a few swapped words change: the nats of the words that follow, and the choice of experts.

The word swap of TextAttack, by which MomentumSMoE and robust attention are judged: words, stop
words spared, become "AAA", which no vocabulary has, so that ``<unk>`` is read in their place. There
what is to be foretold is swapped too; here it stays, so that both texts have the same answers.

N blocks of M tokens each.
"""

from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from moecore.core.config import Config
from moecore.core.routing_records import RoutingRecord
from moecore.data.prepared import evenly_spaced_indices
from moecore.data.text.words import (
    END,
    UNKNOWN,
    block_windows,
    read_vocabulary,
    stop_word_labels,
)
from moecore.measure.base import (
    SEED,
    Estimate,
    MeasuredModel,
    Measurement,
    PartStore,
    load_or_compute,
)
from moecore.measure.routing_metrics.layer_metrics import changes_by_image, expert_agreement
from moecore.nn.predict import block_scores_with_routing
from moecore.statistics.crossed import encode_item_values

Share = Annotated[float, Field(gt=0, le=1)]


class WordSwaps(Measurement):
    """How many words are swapped, and of which blocks it is measured."""

    images: int | None = Field(
        None, ge=1, description="Blocks of the test text, the same for every method; null: all."
    )
    shares: tuple[Share, ...] = Field(
        (0.015, 0.15), min_length=1, description="Of the words that become <unk>."
    )

    @classmethod
    def applies(cls, subject: MeasuredModel) -> str | None:
        """Why not, in words: it needs a text, and to know its stop words."""
        if subject.model.image.truth:
            return "in ciphers nobody sees which words are stop words, and these are spared"
        return None if subject.data.task.long else "the data is no text, and words are swapped"

    def measure(self, subject: MeasuredModel, parts: PartStore) -> "Result":
        """Nats and routing of the test text, clean and with words swapped."""
        test = subject.data.test
        where = evenly_spaced_indices(len(test.labels), self.images)
        labels = torch.from_numpy(np.array(test.labels[where]))
        tokens = np.array(subject.data.tokens("test"))
        vocabulary = read_vocabulary(subject.data.folder, subject.data.task.outputs)
        unknown = vocabulary.index(UNKNOWN)
        places = swappable_word_places(tokens, vocabulary)
        order = np.random.default_rng(SEED).permutation(places)
        clean, routed = block_scores_with_routing(
            subject.model, np.array(test.images[where]), labels
        )

        def row(share: float) -> SwapShareRow:
            chosen = order[: round(share * int((tokens != vocabulary.index(END)).sum()))]
            other = tokens.copy()
            other[chosen] = unknown
            context, block = test.images.shape[1] - 1, test.images.shape[2]
            images = np.array(block_windows(other, block, context)[0][where])
            nats, records = block_scores_with_routing(subject.model, images, labels)
            return word_swap_row(share, len(chosen), nats, nats - clean, routed, records)

        clean_nats = Estimate.of_mean(clean, is_share=False)
        return Result(
            blocks=len(where),
            nats=clean_nats,
            perplexity=float(np.exp(clean_nats.value)),
            rows=[
                load_or_compute(
                    parts, f"share {share}", SwapShareRow, lambda share=share: row(share)
                )
                for share in sorted(self.shares)
            ],
        )


class SwapShareRow(Config):
    """The text with so many words swapped; lists have a value per MoE layer."""

    share: float
    words: int  # swapped, of the whole text
    nats: Estimate  # a token, mean over blocks
    perplexity: float  # exp of it
    selection_change: tuple[Estimate, ...]  # 1 − IoU of the experts chosen
    agreement: float | None  # share of tokens with the same best expert; mean over layers
    items: dict[str, str]  # of nats, lost (nats above the clean text's) and selection_change


class Result(Config):
    """The clean text, and a row a share of words."""

    blocks: int
    nats: Estimate
    perplexity: float
    rows: tuple[SwapShareRow, ...]


def swappable_word_places(tokens: np.ndarray, vocabulary: list[str]) -> np.ndarray:
    """Places of a text's (n,) words that may be swapped: no stop words, punctuation or unknowns."""
    return np.flatnonzero((stop_word_labels(vocabulary) == 0)[tokens])


def word_swap_row(
    share: float,
    words: int,
    nats: Tensor,
    lost: Tensor,
    clean: tuple[RoutingRecord, ...],
    other: tuple[RoutingRecord, ...],
) -> SwapShareRow:
    """The row of a share. nats, lost: (N,) fp64; clean, other: a record a layer."""
    items = {"nats": nats, "lost": lost}
    moved = changes_by_image(clean, other)
    same = None
    if moved:
        alike = torch.stack(expert_agreement(clean, other))
        same = float(alike.mean())
        items["selection_change"] = torch.stack(moved).mean(dim=0)
    mean_nats = Estimate.of_mean(nats, is_share=False)
    return SwapShareRow(
        share=share,
        words=words,
        nats=mean_nats,
        perplexity=float(np.exp(mean_nats.value)),
        selection_change=[Estimate.of_mean(layer) for layer in moved],
        agreement=same,
        items={name: encode_item_values(values.numpy()) for name, values in items.items()},
    )
