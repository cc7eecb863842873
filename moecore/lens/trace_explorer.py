"""The explorer of a trace: its result from records alone, gathered as the files of the trace come.

In memory are one layer of one file, counts, and the examples that are kept of each expert.
N items, T tokens of one, E experts, V numbers of words or of labels.
"""

import json
from collections.abc import Sequence
from itertools import chain
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from moecore.core.encoded_arrays import encode_arrays
from moecore.data.prepared import evenly_spaced_indices
from moecore.lens import analyses
from moecore.lens.traces import LayerShape, Trace
from moecore.measure.base import SEED
from moecore.measure.explorer import Result, ShownVariant
from moecore.measure.exploring.expert_gallery import ExpertProfile, LayerGallery, largest_shares
from moecore.measure.exploring.expert_overlay_data import CROP, encode_thumbnails
from moecore.measure.exploring.watched import spread_places
from moecore.measure.exploring.word_gallery import RARE, WORDS
from moecore.nn.routing_traces import (
    ImageTraces,
    coarse_patch_indices,
    encode_top_experts,
    finest_layout,
    record_on_finer_grid,
)
from moecore.report.page.expert_answers import PARTNERS, roles_answers
from moecore.report.page.explorer_page import PageHead, intern_texts, render_explorer

MOST_BYTES = 3_000_000  # of the page
SHARES = (1, 2, 4, 8, 16)  # by which fewer items and examples are shown until it is as small
ITEMS = 24
TOKENS = 256  # of a text that are shown, the first ones
KINDS = 255  # of tokens, as a byte numbers them
NUMBERED = ("tokens", "labels")
UNLIKE = "explorer: found layers of other tokens; allowed: the same of all, or grids of two axes"


class SeenLayer(NamedTuple):
    """The experts of one MoE layer, and for each the examples: the surest, and drawn ones."""

    profiles: list[ExpertProfile]
    places: Tensor | None  # (E, 1, *grid) of the finest layer, shares of items; None of a text
    examples: list[tuple[list[analyses.Example], list[analyses.Example]]]


class TraceExplorer:
    """What is shown of a trace, whose layers ``can_explore``."""

    def __init__(self, trace: Trace, items: int | None = None) -> None:
        """``items``: so many are counted at most, evenly spread; None: all."""
        self.trace = trace
        self.parts = split_places_by_file(trace, items)
        shapes = trace.card.layers
        size = finest_layout([one.layout() for one in shapes]).grid  # of no picture: a pixel each
        pictures, labels = (trace.beside(name, np.arange(1)) for name in ("pictures", "labels"))
        if pictures is not None:
            size = tuple(pictures.shape[2:])
        self.layouts = [one.layout(size) for one in shapes]
        self.fine = finest_layout(self.layouts)
        self.is_text = len(self.fine.grid) == 1
        self.has_pictures = pictures is not None
        self.has_kinds = labels is not None and labels.ndim == 2
        self.numbers = {name: count_numbers(trace, name, self.parts) for name in NUMBERED}
        self.layers = [self._see_layer(number) for number in range(len(shapes))]

    def page_data(
        self, numbers: analyses.TraceNumbers, name: str, pool: dict[str, int], items: int, most: int
    ) -> dict[str, Any]:
        """Return what the page knows of the trace; packed texts are places in ``pool``.

        Of so many items at most, and of an expert of so many examples.
        """
        known = roles_answers([layer.roles for layer in numbers.layers], min(most, PARTNERS))
        for of_layer, seen in zip(known, self.layers, strict=True):
            of_layer["surest"] = [len(surest[:most]) for surest, _ in seen.examples]
            if not self.has_pictures:
                cut = [surest[:most] + drawn[:most] for surest, drawn in seen.examples]
                of_layer["contexts"] = [[one.words for one in examples] for examples in cut]
        model = intern_texts(self.result(items, most).model_dump(mode="json"), pool)
        return {"name": name, "model": model, "known": {"layers": known, "open": []}}

    def result(self, items: int = ITEMS, most: int = analyses.EXAMPLES) -> Result:
        """Return what is shown: so many items, and of an expert so many examples and words."""
        trace, fine = self.trace, self.fine
        places = np.sort(spread_places(trace.items, items))
        if self.is_text:
            fine = fine._replace(grid=(min(fine.grid[0], TOKENS),))
        there = slice(fine.special + prod(fine.grid))
        layers = []
        for number, layout in enumerate(self.layouts):
            record = analyses.record_of_layer(trace.layer(number, places))
            record = record_on_finer_grid(record, layout, self.fine)
            layers.append(encode_top_experts(record.map_tensors(lambda field: field[:, there])))
        pictures, labels, tokens = (
            trace.beside(name, places) for name in ("pictures", "labels", "tokens")
        )
        nothing = [()] * len(places)
        variant = ShownVariant(
            kind="clean",
            label="clean",
            picture=None if pictures is None else encode_thumbnails(pictures / 255),
            origins=None,
            trace=ImageTraces(answers=nothing, values=nothing, layers=layers),
        )
        words, of_items, kinds = None, nothing, None
        if tokens is not None and self.is_text:
            words = [analyses.words_of_tokens(trace, row) for row in tokens[:, there].tolist()]
        if labels is not None and not self.has_kinds:
            of_items = [[label] * (label >= 0) for label in labels.tolist()]
        if labels is not None and labels.shape[1:] == record.probs.shape[1:2]:
            known = (labels[:, there] + 1).clamp(min=0)
            kinds = encode_arrays(known.where(known <= KINDS, 0).numpy().astype(np.uint8))
        return Result(
            special=fine.special,
            grid=fine.grid,
            images=places.tolist(),
            labels=of_items,
            words=words,
            kinds=kinds,
            layers=[gallery_of_layer(seen, most) for seen in self.layers],
            shown=[variant],
        )

    def _see_layer(self, number: int) -> SeenLayer:
        """Count what one layer did with all items, and keep examples of each expert."""
        trace, layout = self.trace, self.layouts[number]
        experts = trace.card.layers[number].experts
        surest = drawn = analyses.KeptTokens(*torch.zeros(4, 0, experts).unbind())
        at_place = torch.zeros(prod(layout.grid), experts)
        uses = {name: torch.zeros(1 + len(of), experts).int() for name, of in self.numbers.items()}
        load = torch.zeros(experts).double()
        draws = np.random.default_rng((SEED, number))
        for places in self.parts:
            record = analyses.record_of_layer(trace.layer(number, places))
            keys = torch.from_numpy(draws.random(record.chosen.shape[:2]))[..., None]
            surest = analyses.keep_highest(surest, record, record.probs, layout, places)
            drawn = analyses.keep_highest(drawn, record, keys, layout, places)
            load += record.chosen.sum(dim=(0, 1))
            at_place += record.chosen[:, layout.special :].sum(dim=0)
            for name, of in uses.items():
                add_uses(of, trace.beside(name, places), record.chosen)
        at_place = at_place[coarse_patch_indices(layout, self.fine)] / sum(map(len, self.parts))
        places = None if self.is_text else at_place.T.unflatten(1, (1, *self.fine.grid))
        profiles = self._profiles(load, places, uses)
        sides = [analyses.read_examples(trace, kept, layout, self.fine) for kept in (surest, drawn)]
        return SeenLayer(profiles, places, list(zip(*sides, strict=True)))

    def _profiles(
        self, load: Tensor, places: Tensor | None, uses: dict[str, Tensor]
    ) -> list[ExpertProfile]:
        """Return the experts of a layer. load: (E,); places: see SeenLayer; uses: see add_uses."""
        counts = torch.from_numpy(self.numbers["tokens"])
        common = (counts >= RARE).nonzero().flatten()
        words = uses["tokens"][1:][common].double() / counts[common, None]
        labels = uses["labels"][1:].double()
        labels /= labels.sum(dim=0).clamp(min=1)
        peaks = torch.zeros(len(load)) if places is None else places.flatten(1).amax(dim=1)
        profiles = []
        for expert, share in enumerate((load / load.sum().clamp(min=1)).tolist()):
            told = largest_shares(labels[:, expert])
            often = largest_shares(words[:, expert], WORDS)
            names = analyses.words_of_tokens(self.trace, [int(common[place]) for place, _ in often])
            profiles.append(
                ExpertProfile(
                    load=round(share, 5),
                    classes=() if self.has_kinds else told,
                    kinds=[(label + 1, part) for label, part in told] if self.has_kinds else (),
                    words=list(zip(names, [part for _, part in often], strict=True)),
                    peak=round(float(peaks[expert]), 4),
                    favourites=(),
                )
            )
        return profiles


class ExploredTrace(NamedTuple):
    """A trace on the page: what is shown of it, and what was found."""

    explorer: TraceExplorer
    numbers: analyses.TraceNumbers


def render_traces(ours: ExploredTrace, head: PageHead, theirs: ExploredTrace | None = None) -> str:
    """Return the page of a trace, beside another of the same items that it was compared with.

    The more experts and layers, the less of each is shown.
    """
    page = ""
    for share in SHARES:
        page = _render_part(ours, head, theirs, ITEMS // share, analyses.EXAMPLES // share)
        if len(page.encode()) <= MOST_BYTES:
            break
    return page


def _render_part(
    ours: ExploredTrace, head: PageHead, theirs: ExploredTrace | None, items: int, most: int
) -> str:
    pool: dict[str, int] = {}
    trace = ours.explorer.trace
    names, sides, matches = [trace.card.model], [ours], []
    if theirs is not None:
        other = theirs.explorer.trace
        is_same = other.card.model == names[0]
        names.append(f"{other.card.model}, {other.folder}" if is_same else other.card.model)
        sides.append(theirs)
        matches.append((*names, [layer.partners for layer in ours.numbers.layers]))
    phase = {
        "name": "trace",
        "title": names[0],
        "answers": [f"label {label}" for label in range(len(ours.explorer.numbers["labels"]))],
        "unit": "",
        "classes": True,
        "cells": 1,
        "source": "trace",
        "kinds": {"name": "label", "first": 0},
        "methods": [
            side.explorer.page_data(side.numbers, name, pool, items, most)
            for name, side in zip(names, sides, strict=True)
        ],
        "matches": matches,
    }
    text = json.dumps([phase], ensure_ascii=False).encode()
    return render_explorer(encode_arrays(np.frombuffer(text, np.uint8)), pool, head)


def can_explore(layers: Sequence[LayerShape]) -> bool:
    """Return whether all layers have the same tokens, or patches of grids of one picture."""
    layouts = [layer.layout() for layer in layers]
    rows = {layout for layout in layouts if len(layout.grid) == 1}
    return len({(layout.special, len(layout.grid)) for layout in layouts}) == 1 and len(rows) < 2


def split_places_by_file(trace: Trace, items: int | None) -> list[np.ndarray]:
    """Return the places of so many items, evenly spread, as each file of the trace has them."""
    places = evenly_spaced_indices(trace.items, items)
    ends = np.cumsum([chunk.items for chunk in trace.card.chunks])
    return [part for part in np.split(places, np.searchsorted(places, ends[:-1])) if len(part)]


def count_numbers(trace: Trace, name: str, parts: Sequence[np.ndarray]) -> np.ndarray:
    """Return how often each number from 0 is there, (V,); nothing where the trace has none."""
    counts = np.zeros(0, int)
    for places in parts:
        values = trace.beside(name, places)
        if values is None:
            break
        more = np.bincount(values[values >= 0].numpy(), minlength=len(counts))
        counts = more + np.pad(counts, (0, len(more) - len(counts)))
    return counts


def add_uses(uses: Tensor, numbers: Tensor | None, chosen: Tensor) -> None:
    """Add to (1 + V, E) the tokens of each number that chose each expert; to row 0 those of none.

    numbers: (N,) or (N, T); those of another layer's tokens, and None, add nothing.  chosen:
    (N, T, E) bool.
    """
    if numbers is not None and numbers.shape[1:] in ((), chosen.shape[1:2]):
        of_tokens = numbers.view(len(numbers), -1).expand(chosen.shape[:2])
        rows = (of_tokens.clamp(min=-1) + 1).flatten()
        uses.index_add_(0, rows, chosen.flatten(0, 1).int())


def gallery_of_layer(seen: SeenLayer, most: int) -> LayerGallery:
    """Return a layer's experts with so many words, and examples of each kind, at most."""
    cut = [surest[:most] + drawn[:most] for surest, drawn in seen.examples]
    experts = []
    for profile, examples in zip(seen.profiles, cut, strict=True):
        favourites = tuple(one.token for one in examples)
        more = {"words": profile.words[:most], "favourites": favourites}
        experts.append(profile.model_copy(update=more))
    crops = [one.crop for one in chain.from_iterable(cut) if one.crop is not None]
    places = None
    if seen.places is not None:
        axes = tuple(range(1, seen.places.ndim))
        peaks = seen.places.amax(dim=axes, keepdim=True).clamp(min=1e-9)
        places = encode_thumbnails(seen.places / peaks)
    return LayerGallery(
        experts=experts,
        places=places,
        crops=encode_thumbnails(torch.stack(crops) / 255, CROP) if crops else None,
    )
