"""How stable the choice of experts is: between two views of an image (PRC, table 4) and over the epochs of a training (TGR-MoE)."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from torch import Tensor

from moecore.files import StageError


class Matches(NamedTuple):
    """Share of pairs, 0 to 1, that choose the same: best expert; best and second in this order; two best as a set."""

    top1: float
    top2_ordered: float
    top2_sets: float


def match_ratios(probs_1: Tensor, probs_2: Tensor, found: Tensor) -> Matches:
    """Match ratios of the experts that corresponding tokens choose (PRC, table 4).

    probs_1, probs_2: (B, P, E), both sides of each pair, E ≥ 2; found: (B, P) bool, which pairs there are.  Ties go to the lowest index.
    Raises StageError where shapes differ, there is no pair, or E is 1.
    """
    if probs_1.shape != probs_2.shape or found.shape != probs_1.shape[:-1]:
        shapes = f"{tuple(probs_1.shape)}, {tuple(probs_2.shape)} and found {tuple(found.shape)}"
        raise StageError(f"consistency: probs of shape {shapes}; needed: equal (images, pairs, experts), and found (images, pairs)")
    if probs_1.shape[-1] < 2 or not found.any():
        raise StageError(f"consistency: {int(found.sum())} pairs and {probs_1.shape[-1]} experts; needed: at least one pair and two experts")
    ours, theirs = _two_best(probs_1[found]), _two_best(probs_2[found])
    ordered = ours == theirs
    sets = ordered.all(-1) | (ours == theirs.flip(-1)).all(-1)
    return Matches(*(float(same.double().mean()) for same in (ordered[:, 0], ordered.all(-1), sets)))


def epoch_agreement(first_experts: Sequence[np.ndarray]) -> dict[str, list[float]]:
    """Share of tokens whose best expert is that of the final model, and that of the epoch before (TGR-MoE).

    first_experts: per epoch, (N, T) integers, the best expert of each token of the same N images.
    Returns ``with_final``, one value an epoch (the last is 1), and ``consecutive``, one value from each epoch to the next.
    Raises StageError where there is no epoch, or shapes differ.
    """
    epochs = [np.asarray(experts) for experts in first_experts]
    shapes = sorted({experts.shape for experts in epochs})
    if len(shapes) != 1 or epochs[0].size == 0:
        found = f"{len(epochs)} epochs with choices of shape {shapes}"
        raise StageError(f"consistency: {found}; needed: at least one epoch, all of one shape (images, tokens)")
    return {
        "with_final": [_agreement(experts, epochs[-1]) for experts in epochs],
        "consecutive": [_agreement(before, after) for before, after in pairwise(epochs)],
    }


def _two_best(probs: Tensor) -> Tensor:
    return probs.argsort(dim=-1, descending=True, stable=True)[..., :2]  # topk does not say who wins a tie


def _agreement(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float((ours == theirs).mean())
