"""Stability of the choice of experts: between two views of an image (PRC), and over epochs (TGR).

B images, P pairs of corresponding tokens per image, E experts; N images of the epochs, T tokens.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from moecore.core.files import UserError


class MatchRatios(NamedTuple):
    """Shares of pairs that choose the same, 0 to 1."""

    top1: float  # best expert
    top2_ordered: float  # best and second in this order
    top2_sets: float  # two best as a set


def match_counts_by_image(probs_1: Tensor, probs_2: Tensor, is_pair: Tensor) -> Tensor:
    """Count each image's pairs that agree, (B, 3) int64; in a tie the lowest expert is best.

    Columns: best expert, best and second in this order, two best as a set. probs_1, probs_2:
    (B, P, E), both sides of each pair; is_pair: (B, P) bool, which pairs exist.
    """
    if probs_1.shape[-1] < 2 or not is_pair.any():
        raise UserError.at(
            "consistency",
            found=f"{int(is_pair.sum())} pairs and {probs_1.shape[-1]} experts",
            allowed="at least one pair and two experts",
        )
    ours = _two_best(probs_1)
    theirs = _two_best(probs_2)
    ordered = ours == theirs
    sets = ordered.all(-1) | (ours == theirs.flip(-1)).all(-1)
    return torch.stack(
        [(same & is_pair).sum(dim=1) for same in (ordered[..., 0], ordered.all(-1), sets)], dim=1
    )


def match_ratios(probs_1: Tensor, probs_2: Tensor, is_pair: Tensor) -> MatchRatios:
    """Return the match ratios of corresponding tokens' experts, over all pairs (PRC, table 4)."""
    counts = match_counts_by_image(probs_1, probs_2, is_pair).sum(dim=0)
    pairs = int(is_pair.sum())
    return MatchRatios(*(count / pairs for count in counts.tolist()))


def agreement_over_epochs(first_experts: Sequence[np.ndarray]) -> dict[str, list[float]]:
    """Return the share of tokens with the best expert of the final, and of the previous, epoch.

    first_experts: per epoch, (N, T) integers, the best expert of each token of the same N images.
    ``with_final``: one value per epoch, the last is 1; ``consecutive``: one per pair of epochs.
    """
    epochs = _check_epochs(first_experts)
    return {
        "with_final": [_agreeing_share(experts, epochs[-1]) for experts in epochs],
        "consecutive": [_agreeing_share(before, after) for before, after in pairwise(epochs)],
    }


def _check_epochs(first_experts: Sequence[np.ndarray]) -> list[np.ndarray]:
    epochs = [np.asarray(experts) for experts in first_experts]
    shapes = sorted({experts.shape for experts in epochs})
    if len(shapes) != 1 or epochs[0].size == 0:
        raise UserError.at(
            "consistency",
            found=f"{len(epochs)} epochs with choices of shape {shapes}",
            allowed="at least one epoch, all of one shape (images, tokens)",
        )
    return epochs


def _two_best(probs: Tensor) -> Tensor:
    # topk does not define the order of ties
    return probs.argsort(dim=-1, descending=True, stable=True)[..., :2]


def _agreeing_share(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float((ours == theirs).mean())
