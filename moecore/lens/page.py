"""What is said of a trace: a table in the terminal, and one HTML file that needs nothing else."""

from math import ceil
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from moecore.core.files import write_whole
from moecore.lens.analyses import TraceNumbers, analyse_trace
from moecore.lens.trace_reader import Trace
from moecore.measure.exploring.caption_word_experts import experts_by_weight
from moecore.predict.continuation import MOST, WordWithExperts, expert_word_counts
from moecore.report.column import Column
from moecore.report.figures.charts import Labels, draw_heatmap, percent_annotations
from moecore.report.figures.drawing import expert_colours
from moecore.report.measures.routing import COLUMNS, routing_column
from moecore.report.page.glossary import WORDS
from moecore.report.page.rows import method_rows_table
from moecore.report.page.templating import template_environment
from moecore.report.page.view import Block, Picture
from moecore.report.tables.cells import Cell, Cells
from moecore.report.tables.number_format import NumberFormat

SHOWN = 300  # words of a page
FEW = 16  # experts whose shares are printed into the picture
LENS_COLUMNS = (
    routing_column("dropped", "Dropped", "", "share", "choices that no expert had room for"),
    routing_column("pair_lift", "Pair lift", note="how often pairs are chosen, over chance"),
    routing_column("margin", "Margin", note="lowest chosen probability − the highest other one"),
    routing_column(
        "local_consistency", "Local consistency", "", "share", "one set for four neighbours: F1"
    ),
    routing_column("agreement", "Agreement", "", "share", "same first expert in both traces"),
    routing_column("same_experts", "Same experts", "", "share", "chosen in both, of either's"),
    routing_column("purity", "Purity", "", "share", "of the commonest label of their first expert"),
    routing_column("purity_chance", "Purity by chance", "", "share", "labels of other items"),
    routing_column("label_information", "Label information", note="adjusted mutual information"),
)


def write_lens_page(
    folder: Path, page: Path, items: int | None = None, against: Path | None = None
) -> None:
    """Print what the routing of a trace is like, and write the page. See ``analyse_trace``."""
    trace = Trace(folder)
    numbers = analyse_trace(trace, items, None if against is None else Trace(against))
    print_numbers(numbers)
    write_whole(page, render_lens(trace, numbers))


def tabulate_trace_numbers(numbers: TraceNumbers) -> tuple[list[Column], Cells]:
    """Return the columns, a quantity each, and the rows: all layers together, then each from 1."""
    known = {one.name: one for one in (*COLUMNS, *LENS_COLUMNS) if isinstance(one, Column)}
    rows = {"all": numbers.mean} | {
        str(number): layer.quantities for number, layer in enumerate(numbers.layers, start=1)
    }
    names = list(dict.fromkeys(name for layer in numbers.layers for name in layer.quantities))
    cells = {
        row: {name: Cell(own[name], "t", 1) if name in own else None for name in names}
        for row, own in rows.items()
    }
    new = {name: routing_column(name, name.replace("_", " ").capitalize()) for name in names}
    return [known.get(name, new[name]) for name in names], cells


def print_numbers(numbers: TraceNumbers) -> None:
    """Print the quantities that all layers have, over all of them, with their limits."""
    columns, cells = tabulate_trace_numbers(numbers)
    for column in columns:
        if cell := cells["all"][column.name]:
            known = NumberFormat.of(column.form, [cell.interval])
            print(f"{column.label:<28} {known.value_with_limits(cell.interval)}")


def render_lens(trace: Trace, numbers: TraceNumbers) -> str:
    """Return the whole page."""
    words = read_words_with_experts(trace)
    table = method_rows_table(*tabulate_trace_numbers(numbers))
    layers = trace.card.layers
    return (
        template_environment()
        .get_template("lens.html.jinja")
        .render(
            model=trace.card.model,
            items=f"{numbers.items:,} of {trace.items:,} items",
            block=Block(
                "",
                grids=[table._replace(columns=["Layer", *table.columns[1:]])],
                pictures=[Picture(draw_loads(numbers), "Load of the experts")],
            ),
            glossary=WORDS,
            words=words,
            layers=[
                {expert: expert_word_counts(words, n, expert) for expert in range(layer.experts)}
                for n, layer in enumerate(layers)
            ],
            colours=expert_colours(max(layer.experts for layer in layers)),
        )
    )


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


def read_words_with_experts(trace: Trace) -> list[WordWithExperts]:
    """Return the first words of the trace with their experts; of layers of other tokens, none."""
    first = np.arange(min(trace.items, ceil(SHOWN / trace.card.layers[0].tokens)))
    tokens = trace.beside("tokens", first)
    if tokens is None or not trace.card.vocabulary:
        return []
    layers = []
    for number, known in enumerate(trace.card.layers):
        combine = trace.layer(number, first).combine.flatten(0, 1)[:SHOWN]
        fits = known.tokens == tokens.shape[1]
        layers.append(experts_by_weight(combine, MOST) if fits else [[]] * SHOWN)
    numbers = tokens.flatten()[:SHOWN].tolist()
    return [
        WordWithExperts(trace.card.vocabulary[number], True, [layer[place] for layer in layers])
        for place, number in enumerate(numbers)
    ]
