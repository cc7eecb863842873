"""How long neighbouring tokens keep their experts (segment routing best performance, 2505.16056).

A window of m neighbours that may load some experts once: how well can one set serve all its tokens?
B images or texts, T tokens in their order, E experts.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from moecore.core.files import UserError
from moecore.measure.base import SEED
from moecore.statistics.crossed import linearize_ratio


def window_use_histogram(chosen: Tensor, length: int) -> Tensor:
    """Return how many pairs of window and expert have a = 0 … m uses, (B, m + 1) int64.

    chosen: (B, T, E) bool.  Windows of ``length`` m tokens begin at every token.
    Raises UserError where a sequence is shorter than a window.
    """
    if length > chosen.shape[1]:
        problem = f"found a window of {length} in sequences of {chosen.shape[1]} tokens"
        raise UserError(f"local_consistency: {problem}; allowed: at most as long")
    uses = chosen.long().unfold(1, length, 1).sum(dim=-1).flatten(1)
    return torch.stack([(uses == number).sum(dim=1) for number in range(length + 1)], dim=1)


def consistency_by_threshold(uses: np.ndarray) -> np.ndarray:
    """Return F1 for each threshold θ = 0 … m, (m + 1,), of counts ``uses`` (m + 1,).

    Each window loads the experts with at least θ uses: 2·served / (m·loaded + needed).
    """
    served, needed_and_loaded = _served_and_size(uses[None])
    return 2 * served[0] / needed_and_loaded[0]


def consistency_by_image(uses: np.ndarray) -> np.ndarray:
    """Return the largest F1 as one value an image, (B,), whose mean it is; uses (B, m + 1)."""
    best = int(consistency_by_threshold(uses.sum(axis=0)).argmax())
    served, needed_and_loaded = _served_and_size(uses)
    return linearize_ratio(2 * served[:, best], needed_and_loaded[:, best])


def _served_and_size(uses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return uses that are served, and slots loaded plus uses needed: (B, m + 1), over θ."""
    length = uses.shape[1] - 1
    weighted = uses * np.arange(length + 1)
    served = np.flip(np.flip(weighted, 1).cumsum(axis=1), 1)
    loaded = length * np.flip(np.flip(uses, 1).cumsum(axis=1), 1)
    return served, loaded + weighted.sum(axis=1, keepdims=True)


def window_consistency(
    patches: Tensor, windows: Sequence[int]
) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Return values by image, and the mean by chance, of windows shorter than tokens (N, T, E)."""
    values, chances = {}, {}
    number, length = patches.shape[:2]
    order = np.random.default_rng(SEED).permuted(np.tile(np.arange(length), (number, 1)), axis=1)
    shuffled = patches[torch.arange(number).unsqueeze(-1), torch.from_numpy(order)]
    for window in sorted(window for window in windows if window < length):
        name = f"consistency_{window}"
        values[name] = consistency_by_image(window_use_histogram(patches, window).numpy())
        uses = window_use_histogram(shuffled, window).sum(dim=0).numpy()
        chances[name] = float(consistency_by_threshold(uses).max())
    return values, chances
