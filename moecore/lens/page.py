"""What is said of a trace: a table in the terminal, and one HTML file that needs nothing else."""

import sys
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from moecore.core.files import write_whole
from moecore.lens.analyses import TraceNumbers, analyse_trace
from moecore.lens.trace_reader import Trace
from moecore.measure.exploring.caption_word_experts import experts_by_weight
from moecore.predict.continuation import MOST, Word, expert_word_counts
from moecore.report.column import Column
from moecore.report.figures.charts import Labels, draw_heatmap, percent_annotations
from moecore.report.figures.drawing import expert_colours
from moecore.report.measures.routing import COLUMNS, routing_column
from moecore.report.page.templating import template_environment
from moecore.report.page.view import (
    NONE,
    Block,
    ColumnHead,
    PageCell,
    PageTable,
    Picture,
    TableRow,
)
from moecore.report.tables.number_format import NumberFormat
from moecore.statistics.intervals import Interval

SHOWN = 300  # words of a page
FEW = 16  # experts whose shares are printed into the picture
LENS_COLUMNS = (
    routing_column("dropped", "Dropped", "", "share", "choices that no expert had room for"),
    routing_column("agreement", "Agreement", "", "share", "same first expert in both traces"),
    routing_column("same_experts", "Same experts", "", "share", "chosen in both, of either's"),
    routing_column("purity", "Purity", "", "share", "of the commonest label of their first expert"),
    routing_column("purity_chance", "Purity by chance", "", "share", "labels of other items"),
    routing_column("label_information", "Label information", note="adjusted mutual information"),
)


def describe_trace(
    folder: Path, page: Path, items: int | None = None, against: Path | None = None
) -> None:
    """Print what the routing of a trace is like, and write the page. See ``analyse_trace``."""
    trace = Trace(folder)
    numbers = analyse_trace(trace, items, None if against is None else Trace(against))
    print_numbers(numbers)
    write_whole(page, render_lens(trace, numbers))


def list_quantities(numbers: TraceNumbers) -> dict[Column, dict[str, Interval]]:
    """Return for each quantity its rows: all layers together, where all have it, then each."""
    known = {one.name: one for one in (*COLUMNS, *LENS_COLUMNS) if isinstance(one, Column)}
    rows = {"all": numbers.mean} | {
        str(number): layer.quantities for number, layer in enumerate(numbers.layers, start=1)
    }
    return {
        known.get(name) or routing_column(name, name.replace("_", " ").capitalize()): {
            row: own[name] for row, own in rows.items() if name in own
        }
        for name in dict.fromkeys(name for own in rows.values() for name in own)
    }


def print_numbers(numbers: TraceNumbers) -> None:
    """Print the mean of each quantity over the layers, and the layers with least and most of it."""
    from rich.console import Console
    from rich.table import Table

    heads = ("", "mean over layers", "least, in layer", "most, in layer")
    table = Table(*heads, box=None, header_style="bold", padding=(0, 1))
    for column, rows in list_quantities(numbers).items():
        known = NumberFormat.of(column.form, rows.values())
        mean = known.value_with_limits(rows.pop("all"), "()") if "all" in rows else "–"
        ends = [end(rows, key=lambda row: rows[row].value) for end in (min, max)]
        table.add_row(column.label, mean, *(f"{known.value(rows[n].value)}, {n}" for n in ends))
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def render_lens(trace: Trace, numbers: TraceNumbers) -> str:
    """Return the whole page."""
    words = read_words(trace)
    return (
        template_environment()
        .get_template("lens.html.jinja")
        .render(
            model=trace.card.model,
            items=f"{numbers.items:,} of {trace.items:,} items",
            block=Block(
                "",
                grids=[quantities_table(numbers)],
                pictures=[Picture(draw_loads(numbers), "Load of the experts")],
            ),
            words=words,
            layers=[
                {n: expert_word_counts(words, number, n) for n in range(layer.experts)}
                for number, layer in enumerate(trace.card.layers)
            ],
            colours=expert_colours(max(layer.experts for layer in trace.card.layers)),
        )
    )


def quantities_table(numbers: TraceNumbers) -> PageTable:
    """Return the table of the page: a row a layer, a column a quantity."""
    columns = list_quantities(numbers)
    lines = {row: TableRow(PageCell(row), []) for row in next(iter(columns.values()))}
    for column, rows in columns.items():
        known = NumberFormat.of(column.form, rows.values())
        for row, line in lines.items():
            one = rows.get(row)
            cell = NONE
            if one is not None:
                cell = PageCell(known.value(one.value), known.limits(one), value=one.value)
            line.items.append(cell)
    heads = [ColumnHead(), *(ColumnHead(column.note) for column in columns)]
    names = ["Layer", *(column.label for column in columns)]
    return PageTable(names, list(lines.values()), heads=heads, sortable=True)


def draw_loads(numbers: TraceNumbers) -> Figure:
    """Return each expert's share of its layer's choices; the darkest cell has most of all."""
    experts = max(len(layer.load) for layer in numbers.layers)
    shares = np.full((len(numbers.layers), experts), np.nan)
    for row, layer in enumerate(numbers.layers):
        shares[row, : len(layer.load)] = layer.load
    texts = percent_annotations(shares) if experts <= FEW else np.full(shares.shape, "")
    columns = [str(n) if n % max(1, experts // FEW) == 0 else "" for n in range(experts)]
    rows = [str(number) for number in range(1, 1 + len(shares))]
    labels = Labels("Share of the choices, %", rows, columns, "Expert", "MoE layer")
    size = (min(10.0, 2.0 + 0.4 * experts), 1.2 + 0.25 * len(shares))
    return draw_heatmap(shares / np.nanmax(shares), texts, labels, size)


def read_words(trace: Trace) -> list[Word]:
    """Return the first words of the trace with their experts; of layers of other tokens, none."""
    first = np.arange(min(trace.items, SHOWN))
    tokens = trace.beside("tokens", first)
    vocabulary = trace.card.vocabulary
    if tokens is None or not vocabulary:
        return []
    layers = []
    for number, known in enumerate(trace.card.layers):
        combine = trace.layer(number, first).combine.flatten(0, 1)
        fits = known.tokens == tokens.shape[1]
        layers.append(experts_by_weight(combine[:SHOWN], MOST) if fits else [[]] * SHOWN)
    read = [vocabulary[token] for token in tokens.flatten()[:SHOWN].tolist()]
    return [Word(word, True, [layer[place] for layer in layers]) for place, word in enumerate(read)]
