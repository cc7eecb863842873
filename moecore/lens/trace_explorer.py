"""Build the explorer of a trace, an interactive page about each layer's experts.

Memory holds one layer of one file, counts, and each expert's examples. N items, T tokens per item,
E experts, V different words or labels.
"""

import json
from collections.abc import Sequence
from itertools import chain
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from moecore.core.arrays_as_text import encode_concatenated_arrays
from moecore.data.prepared import evenly_spaced_indices
from moecore.lens import analyses
from moecore.lens.traces import LayerShape, Trace
from moecore.measure.base import SEED
from moecore.measure.explorer import ExplorerData, TracedImages
from moecore.measure.routing_metrics import epoch_routing, expert_profiles
from moecore.measure.routing_metrics.expert_profiles import CROP_SIDE, encode_thumbnails
from moecore.nn import encoded_routing
from moecore.nn.encoded_routing import coarse_patch_indices, finest_layout
from moecore.report.page import explorer_page

MAX_PAGE_BYTES = 3_000_000  # of the page
PAGE_SHRINKING_DIVISORS = (1, 2, 4, 8, 16)  # of the numbers of items and examples
MAX_ITEMS = 24
MAX_SHOWN_TOKENS = 256  # shown of each text
MAX_TOKEN_LABEL = 255  # labels of tokens are stored as bytes
ID_TENSORS = ("tokens", "labels")
NOT_EXPLORABLE = "explorer: layers with different tokens; allowed: the same, or grids of two axes"


class ExploredLayer(NamedTuple):
    """The experts of one MoE layer, each with its most probable tokens and random ones."""

    profiles: list[expert_profiles.ExpertProfile]
    places: Tensor | None  # (E, 1, *grid) of the finest layer, shares of items; None for texts
    examples: list[tuple[list[analyses.Example], list[analyses.Example]]]


class ExplorerDataCollector:
    """Collects a trace's counts and examples for the explorer page; see ``can_explore``."""

    def __init__(self, trace: Trace, items: int | None = None) -> None:
        """Read up to ``items`` items, evenly spread (None: all), and explore every layer."""
        self.trace = trace
        places = evenly_spaced_indices(trace.items, items)
        ends = np.cumsum([chunk.items for chunk in trace.card.chunks])
        by_file = np.split(places, np.searchsorted(places, ends[:-1]))
        self.parts = [part for part in by_file if len(part)]
        shapes = trace.card.layers
        size = finest_layout([shape.layout() for shape in shapes]).grid  # one pixel per patch
        first = np.arange(1)
        pictures, labels = (trace.item_tensor(name, first) for name in ("pictures", "labels"))
        if pictures is not None:
            size = tuple(pictures.shape[2:])
        self.layouts = [shape.layout(size) for shape in shapes]
        self.fine = finest_layout(self.layouts)
        self.is_text = len(self.fine.grid) == 1
        self.has_pictures = pictures is not None
        self.has_kinds = labels is not None and labels.ndim == 2
        self.numbers = {key: count_word_or_label_ids(trace, key, self.parts) for key in ID_TENSORS}
        self.layers = [self._explore_layer(number) for number in range(len(shapes))]

    def build_page_data(
        self, items: int = MAX_ITEMS, examples: int = analyses.MAX_EXAMPLES
    ) -> ExplorerData:
        """Return the page's data: up to ``items`` items, ``examples`` of each kind per expert."""
        trace, fine = self.trace, self.fine
        places = np.sort(epoch_routing.nested_spread_indices(trace.items, items))
        if self.is_text:
            fine = fine._replace(grid=(min(fine.grid[0], MAX_SHOWN_TOKENS),))
        shown_tokens = slice(fine.special + prod(fine.grid))
        layers = []
        for number, layout in enumerate(self.layouts):
            record = analyses.convert_to_routing_record(trace.layer(number, places))
            record = encoded_routing.regrid_record(record, layout, self.fine)
            shown_record = record.map_tensors(lambda field: field[:, shown_tokens])
            layers.append(encoded_routing.encode_top_experts(shown_record))
        names = ("pictures", "labels", "tokens")
        pictures, labels, tokens = (trace.item_tensor(name, places) for name in names)
        empty = [()] * len(places)
        image = None if pictures is None else encode_thumbnails(pictures / 255)
        traces = encoded_routing.EncodedPredictionsAndRouting(
            answers=empty, values=empty, layers=layers
        )
        clean = TracedImages(kind="clean", label="clean", picture=image, origins=None, trace=traces)
        texts = kinds = None
        item_labels = empty
        if tokens is not None and self.is_text:
            rows = tokens[:, shown_tokens].tolist()
            texts = [analyses.words_of_tokens(trace, row) for row in rows]
        if labels is not None and not self.has_kinds:
            item_labels = [[label] if label >= 0 else [] for label in labels.tolist()]
        if labels is not None and labels.shape[1:] == record.probs.shape[1:2]:
            numbers = (labels[:, shown_tokens] + 1).clamp(min=0)
            small = numbers.where(numbers <= MAX_TOKEN_LABEL, 0).numpy()
            kinds = encode_concatenated_arrays(small.astype(np.uint8))
        return ExplorerData(
            special=fine.special,
            grid=fine.grid,
            images=places.tolist(),
            labels=item_labels,
            words=texts,
            kinds=kinds,
            layers=[gallery_of_layer(layer, examples) for layer in self.layers],
            shown=[clean],
        )

    def _explore_layer(self, number: int) -> ExploredLayer:
        """Count one layer's choices over all items, and collect each expert's examples."""
        trace = self.trace
        layout = self.layouts[number]
        experts = trace.card.layers[number].experts
        top = shown = analyses.TopTokens.of_none(experts)
        at_place = torch.zeros(prod(layout.grid), experts)
        numbers = self.numbers.items()
        uses = {name: torch.zeros(1 + len(counts), experts).int() for name, counts in numbers}
        load = torch.zeros(experts).double()
        draws = np.random.default_rng((SEED, number))
        for places in self.parts:
            record = analyses.convert_to_routing_record(trace.layer(number, places))
            keys = torch.from_numpy(draws.random(record.chosen.shape[:2]))[..., None]
            top = analyses.update_top_tokens(top, record, record.probs, layout, places)
            shown = analyses.update_top_tokens(shown, record, keys, layout, places)
            load += record.chosen.sum(dim=(0, 1))
            at_place += record.chosen[:, layout.special :].sum(dim=0)
            for name, counts in uses.items():
                add_choices_by_word_or_label(counts, trace.item_tensor(name, places), record.chosen)
        at_place = at_place[coarse_patch_indices(layout, self.fine)] / sum(map(len, self.parts))
        places = None if self.is_text else at_place.T.unflatten(1, (1, *self.fine.grid))
        profiles = self._build_expert_profiles(load, places, uses)
        examples = [analyses.read_examples(trace, best, layout, self.fine) for best in (top, shown)]
        return ExploredLayer(profiles, places, list(zip(*examples, strict=True)))

    def _build_expert_profiles(
        self, load: Tensor, places: Tensor | None, uses: dict[str, Tensor]
    ) -> list[expert_profiles.ExpertProfile]:
        """Return experts' load, typical words and labels, and largest share of items at a place."""
        # load: (E,); places: see ``ExploredLayer``; uses: "tokens" and "labels" → (1 + V, E), see
        # ``add_choices_by_word_or_label``.
        counts = torch.from_numpy(self.numbers["tokens"])
        common = (counts >= expert_profiles.MIN_WORD_COUNT).nonzero().flatten()
        shares_by_word = uses["tokens"][1:][common].double() / counts[common, None]
        labels = uses["labels"][1:].double()
        labels /= labels.sum(dim=0).clamp(min=1)
        peaks = torch.zeros(len(load)) if places is None else places.flatten(1).amax(dim=1)
        profiles = []
        for expert, share in enumerate((load / load.sum().clamp(min=1)).tolist()):
            label_shares = expert_profiles.largest_shares(labels[:, expert])
            kinds = [(label + 1, part) for label, part in label_shares]
            shares_of_words = shares_by_word[:, expert]
            word_shares = expert_profiles.largest_shares(shares_of_words, expert_profiles.MAX_WORDS)
            word_ids = [int(common[place]) for place, _ in word_shares]
            names = analyses.words_of_tokens(self.trace, word_ids)
            profile = expert_profiles.ExpertProfile(
                load=round(share, 5),
                classes=() if self.has_kinds else label_shares,
                kinds=kinds if self.has_kinds else (),
                words=list(zip(names, [part for _, part in word_shares], strict=True)),
                peak=round(float(peaks[expert]), 4),
                favourites=(),
            )
            profiles.append(profile)
        return profiles


class TraceWithNumbers(NamedTuple):
    explorer: ExplorerDataCollector
    numbers: analyses.TraceQuantities


def build_trace_entry(
    side: TraceWithNumbers, name: str, pool: dict[str, int], items: int, examples: int
) -> dict[str, Any]:
    """Return a trace's page data; encoded arrays are added to ``pool`` and become indices in it."""
    explorer = side.explorer
    roles = [layer.roles for layer in side.numbers.layers]
    answers = explorer_page.collect_expert_role_facts(roles, min(examples, explorer_page.PARTNERS))
    for answer, layer in zip(answers, explorer.layers, strict=True):
        answer["surest"] = [len(probable[:examples]) for probable, _ in layer.examples]
        if not explorer.has_pictures:
            answer["contexts"] = [
                [example.context for example in probable[:examples] + random[:examples]]
                for probable, random in layer.examples
            ]
    result = explorer.build_page_data(items, examples).model_dump(mode="json")
    model = explorer_page.intern_texts(result, pool)
    return {"name": name, "model": model, "known": {"layers": answers, "open": []}}


def render_traces(
    ours: TraceWithNumbers, head: explorer_page.ExplorerHead, theirs: TraceWithNumbers | None = None
) -> str:
    """Return the explorer's HTML for one or two traces; too large pages get fewer items."""
    names = [ours.explorer.trace.card.model]
    sides = [ours]
    matches = []
    if theirs is not None:
        other = theirs.explorer.trace
        is_same = other.card.model == names[0]
        names.append(f"{other.card.model}, {other.folder}" if is_same else other.card.model)
        sides.append(theirs)
        matches.append((*names, [layer.partners for layer in ours.numbers.layers]))
    answers = [f"label {label}" for label in range(len(ours.explorer.numbers["labels"]))]
    phase = {"name": "trace", "title": names[0], "answers": answers, "unit": "", "classes": True}
    phase |= {"cells": 1, "source": "trace", "kinds": {"name": "label", "first": 0}}
    phase |= {"methods": [], "matches": matches}
    page = ""
    for part in PAGE_SHRINKING_DIVISORS:
        pool: dict[str, int] = {}
        phase["methods"] = [
            build_trace_entry(side, name, pool, MAX_ITEMS // part, analyses.MAX_EXAMPLES // part)
            for name, side in zip(names, sides, strict=True)
        ]
        text = json.dumps([phase], ensure_ascii=False).encode()
        encoded = encode_concatenated_arrays(np.frombuffer(text, np.uint8))
        page = explorer_page.render_explorer(encoded, pool, head)
        if len(page.encode()) <= MAX_PAGE_BYTES:
            break
    return page


def can_explore(layers: Sequence[LayerShape]) -> bool:
    """Return whether one explorer fits all layers: equally many tokens, or grids of any size."""
    layouts = [layer.layout() for layer in layers]
    rows = {layout for layout in layouts if len(layout.grid) == 1}
    return len({(layout.special, len(layout.grid)) for layout in layouts}) == 1 and len(rows) < 2


def count_word_or_label_ids(trace: Trace, name: str, parts: Sequence[np.ndarray]) -> np.ndarray:
    """Count ids in the tensor ``name`` of the items at ``parts``: (V,); (0,) without the tensor."""
    counts = np.zeros(0, int)
    for places in parts:
        values = trace.item_tensor(name, places)
        if values is None:
            break
        counts_of_part = np.bincount(values[values >= 0].numpy(), minlength=len(counts))
        counts = counts_of_part + np.pad(counts, (0, len(counts_of_part) - len(counts)))
    return counts


def add_choices_by_word_or_label(uses: Tensor, numbers: Tensor | None, chosen: Tensor) -> None:
    """Add choices per word or label to ``uses`` (1 + V, E), row 0: unknown; None: nothing."""
    # Row 1 + n counts tokens with number n, row 0 those with an unknown one; chosen: (N, T, E).
    # numbers: of words or labels, (N,) or (N, T); ignored if T differs from ``chosen``.
    if numbers is not None and numbers.shape[1:] in ((), chosen.shape[1:2]):
        rows = (numbers.view(len(numbers), -1).expand(chosen.shape[:2]).clamp(min=-1) + 1).flatten()
        uses.index_add_(0, rows, chosen.flatten(0, 1).int())


def gallery_of_layer(layer: ExploredLayer, number: int) -> expert_profiles.LayerGallery:
    """Return a layer's experts as page data, with ``number`` words and examples of each kind."""
    examples = [probable[:number] + random[:number] for probable, random in layer.examples]
    experts = []
    for profile, of_expert in zip(layer.profiles, examples, strict=True):
        favourites = tuple(example.token for example in of_expert)
        changes = {"words": profile.words[:number], "favourites": favourites}
        experts.append(profile.model_copy(update=changes))
    crops = [example.crop for example in chain.from_iterable(examples) if example.crop is not None]
    places = None
    if layer.places is not None:
        axes = tuple(range(1, layer.places.ndim))
        peaks = layer.places.amax(dim=axes, keepdim=True).clamp(min=1e-9)
        places = encode_thumbnails(layer.places / peaks)
    return expert_profiles.LayerGallery(
        experts=experts,
        places=places,
        crops=encode_thumbnails(torch.stack(crops) / 255, CROP_SIDE) if crops else None,
    )
