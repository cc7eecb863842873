"""How often images and captions find each other among all, and which experts read which words.

N images, C captions of each at most, n words of all captions, E experts.
"""

from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from moecore.core.config import Config
from moecore.core.routing_records import RoutingRecord, first_choices
from moecore.data.prepared import evenly_spaced_indices
from moecore.data.text.tokenizers import Tokenizer, load_tokenizer
from moecore.measure.base import Estimate, MeasuredModel, Measurement, PartStore
from moecore.measure.exploring.caption_word_experts import experts_by_word, find_two_towers
from moecore.measure.exploring.expert_overlay_data import Overlays, encode_expert_overlays
from moecore.measure.routing_metrics.layer_metrics import mean_token_entropy
from moecore.nn.backbones.two_towers import TEXTS
from moecore.nn.predict import concat_records, eval_mode, predict_in_batches
from moecore.statistics.crossed import encode_item_values
from moecore.statistics.intervals import squared_cv
from moecore.tasks.image_text import (
    NONE,
    ImageText,
    hit_probability_under_ties,
    image_to_text_recall,
    missing_caption_mask,
    text_to_image_recall,
)

PICTURES = 4  # that a page shows, evenly spread
WORDS = 60  # likewise: the most frequent
ONE = torch.tensor([1])  # image is right for a caption


class Retrieval(Measurement):
    """Among how many images, and how many first places count."""

    images: int | None = Field(
        None, ge=2, description="Test images from the first on, the gallery; null: all."
    )
    at: tuple[int, ...] = Field((1, 5, 10), min_length=1, description="k of R@k.")

    @classmethod
    def applies(cls, subject: MeasuredModel) -> str | None:
        """Why not, in words: it needs captions."""
        if isinstance(subject.data.task, ImageText):
            return None
        return "the images have no captions"

    def measure(self, subject: MeasuredModel, parts: PartStore) -> "Result":
        """R@k both ways among the test images, and the routing of their captions."""
        test = subject.data.test
        number = len(test.labels) if self.images is None else self.images
        images = test.images[:number]
        labels = torch.from_numpy(test.labels[:number].copy())
        sides, _ = predict_in_batches(subject.model, images, routing=False)
        texts = subject.model.targets(labels)
        own = (~missing_caption_mask(texts)).sum(dim=1)  # captions of each image
        captions = int(own.sum())
        at = tuple(sorted(set(self.at)))
        return Result(
            images=len(labels),
            captions=captions,
            text_to_image=recall_rows(text_to_image_recall(sides, texts, at), at, len(labels), ONE),
            image_to_text=recall_rows(image_to_text_recall(sides, texts, at), at, captions, own),
            scale=float(sides[:, :-1].norm(dim=1).mean()),
            layers=caption_routing_by_layer(subject, labels),
            **captioned_pictures(subject, images, labels),
        )


class RecallAtK(Config):
    """One k, in one direction."""

    k: int
    recall: Estimate  # mean over images, and its 95 % limits over images
    chance: float
    items: str | None = None  # one value an image, as ``encode_item_values`` packs them


class CaptionWord(Config):
    """One word of the captions and its experts, as shares of its occurrences."""

    word: str
    count: int
    experts: tuple[float, ...]  # first expert


class CaptionRoutingLayer(Config):
    """One MoE layer of the text tower, over the words of all captions."""

    load_cv2: float  # squared coefficient of variation of the experts' chosen words
    token_entropy: float  # nats
    same_expert: float  # two occurrences of one word have one first expert
    same_expert_chance: float  # any two words
    words: tuple[CaptionWord, ...]


Read = tuple[tuple[str, int], ...]  # words and their first expert, −1 for none


class Result(Config):
    """Both directions, and the text tower's routing; no layers where it is dense."""

    images: int
    captions: int
    text_to_image: tuple[RecallAtK, ...]
    image_to_text: tuple[RecallAtK, ...]
    scale: float  # what cosines are multiplied with
    layers: tuple[CaptionRoutingLayer, ...] = ()
    overlays: Overlays | None = None  # a few images
    captions_read: tuple[tuple[Read, ...], ...] = ()  # the first caption of each, layer by layer


def captioned_pictures(
    subject: MeasuredModel, images: np.ndarray, labels: Tensor
) -> dict[str, Any]:
    """A few images and a caption of each, with the experts of patches and words."""
    where = evenly_spaced_indices(len(images), PICTURES)
    towers = find_two_towers(subject.model)
    if towers is None:
        return {}
    few = images[where]
    records: tuple[RoutingRecord, ...] = ()
    if subject.model.moe is not None:
        _, records = predict_in_batches(subject.model, few, prediction=False)
    tokenizer = load_tokenizer(subject.data.folder, towers.text.task)
    tokens = labels[where, 0]
    read = experts_by_word(towers, tokens, tokenizer, most=1)
    if towers.config.text.moe is None:
        there = towers.text.caption_mask(tokens)
        read = [
            [[(tokenizer.word(token), []) for token in row[mask].tolist()]]
            for row, mask in zip(tokens, there, strict=True)
        ]
    return {
        "overlays": encode_expert_overlays(few, records),
        "captions_read": [
            [[(word, ranked[0] if ranked else -1) for word, ranked in layer] for layer in caption]
            for caption in read
        ],
    }


def recall_rows(hits: Tensor, at: tuple[int, ...], gallery: int, own: Tensor) -> list[RecallAtK]:
    """Return a row per k of hits (N, k) in a gallery of so many.

    own: how many of the gallery are right, for each image or alike (1,); by chance all are one tie.
    """
    chance = (
        hit_probability_under_ties(torch.zeros_like(own), gallery - own, own, at)
        .mean(dim=0)
        .tolist()
    )
    return [
        RecallAtK(
            k=k,
            recall=Estimate.of_mean(values),
            chance=by_chance,
            items=encode_item_values(values.numpy()),
        )
        for k, by_chance, values in zip(at, chance, hits.unbind(1), strict=True)
    ]


def caption_routing_by_layer(subject: MeasuredModel, labels: Tensor) -> list[CaptionRoutingLayer]:
    """Return which experts read which words, in every MoE layer of the text tower."""
    model = find_two_towers(subject.model)
    assert model is not None
    if model.config.text.moe is None:
        return []
    captions = labels.flatten(0, 1)
    captions = captions[captions[:, 0] != NONE]
    records, words = [], []
    with eval_mode(model), torch.no_grad():
        for part in captions.split(TEXTS):
            part = part.to(subject.device)
            _, batch_records = model.text(part)
            records.append(tuple(move_tokens_first(record) for record in batch_records))
            words.append(part[model.text.caption_mask(part)].cpu())
    spoken = torch.cat(words).long()
    tokenizer = load_tokenizer(subject.data.folder, model.text.task)
    return [
        summarize_caption_routing(record, spoken, tokenizer) for record in concat_records(records)
    ]


def move_tokens_first(record: RoutingRecord) -> RoutingRecord:
    """Fields (1, n, E) as (n, 1, E) on the CPU, so that batches can follow one another."""
    return record.map_tensors(lambda field: field.cpu().transpose(0, 1))


def summarize_caption_routing(
    record: RoutingRecord, words: Tensor, tokenizer: Tokenizer
) -> CaptionRoutingLayer:
    """The table of one layer; record: fields (n, 1, E), words: (n,) int64."""
    experts = record.probs.shape[-1]
    first = first_choices(record)[:, 0]
    words, first = words[first >= 0], first[first >= 0]
    table = torch.zeros(int(words.max()) + 1, experts, dtype=torch.float64)
    table.index_put_((words, first), torch.ones(len(words), dtype=torch.float64), accumulate=True)
    counts = table.sum(dim=1)
    overall = table.sum(dim=0)
    shown = counts.argsort(descending=True, stable=True)[:WORDS].tolist()
    return CaptionRoutingLayer(
        load_cv2=float(squared_cv(record.chosen.double().sum(dim=(0, 1)))),
        token_entropy=mean_token_entropy(record.probs),
        same_expert=same_expert_rate(table),
        same_expert_chance=same_expert_rate(overall[None]),
        words=[
            CaptionWord(
                word=tokenizer.word(word),
                count=int(counts[word]),
                experts=[round(value, 4) for value in (table[word] / counts[word]).tolist()],
            )
            for word in shown
            if counts[word]
        ],
    )


def same_expert_rate(table: Tensor) -> float:
    """Share of pairs of occurrences in one row of (rows, E) counts with one expert, or 1."""
    counts = table.sum(dim=1)
    pairs = (counts * (counts - 1)).sum()
    if pairs == 0:
        return 1.0
    return float((table * (table - 1)).sum() / pairs)
