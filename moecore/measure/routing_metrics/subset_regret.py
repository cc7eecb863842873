"""What a router leaves on the table: the loss under its experts against that under other sets.

n tokens, S sets of k of E experts, each token's losses (n, S) with all other tokens' choices held.
"""

from itertools import combinations
from math import comb
from typing import NamedTuple

import numpy as np

EXACT = 512  # sets of experts, of which all are tried
SAMPLED = 256  # of more sets so many are drawn
TOLERANCE = 1e-6  # of a loss: below it is rounding


class SubsetRegret(NamedTuple):
    """One value a token, (n,)."""

    regret: np.ndarray  # loss − smallest loss, ≥ 0
    room: np.ndarray  # mean loss over the sets − smallest loss: the regret of a random set
    better: np.ndarray  # share of the sets with a smaller loss


def list_subsets(experts: int, k: int, seed: int = 0) -> np.ndarray:
    """Return sets of k experts, (S, E) bool: all in their order, or SAMPLED of more than EXACT."""
    if comb(experts, k) <= EXACT:
        chosen = np.array(list(combinations(range(experts), k)))
    else:
        drawn = np.random.default_rng(seed).random((SAMPLED, experts))
        chosen = drawn.argsort(axis=1)[:, :k]
    subsets = np.zeros((len(chosen), experts), dtype=bool)
    np.put_along_axis(subsets, chosen, True, axis=1)
    return subsets


def subset_regret(losses: np.ndarray, own: np.ndarray) -> SubsetRegret:
    """Return what tokens would gain by their best sets.

    losses: (n, S) of the sets.  own: (n,) of the chosen set, which counts among them: of sampled
    sets the regret is a lower bound.
    """
    smallest = np.minimum(losses.min(axis=1), own)
    better = losses < (own - TOLERANCE)[:, None]
    return SubsetRegret(own - smallest, losses.mean(axis=1) - smallest, better.mean(axis=1))


def fixed_subset_gain(losses: np.ndarray, own: np.ndarray, is_first: np.ndarray) -> np.ndarray:
    """Return what each token would gain by one set for all tokens, (n,); below 0: routing gains.

    is_first: (n,) bool, the tokens of one half.  A half has the set that is best for the other.
    """
    gain = np.empty(len(own))
    for half in (is_first, ~is_first):
        best = losses[~half].mean(axis=0).argmin()
        gain[half] = own[half] - losses[half, best]
    return gain
