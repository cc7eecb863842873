"""Tokens of a trace that stand for an expert: those of the highest probability, and drawn ones.

N items, T tokens of one, E experts, K tokens that are kept of each.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from moecore.core.routing_records import RoutingRecord, TokenLayout
from moecore.lens.traces import Trace
from moecore.measure.exploring.expert_gallery import FavouritePatch
from moecore.measure.exploring.expert_overlay_data import patch_crop
from moecore.nn.routing_traces import coarse_patch_indices

EXAMPLES = 8  # of an expert, of each kind
AROUND = 4  # words before and after an example


class KeptTokens(NamedTuple):
    """Of each expert the tokens of the highest keys, one an item, the highest first, (K, E)."""

    keys: Tensor  # −1: no token
    items: Tensor
    patches: Tensor
    probabilities: Tensor  # that the router gave the expert


class Example(NamedTuple):
    """A token that chose an expert, and what stands there."""

    token: FavouritePatch  # its patch is one of the finest layer's
    crop: Tensor | None  # uint8 (C, h, w); None without pictures
    words: tuple[str, str, str]  # before it, it, after it; of a token without a word its place


def keep_highest(
    kept: KeptTokens, record: RoutingRecord, keys: Tensor, layout: TokenLayout, items: np.ndarray
) -> KeptTokens:
    """Return the EXAMPLES highest of what is kept and of new items: of each item and expert that
    of its patches that chose it with the highest key; the first of equal ones.

    keys: (N, T, E or 1), from 0.  items: their places, (N,), above those that are kept.
    """
    own = torch.where(record.chosen, keys, -1)[:, layout.special :]
    highest, patches = own.max(dim=1)
    probabilities = record.probs[:, layout.special :].gather(1, patches[:, None])[:, 0]
    places = torch.from_numpy(items)[:, None].expand_as(patches)
    pairs = zip(kept, (highest, places, patches, probabilities), strict=True)
    joined = [torch.cat([before.to(new.dtype), new]) for before, new in pairs]
    order = joined[0].sort(dim=0, descending=True, stable=True).indices[:EXAMPLES]
    return KeptTokens(*(one.gather(0, order) for one in joined))


def read_examples(
    trace: Trace, kept: KeptTokens, layout: TokenLayout, fine: TokenLayout
) -> list[list[Example]]:
    """Return for each expert of a layer the tokens that are kept, with what stands there.

    fine: the layout of the finest layer.
    """
    experts: list[list[Example]] = [[] for _ in range(kept.keys.shape[1])]
    items = kept.items[kept.keys >= 0].unique().numpy()
    if not len(items):
        return experts
    pictures, tokens = (trace.beside(name, items) for name in ("pictures", "tokens"))
    covers = coarse_patch_indices(layout, fine)
    for rank, expert in (kept.keys >= 0).nonzero().tolist():
        item, patch = (int(field[rank, expert]) for field in (kept.items, kept.patches))
        row = int(np.searchsorted(items, item))
        token = FavouritePatch(
            image=item,
            patch=int((covers == patch).nonzero()[0]),
            probability=round(float(kept.probabilities[rank, expert]), 4),
        )
        words = ("", f"item {item}, token {patch + 1}", "")
        if tokens is not None and tokens.shape[1] == layout.special + len(covers):
            words = words_around(trace, tokens[row].tolist(), layout.special + patch)
        crop = None
        if pictures is not None:  # a copy: the crop is a view of the whole picture
            crop = patch_crop(pictures[row], patch, layout).clone()
        experts[expert].append(Example(token, crop, words))
    return experts


def words_of_tokens(trace: Trace, tokens: Sequence[int]) -> list[str]:
    """Return the words of tokens; without a vocabulary their numbers."""
    vocabulary = trace.card.vocabulary
    return [vocabulary[one] if vocabulary else str(one) for one in tokens]


def words_around(trace: Trace, tokens: Sequence[int], place: int) -> tuple[str, str, str]:
    """Return words of an item's tokens: before a place, there and after it."""
    words = words_of_tokens(trace, tokens[max(0, place - AROUND) : place + AROUND + 1])
    there = min(place, AROUND)
    return " ".join(words[:there]), words[there], " ".join(words[there + 1 :])
