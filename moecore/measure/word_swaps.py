"""Measure loss and routing of a language model on a text with replaced words.

The word swap of TextAttack, used to evaluate MomentumSMoE and robust attention: words except stop
words become "AAA", which no vocabulary has, so that the model reads ``<unk>``. There the words to
predict are swapped, too; here they are not, so that both texts have the same targets.
"""

from collections.abc import Iterable
from functools import partial
from typing import Annotated

import numpy as np
import torch
from pydantic import Field

from moecore.data.layouts.text import END, UNKNOWN, cut_labelled_blocks
from moecore.data.prepared import evenly_spaced_indices
from moecore.data.text.words import read_vocabulary, stop_word_labels
from moecore.measure.base import SEED, MeasuredModel, Measurement
from moecore.measure.routing_metrics.layer_metrics import compute_choice_iou_drop, expert_agreement
from moecore.measure.values import Chart, Metric, OnPage, Place, Values
from moecore.nn.predict import score_and_route_last_blocks
from moecore.statistics.intervals import Interval

Share = Annotated[float, Field(gt=0, le=1)]

METRICS = {
    "swapped_nats": Metric(
        "Nats, {} % of words swapped",
        "lower",
        note="per token; the words to predict are from the clean text",
        over="percent",
    ),
    "swapped_ppl": Metric(
        "Perplexity, {} % of words swapped", "lower", note="exp of the nats", over="percent"
    ),
    "swapped_lost": Metric(
        "Nats lost, {} % of words swapped", "lower", note="nats − the clean text's", over="percent"
    ),
    "swapped_change": Metric(
        "Routing change, {} % of words swapped",
        "lower",
        note="1 − IoU of the experts chosen for the swapped and the clean text, mean over layers",
        over="percent",
    ),
    # share of tokens with the same first expert, mean over layers
    "swapped_agreement": Metric(""),
    "swapped_words": Metric(""),  # number in the test text
}


class WordSwaps(Measurement):
    """Loss and routing of a text in which words are replaced by ``<unk>``."""

    tasks = ("next_token",)
    metrics = METRICS
    page = OnPage(
        "swapped words",
        place=9,
        heading="Swapped words",
        charts=(
            Chart(
                "swapped_ppl",
                "swapped",
                title="Perplexity with swapped words",
                x="Words swapped, %",
                y="Perplexity",
                words="Stop words and the words to predict are not swapped.",
            ),
            Chart(
                "swapped_change",
                "swapped",
                title="Routing change with swapped words",
                x="Words swapped, %",
                y="1 − IoU of experts",
                words="Stop words and the words to predict are not swapped.",
            ),
        ),
    )

    images: int | None = Field(None, ge=1, description="Blocks of the test text; null: all.")
    shares: tuple[Share, ...] = Field((0.015, 0.15), min_length=1, description="Swapped for <unk>.")

    @classmethod
    def applies(cls, subject: MeasuredModel) -> str | None:
        if subject.model.image.truth:
            return "ciphers hide which words are stop words, and these are not swapped"
        if subject.data.task.long:
            return None
        return "the data are no text, and words are swapped"

    def places(self) -> dict[str, Iterable[Place]]:
        return {"percent": [100 * share for share in self.shares]}

    def measure(self, subject: MeasuredModel, out: Values) -> None:
        test = subject.data.test
        indices = evenly_spaced_indices(len(test.labels), self.images)
        labels = torch.from_numpy(np.array(test.labels[indices]))
        tokens = np.array(subject.data.tokens("test"))
        vocabulary = read_vocabulary(subject.data.folder, subject.data.task.outputs)
        unknown = vocabulary.index(UNKNOWN)
        order = np.random.default_rng(SEED).permutation(swappable_word_places(tokens, vocabulary))
        blocks = np.array(test.images[indices])
        clean, clean_records = score_and_route_last_blocks(subject.model, blocks, labels)

        def put_share(share: float, out: Values) -> None:
            percent = 100 * share
            chosen = order[: round(share * int((tokens != vocabulary.index(END)).sum()))]
            swapped = tokens.copy()
            swapped[chosen] = unknown
            before = test.images.shape[1] - 1
            texts = np.array(cut_labelled_blocks(swapped, test.images.shape[2], before)[0][indices])
            nats, records = score_and_route_last_blocks(subject.model, texts, labels)
            out.put("swapped_nats", nats, percent=percent)
            mean = float(nats.numpy().mean())
            lost = Interval(mean - float(clean.numpy().mean()))
            out.put("swapped_lost", nats - clean, lost, percent=percent)
            out.put("swapped_ppl", float(np.exp(mean)), percent=percent)
            out.put("swapped_ppl", float(np.exp(mean)), swapped=percent)
            if changes := compute_choice_iou_drop(clean_records, records):
                change = sum(float(layer.double().numpy().mean()) for layer in changes)
                change = change / len(changes)
                by_image = torch.stack(changes).mean(dim=0)
                out.put("swapped_change", by_image, Interval(change), percent=percent)
                out.put("swapped_change", change, swapped=percent)
                same = torch.stack(expert_agreement(clean_records, records))
                out.put("swapped_agreement", float(same.mean()), percent=percent)
            out.put("swapped_words", len(chosen), percent=percent)

        out.put("swapped_ppl", float(np.exp(clean.double().numpy().mean())), swapped=0.0)
        if clean_records:
            out.put("swapped_change", 0.0, swapped=0.0)
        for share in sorted(self.shares):
            out.piece(f"share {share}", partial(put_share, share))


def swappable_word_places(tokens: np.ndarray, vocabulary: list[str]) -> np.ndarray:
    """Return indices (n,) in ``tokens`` of words to swap: no stop words, punctuation, ``<unk>``."""
    return np.flatnonzero((stop_word_labels(vocabulary) == 0)[tokens])
