"""Labels of tokens, and the mutual information of the tokens' experts and these labels."""

from collections.abc import Iterable, Iterator
from math import prod

import numpy as np
import torch
from torch import Tensor

from moecore.core.config import Config
from moecore.core.files import UserError
from moecore.core.routing_records import TokenLayout
from moecore.data.text.words import read_vocabulary, stop_word_labels
from moecore.measure.base import SEED, MeasuredModel
from moecore.measure.probes.simulated_people import tissue_sums_by_cube
from moecore.measure.routing_metrics.epoch_routing import true_kinds
from moecore.statistics import comparisons, intervals

MIN_TOKENS = 10  # words that occur less often in the texts are ignored
TEXT_NDIM = 3  # axes of blocks of text, (N, C, M)
PERMUTATIONS = 200
MIN_IMAGES = 4  # to permute labels: with three images, p cannot be below 1 / 3! = 1 / 6


def class_label_of_images(subject: MeasuredModel, labels: Tensor) -> dict[str, Tensor]:
    """Return "class" → (N, 1) if each image has one class, else {}; labels: of the task, (N, …)."""
    members = subject.model.image.task.by_class(labels)
    if members is None or not torch.equal(members[0], torch.arange(len(labels))):
        return {}
    return {"class": members[1].unsqueeze(-1)}


def token_labels_by_name(
    subject: MeasuredModel, indices: np.ndarray, images: np.ndarray, layout: TokenLayout
) -> dict[str, Tensor]:
    """Return kind of label → labels (N, T), or (1, T) if equal in all images; -1 if unknown."""
    # Kinds: position; truth (if known); word and stop_word (texts; rare words are unknown); tissue
    # (volumes with maps), the largest in a cube. indices: of the images in the test split.
    data = subject.data
    labels = {"position": torch.arange(layout.special + prod(layout.grid)).unsqueeze(0)}
    if subject.model.image.truth:
        labels["truth"] = true_kinds(torch.from_numpy(images), layout) - 1
    if images.ndim == TEXT_NDIM:
        blocks = images.shape[1] // (1 + bool(subject.model.image.truth))
        word_ids = images[:, blocks - 1].astype(np.int64)
        labels["word"] = torch.from_numpy(mask_rare_words(word_ids))
        if not subject.model.image.truth:  # ciphers hide which words are stop words
            kinds = stop_word_labels(read_vocabulary(data.folder, subject.model.image.task.outputs))
            labels["stop_word"] = torch.from_numpy(kinds[word_ids])
    if data.card.get("regions"):
        labels["tissue"] = tissue_labels(data.regions("test"), indices, layout)
    return labels


def mask_rare_words(word_ids: np.ndarray) -> np.ndarray:
    """Return word ids (N, T), with -1 for words that occur fewer than MIN_TOKENS times."""
    _, inverse, counts = np.unique(word_ids, return_inverse=True, return_counts=True)
    return np.where(counts[inverse.reshape(word_ids.shape)] >= MIN_TOKENS, word_ids, -1)


def tissue_labels(maps: np.ndarray, indices: np.ndarray, layout: TokenLayout) -> Tensor:
    """Return the largest tissue of each token's cube, (N, T); -1: none, or a special token."""
    # maps: (…, R, D, H, W), tissue shares of voxels; indices: (N,), volumes to use.
    sums = np.concatenate([tissue_sums_by_cube(maps[[index]], layout.grid) for index in indices])
    largest = np.where(sums.any(axis=-1), sums.argmax(axis=-1), -1)
    return torch.from_numpy(np.pad(largest, ((0, 0), (layout.special, 0)), constant_values=-1))


class LargestExpertShare(Config):
    """Largest share of a label's tokens that one expert has."""

    share: float  # mean over labels with at least MIN_TOKENS tokens
    chance: float  # mean over permuted labels
    labels: int  # number of labels with at least MIN_TOKENS tokens


class LabelInformation(Config):
    """Mutual information of experts and one kind of label, in nats."""

    information: float  # plug-in estimate
    chance: float  # mean over permuted labels
    p: float  # share of permutations, the identity included, with at least as much information
    normalised: float  # (information − chance) / entropy of the labels
    specialisation: LargestExpertShare | None = None  # None if no label has MIN_TOKENS tokens


def mutual_information(table: np.ndarray) -> float:
    """Return the plug-in mutual information of a table of counts, in nats; 0 without counts."""
    joint = table / max(1, table.sum())
    independent = joint.sum(axis=1, keepdims=True) * joint.sum(axis=0, keepdims=True)
    is_used = joint > 0
    return float((joint[is_used] * np.log(joint[is_used] / independent[is_used])).sum())


def measure_information(
    chosen: np.ndarray, labels: np.ndarray, permuted: Iterable[np.ndarray], min_tokens: int = 1
) -> tuple[LabelInformation, dict[str, np.ndarray]]:
    """Measure what experts (B, T, E) tell of labels (B, T) beyond ``permuted``; also by image."""
    # Also "information" and "specialisation" → (B,), whose means are ``normalised``, and its share
    # above chance. labels: (B, T), integers from 0, −1 if unknown. permuted: the same labels in
    # other orders that break only their link with the experts: whole images' maps permuted, or
    # positions within images; never single tokens. min_tokens: of a label to count for
    # specialisation.
    if len(np.unique(labels[labels >= 0])) < 2:
        raise UserError.at("expert_information", found="fewer than two labels", allowed="2 or more")
    pairs = chosen.nonzero()
    table = _count_by_expert_and_label(chosen, pairs, labels)
    tokens = np.bincount(labels[labels >= 0], minlength=table.shape[1])
    common = tokens >= min_tokens  # labels with enough tokens, (K,)
    nulls = []
    for permuted_labels in permuted:
        counts = _count_by_expert_and_label(chosen, pairs, permuted_labels)
        shares = counts[:, common].max(axis=0) / tokens[common]
        nulls.append((mutual_information(counts), shares.sum()))
    null, null_share = np.array(nulls).T
    information = mutual_information(table)
    shares = table.sum(axis=0)[table.sum(axis=0) > 0] / table.sum()
    chance = float(null.mean())
    label_entropy = float(-(shares * np.log(shares)).sum())
    excess = _information_by_image(table, pairs, labels, len(chosen)) - chance
    by_image = {"information": excess / label_entropy}
    specialisation = None
    if common.any():
        result = _largest_expert_share(chosen, labels, table, common, null_share)
        specialisation, by_image["specialisation"] = result
    p = float((1 + (null >= information - 1e-12).sum()) / (len(null) + 1))
    normalised = (information - chance) / label_entropy
    values = {"information": information, "chance": chance, "p": p, "normalised": normalised}
    return LabelInformation(**values, specialisation=specialisation), by_image


def iterate_label_permutations(
    labels: np.ndarray, number: int, seed: int, people: intervals.People = None
) -> Iterator[np.ndarray]:
    """Yield ``number`` permutations of labels (B, T) among images, or among people if given."""
    check_enough_images(len(labels))
    for order in intervals.draw_image_permutations(len(labels), number, seed, people):
        yield labels[order]


def check_enough_images(images: int) -> None:
    """Raise UserError for fewer than MIN_IMAGES images, as every result would be chance."""
    if images < MIN_IMAGES:
        raise UserError.at(
            "permutation null",
            found=f"{images} images or texts, which are permuted to measure chance",
            allowed=f"{MIN_IMAGES} and more",
        )


def _count_by_expert_and_label(
    chosen: np.ndarray, pairs: tuple[np.ndarray, ...], labels: np.ndarray
) -> np.ndarray:
    """Count (token, expert) pairs by expert and label, (E, K); pairs: ``chosen.nonzero()``."""
    image, token, expert = pairs
    width = int(labels.max()) + 2
    cells = expert * width + labels[image, token] + 1
    return np.bincount(cells, minlength=chosen.shape[-1] * width).reshape(-1, width)[:, 1:]


def _information_by_image(
    table: np.ndarray, pairs: tuple[np.ndarray, ...], labels: np.ndarray, images: int
) -> np.ndarray:
    """Return the mutual information as one value per image (infinitesimal jackknife), (B,)."""
    image, token, expert = pairs
    label = labels[image, token]
    is_known = label >= 0
    image, expert, label = image[is_known], expert[is_known], label[is_known]
    joint = table / table.sum()
    independent = joint.sum(axis=1)[expert] * joint.sum(axis=0)[label]
    pointwise = np.log(joint[expert, label] / independent)
    information = np.bincount(image, pointwise, minlength=images)
    return comparisons.linearize_ratio(information, np.bincount(image, minlength=images))


def _largest_expert_share(
    chosen: np.ndarray, labels: np.ndarray, table: np.ndarray, common: np.ndarray, null: np.ndarray
) -> tuple[LargestExpertShare, np.ndarray]:
    """Return ``LargestExpertShare`` of labels ``common`` (K,); by image, its excess over chance."""
    # null: per permutation of the labels, the sum of their largest shares.
    number = int(common.sum())
    tokens = np.bincount(labels[labels >= 0], minlength=len(common))
    shares = np.zeros(len(common))
    shares[common] = table[:, common].max(axis=0) / tokens[common]
    image, token = ((labels >= 0) & common[labels]).nonzero()
    label = labels[image, token]
    is_with_most = chosen[image, token, table.argmax(axis=0)[label]]
    # Influence of each image on each label's share, which is a ratio of two sums.
    above = np.bincount(image, (is_with_most - shares[label]) / tokens[label], len(chosen))
    share, chance = shares.sum() / number, null.mean() / number
    excess = share - chance + above * len(chosen) / number
    return LargestExpertShare(share=float(share), chance=float(chance), labels=number), excess


def information_by_label(
    chosen: Tensor, layout: TokenLayout, labels: dict[str, Tensor], people: intervals.People = None
) -> tuple[dict[str, LabelInformation], dict[str, np.ndarray]]:
    """Return dicts kind → information, "information_{kind}" → (N,) by image, of varying labels."""
    rows, values = {}, {}
    patches = chosen[:, layout.special :].numpy()
    for name, kind_labels in labels.items():
        token_labels = kind_labels.expand(chosen.shape[:2])[:, layout.special :].numpy()
        if len(np.unique(token_labels[(token_labels >= 0) & patches.any(axis=-1)])) < 2:
            continue
        permuted = iterate_label_permutations(token_labels, PERMUTATIONS, SEED, people)
        if name == "position":  # the same in all images, so permuted within each image
            random = np.random.default_rng(SEED)
            permuted = (random.permuted(token_labels, axis=1) for _ in range(PERMUTATIONS))
        rows[name], by_image = measure_information(patches, token_labels, permuted, MIN_TOKENS)
        values |= {f"{key}_{name}": excess for key, excess in by_image.items()}
    return rows, values
