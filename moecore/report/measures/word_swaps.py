"""Of text: its perplexity, and what a few swapped words change (TextAttack's word swap, as
MomentumSMoE reports it).
"""

from collections.abc import Callable, Iterable, Iterator

import numpy as np

from moecore.measure.base import Estimate
from moecore.measure.word_swaps import Result, SwapRow, WordSwaps
from moecore.report.column import Ahead, Column, Each, Seen, decode_items, mean_or_none
from moecore.report.figures.charts import Look, curves_chart, interval_caption, points_over_seeds
from moecore.report.measured import Phase
from moecore.report.measures.shown import Figures
from moecore.report.page.view import Block, Picture
from moecore.statistics.intervals import Interval

KINDS = ("swapped_nats", "swapped_ppl", "swapped_lost", "swapped_change")

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


def perplexities(seen: Seen) -> list[Column]:
    """Of text."""
    return list(PERPLEXITIES) if seen.task.long else []


def key_of(share: float) -> str:
    """1_5 of 0.015."""
    return f"{100 * share:g}".replace(".", "_")


def row_of(result: Result, key: str) -> SwapRow | None:
    """The row of this share; None where it was not measured."""
    return next((row for row in result.rows if key_of(row.share) == key), None)


def keys_of(result: Result) -> list[str]:
    """Of every share."""
    return [key_of(row.share) for row in result.rows]


def ahead_of(kind: str) -> Callable[[Ahead], Iterable[str]]:
    """The names of the columns of all shares that are asked for."""

    def names(ahead: Ahead) -> list[str]:
        settings = ahead.study.word_swaps or WordSwaps()
        return [f"{kind}_{key_of(share)}" for share in settings.shares]

    return names


def with_swaps(kind: str) -> Callable[[str, Result], Column]:
    """The column of one kind, for a share."""

    def made(key: str, result: Result) -> Column:
        words = f"{key.replace('_', '.')} % of words swapped"
        titles = {
            "swapped_nats": f"Nats, {words}",
            "swapped_ppl": f"Perplexity, {words}",
            "swapped_lost": f"Nats lost, {words}",
            "swapped_change": f"Routing change, {words}",
        }
        notes = {
            "swapped_nats": "a token; the words to be foretold are those of the clean text",
            "swapped_ppl": "exp of the nats",
            "swapped_lost": "above those of the clean text",
            "swapped_change": "1 − IoU of the chosen experts with those of the clean text, mean "
            "over layers",
        }
        item = {"swapped_nats": "nats", "swapped_lost": "lost"}.get(kind, "selection_change")
        known = None if kind == "swapped_ppl" else item
        return Column(
            f"{kind}_{key}",
            titles[kind],
            lambda result: value_of(result, kind, key),
            "lower",
            note=notes[kind],
            items=lambda result: items_of(result, key, known),
        )

    return made


def value_of(result: Result, kind: str, key: str) -> Interval | Estimate | float | None:
    """What the column shows."""
    row = row_of(result, key)
    if row is None:
        return None
    if kind == "swapped_nats":
        return row.nats
    if kind == "swapped_ppl":
        return row.perplexity
    if kind == "swapped_lost":
        return row.nats.value - result.nats.value
    return mean_or_none([layer.value for layer in row.selection_change])


def items_of(result: Result, key: str, name: str | None) -> np.ndarray | None:
    """One value per block; of the perplexity none, as it is no mean of theirs."""
    row = row_of(result, key)
    return None if row is None or name is None else decode_items(row.items.get(name))


COLUMNS = tuple(Each(keys_of, with_swaps(kind), ahead_of(kind)) for kind in KINDS)


def figures(result: Result) -> Figures:
    """None: one model is a few points."""
    yield from ()


def part(phase: Phase) -> Iterator[Block]:
    """Perplexity and routing over the share of swapped words, a line per method."""
    seeds = phase.of(Result)
    drawn = []
    for title, label, read in (
        ("Perplexity with swapped words", "Perplexity", by_share),
        ("Routing change with swapped words", "1 − IoU of experts", changes),
    ):
        curves = {
            method: points_over_seeds([read(result) for result in of_method])
            for method, of_method in seeds.items()
        }
        if any(curves.values()):
            look = Look(title, "Words swapped, %", label)
            caption = (
                f"Stop words are spared; the words to be foretold stay. {interval_caption(seeds)}"
            )
            drawn.append(Picture(curves_chart(curves, look), f"{phase.name}: {title}", caption))
    results = phase.results(Result)
    about = f"swapped_ppl_{keys_of(results[0])[0]}" if results else ""
    yield Block("Swapped words", pictures=drawn, folded=True, about=about)


def by_share(result: Result) -> dict[float, float]:
    """By the percentage of words, from the clean text on."""
    return {0.0: result.perplexity} | {100 * row.share: row.perplexity for row in result.rows}


def changes(result: Result) -> dict[float, float]:
    """By the percentage of words; {} of a dense model."""
    by_share = {
        100 * row.share: mean_or_none([layer.value for layer in row.selection_change])
        for row in result.rows
    }
    known = {share: value for share, value in by_share.items() if value is not None}
    return {0.0: 0.0} | known if known else {}
