"""Folds of a training split: a participant's sessions in exactly one, old and young in each."""

from collections.abc import Sequence

import numpy as np

from moecore.core.files import UserError


def folds_of(participants: Sequence[str], ages: np.ndarray, folds: int, seed: int) -> np.ndarray:
    """The fold (N,) int64 of each volume.

    Participants are sorted by mean age, each ``folds`` neighbours shuffled over the folds.
    participants: (N,) ids; ages: (N,). Raises UserError where there are fewer participants than
    folds.
    """
    names, person = np.unique(np.array(participants, dtype=str), return_inverse=True)
    if len(names) < folds:
        raise UserError(
            f"out_of_fold.folds: found {folds}; allowed: at most the {len(names)} participants of "
            "the training split"
        )
    means = np.bincount(person, weights=np.asarray(ages, np.float64)) / np.bincount(person)
    generator = np.random.default_rng(seed)
    fold = np.empty(len(names), np.int64)
    order = np.argsort(means, kind="stable")
    for start in range(0, len(order), folds):
        group = order[start : start + folds]
        fold[group] = generator.permutation(folds)[: len(group)]
    return fold[person]
