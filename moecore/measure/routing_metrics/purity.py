"""Purity of experts on data with known truth: how well a token's expert tells its kind.

N images, L MoE layers, T tokens per image, E experts, D kinds of tokens.
"""

import math
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from moecore.core.routing_records import TokenLayout
from moecore.nn.backbones.base_model import majority_token_kinds
from moecore.nn.predict import image_batches
from moecore.statistics.crossed import linearize_ratio


def expert_truth_tables(
    experts: np.ndarray, kinds: np.ndarray, expert_count: int, kind_count: int
) -> np.ndarray:
    """Count each expert's tokens of each kind per image, int64 (N, E, D).

    experts: (N, T), 0 to E − 1, or −1 for none; kinds: (N, T), 1 to D, or 0 if unknown. Tokens
    without expert or kind are not counted.
    """
    cell = np.where(experts < 0, 0, experts * (kind_count + 1) + kinds)
    width = expert_count * (kind_count + 1)
    rows = np.arange(len(cell))[:, None] * width
    counts = np.bincount((rows + cell).ravel(), minlength=len(cell) * width)
    return counts.reshape(-1, expert_count, kind_count + 1)[:, :, 1:]


def token_kinds(images: Tensor, layout: TokenLayout) -> Tensor:
    """Return each token's kind, (N, T), from the last channel of stored images."""
    (last,) = image_batches(images[:, -1:], len(images))
    return majority_token_kinds(last, layout)


def expert_purity(table: np.ndarray) -> float:
    """Return the share of tokens of their expert's most frequent kind, from counts (E, D).

    NaN without tokens.
    """
    return float(table.max(axis=1).sum() / table.sum()) if table.any() else math.nan


def purity_by_image(tables: np.ndarray) -> np.ndarray:
    """Return ``expert_purity`` of the summed tables (N, E, D) as one value per image, (N,).

    Each image's influence (jackknife) with every expert's most frequent kind fixed.
    """
    kind = tables.sum(axis=0).argmax(axis=1)
    right = tables[:, np.arange(len(kind)), kind].sum(axis=1)
    return linearize_ratio(right, tables.sum(axis=(1, 2)))


def purity_over_layers(tables: Sequence[np.ndarray]) -> float:
    """Return the mean purity of the layers' tables (E, D)."""
    return float(np.mean([expert_purity(table) for table in tables]))


def purity_by_epoch(
    first: Sequence[np.ndarray], kinds: np.ndarray, expert_count: int, kind_count: int
) -> list[float]:
    """Return the layers' mean purity after each epoch; first: per epoch first experts (N, L, T)."""
    return [
        purity_over_layers(
            [
                expert_truth_tables(layer, kinds, expert_count, kind_count).sum(axis=0)
                for layer in epoch.astype(np.int64).swapaxes(0, 1)
            ]
        )
        for epoch in first
    ]
