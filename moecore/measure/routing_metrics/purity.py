"""The purity of experts on data whose truth is known: whether a token's expert tells its kind.

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
    experts: np.ndarray, kinds: np.ndarray, number: int, dialects: int
) -> np.ndarray:
    """Return how often each expert saw each kind, by image, int64 (N, E, D).

    experts: (N, T), 0 to E − 1, or −1 for none, which is not counted.  kinds: (N, T), 1 to D, or 0
    where it is not known.
    """
    cell = np.where(experts < 0, 0, experts * (dialects + 1) + kinds)
    width = number * (dialects + 1)
    rows = np.arange(len(cell))[:, None] * width
    counted = np.bincount((rows + cell).ravel(), minlength=len(cell) * width)
    return counted.reshape(-1, number, dialects + 1)[:, :, 1:]


def token_kinds(images: Tensor, layout: TokenLayout) -> Tensor:
    """Return each token's kind (N, T) of images as they are stored, whose last channel says it."""
    (last,) = image_batches(images[:, -1:], len(images))
    return majority_token_kinds(last, layout)


def expert_purity(table: np.ndarray) -> float:
    """Return the share of tokens of their expert's most frequent kind; NaN without tokens.

    table: (E, D), counts.
    """
    return float(table.max(axis=1).sum() / table.sum()) if table.any() else math.nan


def purity_by_image(tables: np.ndarray) -> np.ndarray:
    """Return ``expert_purity`` of all images' sum as one value an image, (N,), whose mean it is.

    tables: (N, E, D).  What an image does to it while each expert's kind stays (as a jackknife).
    """
    kind = tables.sum(axis=0).argmax(axis=1)
    right = tables[:, np.arange(len(kind)), kind].sum(axis=1)
    return linearize_ratio(right, tables.sum(axis=(1, 2)))


def purity_over_layers(tables: Sequence[np.ndarray]) -> float:
    """Return the mean purity of the layers' tables (E, D)."""
    return float(np.mean([expert_purity(table) for table in tables]))


def purity_by_epoch(
    first: Sequence[np.ndarray], kinds: np.ndarray, number: int, dialects: int
) -> list[float]:
    """Return the mean purity of the layers after each epoch.

    first: per epoch each token's first expert, integers (N, L, T).  kinds: (N, T), as above.
    """
    return [
        purity_over_layers(
            [
                expert_truth_tables(layer, kinds, number, dialects).sum(axis=0)
                for layer in epoch.astype(np.int64).swapaxes(0, 1)
            ]
        )
        for epoch in first
    ]
