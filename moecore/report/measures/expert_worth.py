"""What experts are worth: losses without one, and curves over how many are removed."""

from collections.abc import Iterator

import numpy as np

from moecore.measure.expert_worth import RemovalCountRow, Result
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
)


def figures(result: Result) -> Figures:
    """Yield the loss over how many experts are removed."""
    curves = {
        words: [
            point_from_interval(row.removed, row.values[order].interval) for row in result.removal
        ]
        for order, words in ORDERS.items()
    }
    words = "Loss, 95 % intervals over images"
    look = ChartSpec("Without more and more experts", "Experts removed from every layer", words)
    yield "expert_removal", curves_chart(curves, look)


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
