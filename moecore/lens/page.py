"""What is said of a trace: a table in the terminal, and one HTML file that needs nothing else."""

import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from moecore.core.files import write_whole
from moecore.lens.analyses import TraceNumbers, analyse_trace
from moecore.lens.trace_reader import Trace
from moecore.measure.exploring.caption_word_experts import experts_by_weight
from moecore.predict.continuation import MOST, Word, expert_word_counts
from moecore.report.column import Column
from moecore.report.figures.charts import (
    ChartSpec,
    Labels,
    curves_chart,
    draw_heatmap,
    percent_annotations,
    point_from_interval,
)
from moecore.report.figures.drawing import expert_colours
from moecore.report.measures.routing import COLUMNS
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


class Quantity(NamedTuple):
    """How one is printed."""

    label: str
    form: str = "number"
    note: str = ""


QUANTITIES = {
    **{
        one.name: Quantity(one.label, one.form, one.note)
        for one in COLUMNS
        if isinstance(one, Column)
    },
    "dropped": Quantity("Dropped", "share", "choices that no expert had room for"),
    "agreement": Quantity("Agreement", "share", "tokens with the same first expert in both"),
    "same_experts": Quantity("Same experts", "share", "experts chosen in both, of those in either"),
    "purity": Quantity("Purity", "share", "tokens with the commonest label of their first expert"),
    "purity_chance": Quantity("Purity by chance", "share", "with the labels of other items"),
    "label_information": Quantity("Label information", note="adjusted mutual information"),
}


def describe_trace(
    folder: Path, page: Path, items: int | None = None, against: Path | None = None
) -> None:
    """Print what the routing of a trace is like, and write the page. See ``analyse_trace``."""
    trace = Trace(folder)
    numbers = analyse_trace(trace, items, None if against is None else Trace(against))
    print_numbers(numbers)
    write_whole(page, render_lens(trace, numbers, against))


def look_up_quantity(name: str) -> Quantity:
    """Return how a quantity is printed; what nobody described has its name for a label."""
    return QUANTITIES.get(name, Quantity(name.replace("_", " ").capitalize()))


def list_quantities(numbers: TraceNumbers) -> dict[str, dict[str, Interval]]:
    """Return name → all layers together, where all have it, then each by its number from 1."""
    rows = {"all": numbers.mean} | {
        str(number): layer.quantities for number, layer in enumerate(numbers.layers, start=1)
    }
    names = dict.fromkeys(name for layer in numbers.layers for name in layer.quantities)
    return {name: {row: own[name] for row, own in rows.items() if name in own} for name in names}


def print_numbers(numbers: TraceNumbers) -> None:
    """Print the mean of each quantity over the layers, and the layers with least and most of it."""
    from rich.console import Console
    from rich.table import Table

    heads = ("", "mean over layers", "least, in layer", "most, in layer")
    table = Table(*heads, box=None, header_style="bold", padding=(0, 1))
    for name, rows in list_quantities(numbers).items():
        quantity = look_up_quantity(name)
        known = NumberFormat.of(quantity.form, rows.values())
        mean = known.value_with_limits(rows.pop("all")) if "all" in rows else "–"
        ends = [end(rows, key=lambda row: rows[row].value) for end in (min, max)]
        told = (f"{known.value(rows[row].value)}, {row}" for row in ends)
        table.add_row(quantity.label, mean.replace("[", r"\["), *told)
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def render_lens(trace: Trace, numbers: TraceNumbers, against: Path | None = None) -> str:
    """Return the whole page."""
    layers = len(numbers.layers)
    remarks = [
        f"{numbers.items:,} of {trace.items:,} items, evenly spread; {layers} MoE layers.",
        "Small figures: 95 % intervals over items (Student's t; of purity the bootstrap).",
    ]
    if against is not None:
        remarks.append(f"Agreement and same experts: with the routing in {against}.")
    pictures = [Picture(draw_loads(numbers), "Load of the experts")]
    if layers > 2:
        pictures.append(Picture(draw_depth(numbers), "From layer to layer"))
    words = read_words(trace)
    word_counts = [
        {expert: expert_word_counts(words, number, expert) for expert in range(layer.experts)}
        for number, layer in enumerate(trace.card.layers)
    ]
    return (
        template_environment()
        .get_template("lens.html.jinja")
        .render(
            model=trace.card.model,
            remarks=remarks,
            block=Block("", grids=[quantities_table(numbers)], pictures=pictures),
            words=words,
            layers=word_counts,
            colours=expert_colours(max(layer.experts for layer in trace.card.layers)),
        )
    )


def quantities_table(numbers: TraceNumbers) -> PageTable:
    """Return the table of the page: a row a layer, a column a quantity."""
    columns = []
    layers = ["all", *(str(number) for number in range(1, 1 + len(numbers.layers)))]
    heads = [ColumnHead()]
    names = ["Layer"]
    for name, rows in list_quantities(numbers).items():
        quantity = look_up_quantity(name)
        known = NumberFormat.of(quantity.form, rows.values())
        cells = {
            row: PageCell(known.value(one.value), known.limits(one), value=one.value)
            for row, one in rows.items()
        }
        columns.append([cells.get(row, NONE) for row in layers])
        names.append(quantity.label)
        heads.append(ColumnHead(quantity.note))
    lines = [
        TableRow(PageCell(row), [column[place] for column in columns])
        for place, row in enumerate(layers)
    ]
    return PageTable(names, lines, heads=heads, sortable=True)


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


def draw_depth(numbers: TraceNumbers) -> Figure:
    """Return how evenly experts are used and how sure the router is, layer by layer."""
    quantities = list_quantities(numbers)
    curves = {
        look_up_quantity(name).label: [
            point_from_interval(int(row), interval, (0, 1))
            for row, interval in quantities[name].items()
            if row != "all"
        ]
        for name in ("entropy", "confidence_highest")
    }
    return curves_chart(curves, ChartSpec("From layer to layer", "MoE layer", "", top=1.02))


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
