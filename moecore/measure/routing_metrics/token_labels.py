"""What is known of tokens beside their experts: class, place, truth, word, tissue.

N images, T tokens of each.
"""

from math import prod

import numpy as np
import torch
from torch import Tensor

from moecore.core.routing_records import TokenLayout
from moecore.data.text.words import read_vocabulary, stop_word_labels
from moecore.measure.base import MeasuredModel
from moecore.measure.probes.expert_tissue_agreement import tissue_sums_by_cube
from moecore.measure.routing_metrics.purity import token_kinds

RARE = 10  # a word that occurs less often in these texts is not counted
TEXT = 3  # axes of blocks of text, (N, C, M)


def image_labels_by_kind(subject: MeasuredModel, labels: Tensor) -> dict[str, Tensor]:
    """Return each image's class, (N, 1), where it has one; labels (N, …) as the task has them."""
    members = subject.model.image.task.by_class(labels)
    if members is None or not torch.equal(members[0], torch.arange(len(labels))):
        return {}
    return {"class": members[1].unsqueeze(-1)}


def token_labels_by_kind(
    subject: MeasuredModel, where: np.ndarray, images: np.ndarray, layout: TokenLayout
) -> dict[str, Tensor]:
    """Return what is known of each token, (N, T), or (1, T) where all images are alike.

    position; truth (data whose truth is known); word and stop_word (texts), where rare ones are -1,
    as unknown, and all that are no words; tissue (volumes with maps), the most of a cube.  where:
    the images' places in the test split.
    """
    data = subject.data
    labels = {"position": torch.arange(layout.special + prod(layout.grid)).unsqueeze(0)}
    if subject.model.image.truth:
        labels["truth"] = token_kinds(torch.from_numpy(images), layout) - 1
    if images.ndim == TEXT:
        blocks = images.shape[1] // (1 + bool(subject.model.image.truth))
        words = images[:, blocks - 1].astype(np.int64)
        labels["word"] = torch.from_numpy(mask_rare_words(words))
        if not subject.model.image.truth:  # nobody sees it in ciphers
            kinds = stop_word_labels(read_vocabulary(data.folder, subject.model.image.task.outputs))
            labels["stop_word"] = torch.from_numpy(kinds[words])
    if data.card.get("regions"):
        labels["tissue"] = tissue_labels(data.regions("test"), where, layout)
    return labels


def mask_rare_words(words: np.ndarray) -> np.ndarray:
    """Return numbers of words (N, T), -1 for those that occur fewer than RARE times among them."""
    _, place, counts = np.unique(words, return_inverse=True, return_counts=True)
    return np.where(counts[place.reshape(words.shape)] >= RARE, words, -1)


def tissue_labels(maps: np.ndarray, where: np.ndarray, layout: TokenLayout) -> Tensor:
    """Return the tissue that a token's cube has the most of, (N, T); -1: none, or a special token.

    maps: (…, R, D, H, W), tissues' shares in the voxels.  where: (N,), which of them.
    """
    sums = np.concatenate([tissue_sums_by_cube(maps[[place]], layout.grid) for place in where])
    most = np.where(sums.any(axis=-1), sums.argmax(axis=-1), -1)
    return torch.from_numpy(np.pad(most, ((0, 0), (layout.special, 0)), constant_values=-1))
