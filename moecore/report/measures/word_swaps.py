"""Perplexity of text, and what a few swapped words change (MomentumSMoE's attack)."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from moecore.measure.word_swaps import Result, SwapShareRow, WordSwaps
from moecore.report.column import (
    Column,
    ColumnContext,
    ColumnPerRow,
    PlannedPhase,
    Value,
    decode_items,
    mean_or_none,
)
from moecore.report.figures.charts import ChartSpec
from moecore.report.measures.result_display import Shown, draw_method_curves
from moecore.report.page.view import Block
from moecore.report.typed_results import Phase

PERPLEXITIES = (
    Column(
        "ppl",
        "Perplexity",
        lambda result: result.ppl,
        "lower",
        note="as papers count it: whole blocks of the training's number of streams, from an empty "
        "cache (MoGE, table 3)",
    ),
    Column(
        "ppl_all",
        "Perplexity, all",
        lambda result: result.ppl_all,
        "lower",
        note="every word once, in one stream",
    ),
)
SPARED = "Stop words are spared; the words to be foretold stay."


class SwapAgainstClean(NamedTuple):
    """A share of words that are swapped."""

    row: SwapShareRow
    clean_nats: float

    @property
    def change(self) -> float | None:
        """The change of the chosen experts, mean over layers; None of a dense model."""
        return mean_or_none([layer.value for layer in self.row.selection_change])


def unswapped_perplexity_columns(seen: ColumnContext) -> list[Column]:
    return list(PERPLEXITIES) if seen.task.long else []


def percent_slug(share: float) -> str:
    """1_5 of 0.015."""
    return f"{100 * share:g}".replace(".", "_")


def swap_rows_by_share(result: Result) -> dict[str, SwapAgainstClean]:
    return {
        percent_slug(row.share): SwapAgainstClean(row, result.nats.value) for row in result.rows
    }


def planned_swap_shares(ahead: PlannedPhase) -> list[str]:
    settings = ahead.study.word_swaps or WordSwaps()
    return [percent_slug(share) for share in settings.shares]


def columns_per_swap_share(
    name: str, label: str, read: Callable[[SwapAgainstClean], Value], note: str, item: str = ""
) -> ColumnPerRow:
    """Return a column for each share of words; item: the key of its items, if it is their mean."""
    column = Column(
        f"swapped_{name}_{{}}",
        f"{label}, {{}} % of words swapped",
        read,
        "lower",
        note=note,
        items=lambda swapped: decode_items(swapped.row.items.get(item)),
    )
    words = lambda key, swapped: [key.replace("_", ".")]
    return ColumnPerRow(swap_rows_by_share, column, planned_swap_shares, words)


COLUMNS = (
    columns_per_swap_share(
        "nats",
        "Nats",
        lambda swapped: swapped.row.nats,
        "a token; the words to be foretold are those of the clean text",
        "nats",
    ),
    columns_per_swap_share(
        "ppl", "Perplexity", lambda swapped: swapped.row.perplexity, "exp of the nats"
    ),
    columns_per_swap_share(
        "lost",
        "Nats lost",
        lambda swapped: swapped.row.nats.value - swapped.clean_nats,
        "above those of the clean text",
        "lost",
    ),
    columns_per_swap_share(
        "change",
        "Routing change",
        lambda swapped: swapped.change,
        "1 − IoU of the chosen experts with those of the clean text, mean over layers",
        "selection_change",
    ),
)


def phase_blocks(phase: Phase) -> Iterator[Block]:
    """Perplexity and routing over the share of swapped words, a line per method."""
    axis = "Words swapped, %"
    look = ChartSpec("Perplexity with swapped words", axis, "Perplexity")
    drawn = draw_method_curves(phase, Result, perplexities_by_swap_percent, look, SPARED)
    look = ChartSpec("Routing change with swapped words", axis, "1 − IoU of experts")
    drawn += draw_method_curves(phase, Result, routing_changes_by_swap_percent, look, SPARED)
    about = f"swapped_ppl_{next(iter(swap_rows_by_share(phase.results(Result)[0])), '')}"
    yield Block("Swapped words", pictures=drawn, about=about)


def perplexities_by_swap_percent(result: Result) -> dict[float, float]:
    return {0.0: result.perplexity} | {100 * row.share: row.perplexity for row in result.rows}


def routing_changes_by_swap_percent(result: Result) -> dict[float, float | None]:
    """Return percent of words → change, from none on; {} of a dense model."""
    changes = {100 * one.row.share: one.change for one in swap_rows_by_share(result).values()}
    if set(changes.values()) <= {None}:
        return {}
    return {0.0: 0.0} | changes


SHOWN = Shown("word_swaps", "swapped words", Result, COLUMNS, part=phase_blocks, place=9)
