"""What a few swapped words change: the nats of the words that follow, and the choice of experts.

The word swap of TextAttack, by which MomentumSMoE and robust attention are judged: words, stop
words spared, become "AAA", which no vocabulary has, so that ``<unk>`` is read in their place. There
what is to be foretold is swapped too; here it stays, so that both texts have the same answers.

N blocks of M tokens each.
"""

from collections.abc import Iterable
from functools import partial
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from moecore.core.routing_records import RoutingRecord
from moecore.data.layouts.text import END, UNKNOWN, block_windows
from moecore.data.prepared import evenly_spaced_indices
from moecore.data.text.words import read_vocabulary, stop_word_labels
from moecore.measure.base import SEED, MeasuredModel, Measurement
from moecore.measure.routing_metrics.layer_metrics import changes_by_image, expert_agreement
from moecore.measure.values import Chart, Metric, OnPage, Place, Values
from moecore.nn.predict import block_scores_with_routing
from moecore.statistics.intervals import Interval

Share = Annotated[float, Field(gt=0, le=1)]

METRICS = {
    "swapped_nats": Metric(
        "Nats, {} % of words swapped",
        "lower",
        note="a token; the words to be foretold are those of the clean text",
        over="percent",
    ),
    "swapped_ppl": Metric(
        "Perplexity, {} % of words swapped", "lower", note="exp of the nats", over="percent"
    ),
    "swapped_lost": Metric(
        "Nats lost, {} % of words swapped",
        "lower",
        note="above those of the clean text",
        over="percent",
    ),
    "swapped_change": Metric(
        "Routing change, {} % of words swapped",
        "lower",
        note="1 − IoU of the chosen experts with those of the clean text, mean over layers",
        over="percent",
    ),
    # share of tokens whose first expert stays, mean over layers
    "swapped_agreement": Metric(""),
    "swapped_words": Metric(""),  # of the whole text
}


class WordSwaps(Measurement):
    """How many words are swapped, and of which blocks it is measured."""

    tasks = ("next_token",)
    metrics = METRICS
    page = OnPage(
        "swapped words",
        place=9,
        heading="Swapped words",
        charts=(
            Chart(
                *("swapped_ppl", "swapped", "Perplexity with swapped words", "Words swapped, %"),
                y="Perplexity",
                words="Stop words are spared; the words to be foretold stay.",
            ),
            Chart(
                *("swapped_change", "swapped", "Routing change with swapped words"),
                *("Words swapped, %", "1 − IoU of experts"),
                words="Stop words are spared; the words to be foretold stay.",
            ),
        ),
    )

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

    def places(self) -> dict[str, Iterable[Place]]:
        """Return the shares in percent."""
        return {"percent": [100 * share for share in self.shares]}

    def measure(self, subject: MeasuredModel, out: Values) -> None:
        """Put nats and routing of the test text with words swapped; the charts begin without."""
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

        def put_share(share: float, out: Values) -> None:
            chosen = order[: round(share * int((tokens != vocabulary.index(END)).sum()))]
            other = tokens.copy()
            other[chosen] = unknown
            context, block = test.images.shape[1] - 1, test.images.shape[2]
            images = np.array(block_windows(other, block, context)[0][where])
            nats, records = block_scores_with_routing(subject.model, images, labels)
            put_swapped(100 * share, nats, clean, routed, records, out)
            out.put("swapped_words", len(chosen), percent=100 * share)

        out.put("swapped_ppl", float(np.exp(clean.double().numpy().mean())), swapped=0.0)
        if routed:
            out.put("swapped_change", 0.0, swapped=0.0)
        for share in sorted(self.shares):
            out.piece(f"share {share}", partial(put_share, share))


def swappable_word_places(tokens: np.ndarray, vocabulary: list[str]) -> np.ndarray:
    """Places of a text's (n,) words that may be swapped: no stop words, punctuation or unknowns."""
    return np.flatnonzero((stop_word_labels(vocabulary) == 0)[tokens])


def put_swapped(
    percent: float,
    nats: Tensor,
    clean_nats: Tensor,
    clean: tuple[RoutingRecord, ...],
    other: tuple[RoutingRecord, ...],
    out: Values,
) -> None:
    """Put a share of words. nats, clean_nats: (N,) fp64; clean, other: a record a layer."""
    out.put("swapped_nats", nats, percent=percent)
    mean, clean_mean = (float(values.numpy().mean()) for values in (nats, clean_nats))
    lost = Interval(mean - clean_mean)
    out.put("swapped_lost", nats - clean_nats, lost, percent=percent)
    out.put("swapped_ppl", float(np.exp(mean)), percent=percent)
    out.put("swapped_ppl", float(np.exp(mean)), swapped=percent)
    if moved := changes_by_image(clean, other):
        mean = sum(float(layer.double().numpy().mean()) for layer in moved) / len(moved)
        by_image = torch.stack(moved).mean(dim=0)
        out.put("swapped_change", by_image, Interval(mean), percent=percent)
        out.put("swapped_change", mean, swapped=percent)
        same = torch.stack(expert_agreement(clean, other))
        out.put("swapped_agreement", float(same.mean()), percent=percent)
