"""Retrieval of N images and their C captions, and the routing of the captions' words."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from moecore.core.routing_records import RoutingRecord, first_choices
from moecore.data.prepared import evenly_spaced_indices
from moecore.data.text.tokenizers import Tokenizer, load_tokenizer
from moecore.measure.base import MeasuredModel, Measurement
from moecore.measure.routing_metrics import expert_profiles, layer_metrics
from moecore.measure.values import Metric, OnPage, Place, Values
from moecore.nn.backbones.two_towers import CAPTIONS_PER_PASS
from moecore.nn.predict import concat_records, eval_mode, predict_in_batches
from moecore.statistics.intervals import squared_cv
from moecore.tasks import image_text

PICTURES = 4  # images on a page, evenly spread
WORDS = 60  # the most frequent words on a page
ONE_RIGHT_IMAGE = torch.tensor([1])  # number of right images for a caption
Read = tuple[tuple[str, int], ...]  # words and their first expert, −1 for none
METRICS = {
    "text_to_image": Metric(
        "text → image R@{}",
        "higher",
        "share",
        note="share of captions whose image is among the first {} of all test images; mean over "
        "an image's captions",
        paper="ermoe",
        over="k",
        name="text_to_image_r{}",
    ),
    "image_to_text": Metric(
        "image → text R@{}",
        "higher",
        "share",
        note="share of images with any of their captions among the first {} of all captions",
        paper="ermoe",
        over="k",
        name="image_to_text_r{}",
    ),
    "text_to_image_chance": Metric(""),
    "image_to_text_chance": Metric(""),
    "text_load_cv2": Metric("Load CV², words", "lower", note="text tower, over words of captions"),
    "text_entropy": Metric("Entropy, words", note="routing of a word, nats", detail=True),
    "word_same_expert": Metric(
        "One word, one expert",
        form="share",
        note="share of pairs of occurrences of a word with the same first expert",
    ),
    "word_same_expert_chance": Metric(
        "One word, one expert: chance", "", "share", "the same for any two words", detail=True
    ),
}


class Retrieval(Measurement):
    """Recall of images by captions and captions by images, and the routing of words."""

    tasks = ("image_text",)
    metrics = METRICS
    page = OnPage("images and captions", place=10)

    images: int | None = Field(None, ge=2, description="Gallery: the first test images; null: all.")
    at: tuple[int, ...] = Field((1, 5, 10), min_length=1, description="k of R@k.")

    @classmethod
    def applies(cls, subject: MeasuredModel) -> str | None:
        if isinstance(subject.data.task, image_text.ImageText):
            return None
        return "the images have no captions"

    def places(self) -> dict[str, Iterable[Place]]:
        return {"k": self.at}

    def measure(self, subject: MeasuredModel, out: Values) -> None:
        # facts: images, captions; scale, the factor of cosines; layers, for each MoE layer of the
        # text tower the most frequent words with their experts; overlays, a few images;
        # captions_read, for each layer their first captions, as ``Read``.
        test = subject.data.test
        number = len(test.labels) if self.images is None else self.images
        images = test.images[:number]
        labels = torch.from_numpy(test.labels[:number].copy())
        sides, _ = predict_in_batches(subject.model, images, routing=False)
        texts = subject.model.targets(labels)
        by_image = (~image_text.missing_caption_mask(texts)).sum(dim=1)  # captions per image
        captions = int(by_image.sum())
        at = tuple(sorted(set(self.at)))
        hits = image_text.text_to_image_recall(sides, texts, at)
        put_recall("text_to_image", hits, at, len(labels), ONE_RIGHT_IMAGE, out)
        hits = image_text.image_to_text_recall(sides, texts, at)
        put_recall("image_to_text", hits, at, captions, by_image, out)
        out.facts |= {"images": len(labels), "captions": captions}
        out.facts["scale"] = float(sides[:, :-1].norm(dim=1).mean())
        put_caption_routing(subject, labels, out)
        out.facts |= caption_overlays(subject, images, labels)


def caption_overlays(subject: MeasuredModel, images: np.ndarray, labels: Tensor) -> dict[str, Any]:
    """Return the experts of the patches and caption words of a few images, for pictures."""
    indices = evenly_spaced_indices(len(images), PICTURES)
    towers = expert_profiles.find_two_tower_model(subject.model)
    if towers is None:
        return {}
    few = images[indices]
    records: tuple[RoutingRecord, ...] = ()
    if subject.model.moe is not None:
        _, records = predict_in_batches(subject.model, few, prediction=False)
    tokenizer = load_tokenizer(subject.data.folder, towers.text.task)
    tokens = labels[indices, 0]
    read = expert_profiles.words_with_experts(towers, tokens, tokenizer, max_experts=1)
    if towers.config.text.moe is None:
        masks = towers.text.caption_mask(tokens)
        read = [
            [[(tokenizer.word(token), []) for token in row[mask].tolist()]]
            for row, mask in zip(tokens, masks, strict=True)
        ]
    best = [
        [[(word, ranked[0] if ranked else -1) for word, ranked in layer] for layer in caption]
        for caption in read
    ]
    return {"overlays": expert_profiles.encode_expert_overlays(few, records), "captions_read": best}


def put_recall(
    name: str, hits: Tensor, at: tuple[int, ...], gallery: int, right: Tensor, out: Values
) -> None:
    """Put recall@k, mean ``hits`` (N, k), and chance with ``right`` of ``gallery`` candidates."""
    # N queries; gallery: number of candidates; right: (N,), right candidates of each query, or (1,)
    # if equal for all. By chance, all candidates are tied.
    ties = (torch.zeros_like(right), gallery - right, right, at)
    chances = image_text.tie_hit_probability(*ties).mean(dim=0).tolist()
    for k, chance, values in zip(at, chances, hits.unbind(1), strict=True):
        out.put(name, values, k=k)
        out.put(f"{name}_chance", chance, k=k)


def put_caption_routing(subject: MeasuredModel, labels: Tensor, out: Values) -> None:
    """Put load CV², entropy and same-expert rate of captions, mean over the text tower's layers."""
    model = expert_profiles.find_two_tower_model(subject.model)
    assert model is not None
    out.facts["layers"] = []
    if model.config.text.moe is None:
        return
    captions = labels.flatten(0, 1)
    captions = captions[captions[:, 0] != image_text.NO_CAPTION]
    tokens_first = lambda field: field.cpu().transpose(0, 1)  # (1, n, E) → (n, 1, E)
    records, word_parts = [], []
    with eval_mode(model), torch.no_grad():
        for part in captions.split(CAPTIONS_PER_PASS):
            part = part.to(subject.device)
            _, batch_records = model.text(part)
            records.append(tuple(record.map_tensors(tokens_first) for record in batch_records))
            word_parts.append(part[model.text.caption_mask(part)].cpu())
    tokens = torch.cat(word_parts).long()
    tokenizer = load_tokenizer(subject.data.folder, model.text.task)
    by_name: dict[str, list[float]] = {}
    for record in concat_records(records):
        numbers, frequent_words = summarize_caption_routing(record, tokens, tokenizer)
        out.facts["layers"].append(frequent_words)
        for name, number in numbers.items():
            by_name.setdefault(name, []).append(number)
    for name, numbers in by_name.items():
        out.put(name, sum(numbers) / len(numbers))


def summarize_caption_routing(
    record: RoutingRecord, tokens: Tensor, tokenizer: Tokenizer
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Return metric → value of one layer, and its most frequent words with shares of experts."""
    # record: fields (n, 1, E); tokens: (n,) int64, the word index of each.
    experts = record.probs.shape[-1]
    first = first_choices(record)[:, 0]
    tokens, first = tokens[first >= 0], first[first >= 0]
    table = torch.zeros(int(tokens.max()) + 1, experts, dtype=torch.float64)
    table.index_put_((tokens, first), torch.ones(len(tokens), dtype=torch.float64), accumulate=True)
    counts = table.sum(dim=1)
    overall = table.sum(dim=0)
    shown = counts.argsort(descending=True, stable=True)[:WORDS].tolist()
    numbers = {
        "text_load_cv2": float(squared_cv(record.chosen.double().sum(dim=(0, 1)))),
        "text_entropy": layer_metrics.mean_token_entropy(record.probs),
        "word_same_expert": occurrence_pair_agreement(table),
        "word_same_expert_chance": occurrence_pair_agreement(overall[None]),
    }
    rows = []
    for word in (word for word in shown if counts[word]):
        experts = [round(value, 4) for value in (table[word] / counts[word]).tolist()]
        rows.append({"word": tokenizer.word(word), "count": int(counts[word]), "experts": experts})
    return numbers, rows


def occurrence_pair_agreement(table: Tensor) -> float:
    """Return the share of pairs of a word's tokens with the same expert; counts (words, E)."""
    counts = table.sum(dim=1)
    pairs = (counts * (counts - 1)).sum()
    if pairs == 0:
        return 1.0
    return float((table * (table - 1)).sum() / pairs)
