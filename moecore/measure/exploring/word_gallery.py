"""What each expert reads of many blocks of test text: its load, its words, its true kinds.

N blocks, T tokens of one, E experts, D true kinds of tokens.
"""

from collections.abc import Sequence

import numpy as np
import torch

from moecore.measure.exploring.expert_gallery import (
    CHUNK,
    ExpertProfile,
    LayerGallery,
    largest_shares,
    one_hot_kinds,
)
from moecore.measure.routing_metrics.layer_metrics import expert_counts
from moecore.nn.backbones.base_model import Model
from moecore.nn.predict import predict_in_batches

WORDS = 8  # of an expert
RARE = 10  # a word that occurs less often in these blocks is not counted


def word_numbers(blocks: np.ndarray, has_truth: bool) -> np.ndarray:
    """Return the words (N, T) that a model's tokens are; before them stand those it only reads.

    blocks: (N, C, T), whose last half are kinds where the truth is known.
    """
    return blocks[:, blocks.shape[1] // (1 + has_truth) - 1].astype(np.int64)


def word_galleries_by_layer(
    model: Model, blocks: np.ndarray, vocabulary: Sequence[str]
) -> list[LayerGallery]:
    """Return the experts of every MoE layer on blocks (N, C, T) of text."""
    _, records = predict_in_batches(model, blocks, CHUNK, prediction=False)
    words = word_numbers(blocks, bool(model.image.truth))
    galleries = []
    for record, layout in zip(records, model.layouts, strict=True):
        chosen = record.chosen
        loads = expert_counts(chosen).double()
        loads /= loads.sum().clamp(min=1)
        of_kind = one_hot_kinds(blocks, layout, model.image.truth).double().flatten(0, 1)
        kinds = chosen.double().flatten(0, 1).T @ of_kind
        kinds /= kinds.sum(dim=1, keepdim=True).clamp(min=1)
        experts = [
            ExpertProfile(
                load=round(float(load), 5),
                classes=(),
                kinds=[(place + 1, share) for place, share in largest_shares(of_expert)],
                words=[(vocabulary[word], share) for word, share in favourites],
                peak=0,
                favourites=(),
            )
            for load, of_expert, favourites in zip(
                loads, kinds, favourite_words(words, chosen.numpy()), strict=True
            )
        ]
        galleries.append(LayerGallery(experts=experts, places=None, crops=None))
    return galleries


def favourite_words(
    words: np.ndarray, chosen: np.ndarray, rare: int = RARE
) -> list[list[tuple[int, float]]]:
    """Return for each expert the words of whose tokens the largest shares chose it, and these.

    words: (N, T); chosen: (N, T, E) bool.  A word counts if it occurs ``rare`` times.
    """
    numbers, place, counts = np.unique(words, return_inverse=True, return_counts=True)
    uses = np.zeros((len(numbers), chosen.shape[-1]))
    np.add.at(uses, place.ravel(), chosen.reshape(-1, chosen.shape[-1]))
    is_common = counts >= rare
    shares = torch.from_numpy(uses[is_common] / counts[is_common, None])
    return [
        [(int(numbers[is_common][row]), share) for row, share in largest_shares(of_expert, WORDS)]
        for of_expert in shares.T
    ]
