"""Profiles of experts on many blocks of test text: load, words, true kinds.

N blocks, T tokens per block, E experts, D true kinds of tokens.
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

WORDS = 8  # per expert
RARE = 10  # words that occur less often in the blocks are ignored


def word_numbers(blocks: np.ndarray, has_truth: bool) -> np.ndarray:
    """Return the words (N, T) of the last block of the context.

    blocks: (N, C, T), channels of context blocks; with known truth, followed by as many of kinds.
    """
    return blocks[:, blocks.shape[1] // (1 + has_truth) - 1].astype(np.int64)


def word_galleries_by_layer(
    model: Model, blocks: np.ndarray, vocabulary: Sequence[str]
) -> list[LayerGallery]:
    """Return the profiles of every MoE layer's experts on blocks (N, C, T) of text."""
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
                kinds=[(index + 1, share) for index, share in largest_shares(kind_shares)],
                words=[(vocabulary[word], share) for word, share in favourites],
                peak=0,
                favourites=(),
            )
            for load, kind_shares, favourites in zip(
                loads, kinds, favourite_words(words, chosen.numpy()), strict=True
            )
        ]
        galleries.append(LayerGallery(experts=experts, places=None, crops=None))
    return galleries


def favourite_words(
    words: np.ndarray, chosen: np.ndarray, rare: int = RARE
) -> list[list[tuple[int, float]]]:
    """Return, per expert, the words with the largest shares of tokens that chose it, and shares.

    words: (N, T); chosen: (N, T, E) bool. Words that occur fewer than ``rare`` times are ignored.
    """
    vocabulary, inverse, counts = np.unique(words, return_inverse=True, return_counts=True)
    uses = np.zeros((len(vocabulary), chosen.shape[-1]))
    np.add.at(uses, inverse.ravel(), chosen.reshape(-1, chosen.shape[-1]))
    is_common = counts >= rare
    common = vocabulary[is_common]
    shares = torch.from_numpy(uses[is_common] / counts[is_common, None])
    return [
        [(int(common[row]), share) for row, share in largest_shares(expert_shares, WORDS)]
        for expert_shares in shares.T
    ]
