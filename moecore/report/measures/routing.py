"""Which experts tokens choose: balance, agreement of views, eligibility, sureness."""

from collections.abc import Callable, Iterator

import numpy as np

from moecore.measure.routing import Result
from moecore.measure.routing_metrics.augmentations import resolve_augmentation
from moecore.report.column import (
    SCORE,
    Ahead,
    Column,
    Columns,
    Each,
    Given,
    column_slug,
    decode_items,
    mean_or_none,
    rows_by_name,
)
from moecore.report.figures.expert_maps import corresponding_patches, expert_load, expert_overlays
from moecore.report.measured import Phase, drop_none
from moecore.report.measures.routing_sweeps import (
    agreement_by_layer,
    by_layer,
    neighbours,
    scores_ahead,
    scores_over_k,
    sweeps,
    swept,
    swept_columns,
    swept_most,
)
from moecore.report.measures.shown import Figures, by_name
from moecore.report.page.view import Block, Picture
from moecore.statistics.intervals import Interval

MATCHES = {
    "match_top1": ("first expert", "same first expert"),
    "match_top2_ordered": ("top 2 in order", "same first and second"),
    "match_top2_sets": ("top 2 as sets", "same two experts"),
}
SURE = {
    "highest": ("Highest probability", "higher", "of a token, mean over tokens and layers"),
    "second": ("Second probability", "", ""),
    "others": ("Sum of the others", "lower", "probability outside the best two"),
}


def of_routing(name: str, label: str, better: str, form: str, note: str, paper: str) -> Column:
    """A number that the result has under the column's own name."""
    column = Column(name, label, lambda result: getattr(result, name), better, form, note, paper)
    return column._replace(items=items_of(name))


def items_of(name: str) -> Callable[[Result], np.ndarray | None]:
    """The items that a result keeps under this name."""
    return lambda result: decode_items(result.items.get(name))


def sureness(place: str) -> Column:
    """The highest, the second or the sum of the other probabilities of a token."""
    label, better, note = SURE[place]

    def read(result: Result) -> float | None:
        return mean_or_none([getattr(layer.confidence, place) for layer in result.layers])

    name = f"confidence_{place}"
    return Column(name, label, read, better, note=note, paper="prc", items=items_of(name))


def matched_under(match: str) -> Each:
    """A match of two views under each recorded augmentation (PRC, table 4)."""

    def column(name: str, result: Result) -> Column:
        def read(result: Result) -> Interval | None:
            row = rows_by_name(result.augmentations).get(name)
            if row is None:
                return None
            ends = (f"{match}_low", f"{match}_high")
            return Interval(getattr(row, match), *(getattr(row, end) for end in ends))

        def items(result: Result) -> np.ndarray | None:
            row = rows_by_name(result.augmentations).get(name)
            return None if row is None else decode_items(row.items.get(match))

        label = f"Match, {MATCHES[match][0]}: {name}"
        key = f"{match}_{column_slug(name)}"
        return Column(key, label, read, "higher", "share", paper="prc", items=items, detail=True)

    def foreseen(ahead: Ahead) -> list[str]:
        volumes = ahead.score == "mae"
        if ahead.score == "nats":
            return []  # a text has no augmentations
        asked = [resolve_augmentation(one, volumes) for one in ahead.study.routing.augmentations]
        return [f"{match}_{column_slug(one.name)}" for one in asked]

    return Each(
        lambda result: [row.name for row in result.augmentations], column, foreseen, "share"
    )


PLACES = {
    "border": "on the border of the map of experts, corners included",
    "corner": "in the corners of the map of experts",
    "inner": "inside the map of experts; none where a side has two experts at most: all border",
}
SHARES = {
    "load": ("Load", "share of the choices"),
    "mass": ("Mass", "share of the probability"),
    "cells": ("Cells", "share of the experts that lie"),
}


def on_map(place: str) -> list[Columns]:
    """Load and mass of a part of the map, beside the share of experts that lie there (MoGE)."""
    columns: list[Columns] = []
    for share, (word, what) in SHARES.items():
        words = (f"{place}_{share}", f"{word}, {place}", "", "share", f"{what} {PLACES[place]}")
        columns.append(of_routing(*words, "moge"))
        if share != "cells":
            columns.append(by_layer(*words, "moge"))
    return columns


COLUMNS = (
    *(
        of_routing(
            match, f"Match, {words}", "higher", "share", f"{same} in two augmented views", "prc"
        )
        for match, (words, same) in MATCHES.items()
    ),
    *(sureness(place) for place in SURE),
    *(matched_under(match) for match in MATCHES),
    of_routing(
        "load_cv2",
        "Load CV²",
        "lower",
        "number",
        "variance / mean² of the tokens per expert, mean over layers",
        "ermoe",
    ),
    of_routing(
        "fallback",
        "Fallback",
        "lower",
        "share",
        "tokens with no expert above the threshold",
        "ermoe",
    ),
    of_routing(
        "below_k",
        "Fewer than k",
        "",
        "share",
        "tokens with fewer than k experts above the threshold",
        "ermoe",
    ),
    of_routing(
        "tail_mass",
        "Tail mass",
        "lower",
        "number",
        "weight above the threshold but outside the best k",
        "ermoe",
    ),
    of_routing(
        "tail_of_probs",
        "Tail of the probabilities",
        "",
        "number",
        "probability outside the best k",
        "ermoe",
    ),
    of_routing(
        "teacher_agreement",
        "Agreement with teacher",
        "",
        "share",
        "tokens that agree on the first expert; mean over layers",
        "tgr",
    ),
    by_layer(
        "teacher_agreement",
        "Agreement with teacher",
        "",
        "share",
        "tokens that agree on the first expert",
        "tgr",
        detail=False,
    ),
    of_routing(
        "entropy",
        "Expert entropy",
        "higher",
        "number",
        "normalised entropy of expert use, mean over layers",
        "tgr",
    ),
    of_routing(
        "token_entropy",
        "Token entropy",
        "",
        "number",
        "nats, of a token's probabilities; mean over layers",
        "tgr",
    ),
    *(column for place in PLACES for column in on_map(place)),
    swept_columns("threshold", "fallback", "Fallback", "lower", "share"),
    swept_columns("k", "tail_mass", "Tail mass", "lower", "number"),
    Given(scores_over_k, scores_ahead, SCORE),
)


def figures(result: Result) -> Figures:
    """Load of the experts, and which expert sees which patch."""
    if result.layers:
        yield "expert_load", expert_load([layer.load for layer in result.layers])
    if result.overlays.shape[0] and result.overlays.grids:
        yield "expert_overlays", expert_overlays(result.overlays)


def part(phase: Phase) -> Iterator[Block]:
    """Load and patches of the methods with MoE layers, then other settings of their routers."""
    drawn = by_name(phase, Result, figures)
    loads = drawn["expert_load"]
    yield Block("Load of the experts", pictures=loads, folded=True, about="load_cv2")
    patches = drawn["expert_overlays"]
    yield Block(
        "Which expert sees which patch",
        pictures=patches,
        folded=True,
        finding=neighbours(phase.first(Result)),
    )
    yield Block("Corresponding patches", pictures=crops(phase), folded=True, about="match_top1")
    yield Block(
        "Agreement with the teacher by layer",
        pictures=agreement_by_layer(phase),
        folded=True,
        about="teacher_agreement",
    )
    yield Block(
        "Other thresholds and other k at test time",
        pictures=sweeps(phase),
        folded=True,
        finding=swept_most(
            {method: swept(result, "k", "score") for method, result in phase.first(Result).items()},
            phase.task.score,
        ),
    )


def crops(phase: Phase) -> list[Picture]:
    """Two crops of one image; they are the same for every method."""
    pairs = drop_none(result.corresponding for result in phase.results(Result))
    if not pairs:
        return []
    figure = corresponding_patches(pairs[0])
    return [Picture(figure, f"{phase.name}: corresponding patches", getattr(figure, "caption", ""))]
