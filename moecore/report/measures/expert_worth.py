"""What experts are worth: losses without one, without more and more, and without a choice."""

from collections.abc import Iterator

import numpy as np

from moecore.measure.base import Estimate
from moecore.measure.expert_worth import RankRow, RemovalCountRow, Result
from moecore.report.column import Column, decode_items
from moecore.report.figures.charts import ChartSpec, curves_chart, point_from_interval
from moecore.report.measures.result_display import (
    Figures,
    Shown,
    draw_method_curves,
    first_seed_pictures,
    item_mean_column,
)
from moecore.report.page.view import Block
from moecore.report.typed_results import Phase

ORDERS = {
    "most_used": "most used first",
    "least_used": "least used first",
    "random": "random",
}
WAYS = {
    "as_is": "the others as they are",
    "renormalised": "the others scaled to the old sum",
    "reroute": "the next one in its place",
}
ORDINALS = ("1st", "2nd")  # of the choices that have columns
PAIRED = "of the score, paired by image; positive: it is worse without"


def half_removal_row(result: Result) -> RemovalCountRow:
    """Return the row with at most half of the experts of a layer removed, or the first."""
    experts = len(result.layers[0])
    rows = [row for row in result.removal if 2 * row.removed <= experts]
    return rows[-1] if rows else result.removal[0]


def share_of_experts_with_loss(result: Result) -> float:
    """Return the share of the experts whose loss lies above 0 with its interval."""
    lows = [one.low or 0.0 for layer in result.layers for one in layer]
    return float(np.mean(np.array(lows) > 0))


def half_removal_loss_column(order: str) -> Column:
    """Return the column of the loss without half of the experts."""
    return Column(
        f"lost_without_{order}",
        f"Loss without half, {ORDERS[order]}",
        lambda result: half_removal_row(result).values[order],
        note=f"at most half of each layer's experts removed, {ORDERS[order]}; {PAIRED}",
        items=lambda result: decode_items(half_removal_row(result).items[order]),
        detail=order == "random",
    )


def find_rank(result: Result, rank: int) -> RankRow | None:
    """Return the row of the choice of this rank; None where tokens have fewer."""
    return next((row for row in result.ranks if row.rank == rank), None)


def rank_column(rank: int, way: str) -> Column:
    """Return the column of the loss without a choice of this rank."""

    def read(result: Result) -> Estimate | None:
        row = find_rank(result, rank)
        return None if row is None else row.values[way]

    def read_items(result: Result) -> np.ndarray | None:
        row = find_rank(result, rank)
        return None if row is None else decode_items(row.items[way])

    label = f"Loss without the {ORDINALS[rank - 1]} choice"
    note = f"every token in every layer goes without it, {WAYS[way]}; {PAIRED}"
    name = f"lost_without_choice_{rank}_{way}"
    return Column(
        name, f"{label}, {WAYS[way]}", read, note=note, items=read_items, detail=way != "as_is"
    )


COLUMNS = (
    item_mean_column(
        "expert_worth",
        "Worth of an expert",
        note=f"what its removal loses {PAIRED}; mean over experts and layers",
        field="worth",
    ),
    Column(
        "needed_experts",
        "Needed experts",
        share_of_experts_with_loss,
        form="share",
        note="experts whose removal loses score beyond its interval, each tested by itself",
    ),
    *map(half_removal_loss_column, ORDERS),
    *(rank_column(rank, way) for rank in range(1, len(ORDINALS) + 1) for way in WAYS),
)


def figures(result: Result) -> Figures:
    """Yield the loss over how many experts are removed, and over the rank of a dropped choice."""
    curves = {
        words: [
            point_from_interval(row.removed, row.values[order].interval) for row in result.removal
        ]
        for order, words in ORDERS.items()
    }
    words = "Loss, 95 % intervals over images"
    look = ChartSpec("Without more and more experts", "Experts removed from every layer", words)
    yield "expert_removal", curves_chart(curves, look)
    if len(result.ranks) < 2:
        return
    curves = {
        words: [point_from_interval(row.rank, row.values[way].interval) for row in result.ranks]
        for way, words in WAYS.items()
    }
    yield "dropped_choices", curves_chart(curves, ChartSpec("Without one choice", "Rank", words))


def phase_blocks(phase: Phase) -> Iterator[Block]:
    """Yield the loss over removed experts: of each method by order, and of all methods."""
    look = ChartSpec("Most used experts removed", "Experts removed from every layer", "Loss")
    drawn = draw_method_curves(
        phase,
        Result,
        lambda result: {row.removed: row.values["most_used"].value for row in result.removal},
        look,
        "Loss of the score.",
    )
    drawn += first_seed_pictures(phase, Result, figures)
    yield Block("What experts are worth", pictures=drawn, about="expert_worth")


SHOWN = Shown(
    "expert_worth", "what experts are worth", Result, COLUMNS, figures, phase_blocks, place=8
)
