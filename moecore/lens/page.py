"""What is said of a trace: a table in the terminal, and one HTML file that needs nothing else."""

from math import ceil
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from moecore.core.files import write_whole
from moecore.lens.analyses import ROLES, TraceNumbers, analyse_trace
from moecore.lens.page import draw_trace_pictures
from moecore.lens.trace_explorer import (
    UNLIKE,
    ExploredTrace,
    TraceExplorer,
    can_explore,
    render_traces,
)
from moecore.lens.traces import Trace
from moecore.measure.exploring.caption_word_experts import experts_by_weight
from moecore.predict.continuation import MOST, WordWithExperts, expert_word_counts
from moecore.report.column import Column
from moecore.report.figures.charts import Labels, draw_heatmap, percent_annotations
from moecore.report.figures.drawing import expert_colours
from moecore.report.measures.expert_roles import COLUMNS as ROLES_COLUMNS
from moecore.report.measures.expert_roles import LABELS, SPECIAL, TELLS, local_consistency_columns
from moecore.report.measures.routing import COLUMNS, routing_column
from moecore.report.page.explorer_page import PageHead
from moecore.report.page.glossary import WORDS
from moecore.report.page.templating import template_environment
from moecore.report.page.view import NONE, Block, PageCell, PageTable, Picture, TableRow
from moecore.report.tables.number_format import NumberFormat
from moecore.statistics.intervals import Interval

SHOWN = 300  # words of a page
HEAD = (
    "Which expert gets which token?",
    "Every patch or word is tinted and numbered by the expert that weighs most in it. Point at "
    "one, or move with the arrow keys, to see what the router thinks of it; click an expert to see "
    "what it gets.",
)
FEW = 16  # experts whose shares are printed into the picture
TOLD = {**LABELS, "label": "label"}
NO_INTERVAL = "no interval"
LENS_COLUMNS = (
    routing_column("dropped", "Dropped", "", "share", "choices that no expert had room for"),
    routing_column("information_label", "Experts tell the label", "", "share", TELLS),
    routing_column("specialisation_label", "Specialisation by label", "", "share", SPECIAL),
    routing_column("purity", "Purity", "", "share", "of the commonest label of their first expert"),
    routing_column(
        "matched_correlation",
        "Matched experts, correlation",
        note="of which tokens chose an expert and its partner in the other trace; matched on half "
        "of the items, compared on the others",
    ),
    routing_column(
        "matched_overlap",
        "Matched experts, shared choices",
        form="share",
        note="experts of a token whose partner the other trace chose too; of the same items",
    ),
    *(
        routing_column(
            f"p_{name}",
            f"p, {words}",
            note=f"share of permutations that tell as much; {NO_INTERVAL}, no mean: a test a layer",
        )
        for name, words in TOLD.items()
    ),
    *local_consistency_columns(ROLES.windows),
)
WITHOUT_INTERVAL = {  # name → why
    "dead": "an expert that no item chose is in no other sample of them",
    "smallest_margin": "a quantile over tokens",
    "batch_violation": f"batches of {ROLES.batch} items, which have none each",
}


def write_lens_page(
    folder: Path, page: Path, items: int | None = None, against: Path | None = None
) -> None:
    """Print what the routing of a trace is like, and write the page, and the explorer beside it.

    See ``analyse_trace``.  The explorer counts all items, where ``items`` is None, and shows both
    traces; one that an earlier trace left there is removed where this one has none.
    """
    trace = Trace(folder)
    other = None if against is None else Trace(against)
    numbers = analyse_trace(trace, items, other)
    explorer = f"{page.stem}_explorer.html"
    if can_explore(trace.card.layers):
        head = PageHead(*HEAD, address=page.name, more="All numbers")
        ours = ExploredTrace(TraceExplorer(trace, items), numbers)
        theirs = None
        if other is not None:
            theirs = ExploredTrace(TraceExplorer(other, items), analyse_trace(other, items))
        write_whole(page.with_name(explorer), render_traces(ours, head, theirs))
    else:
        page.with_name(explorer).unlink(missing_ok=True)
        explorer = ""
        numbers.remarks.append(UNLIKE)
    print_numbers(numbers)
    write_whole(page, render_lens(trace, numbers, explorer))


def quantity_columns(numbers: TraceNumbers) -> list[Column]:
    """Return what is known of the quantities that any layer has, each p behind what it is of."""
    known = {
        one.name: one
        for one in (*COLUMNS, *ROLES_COLUMNS, *LENS_COLUMNS)
        if isinstance(one, Column)
    }
    names = dict.fromkeys(name for layer in numbers.layers for name in layer.quantities)
    ordered = [
        one
        for name in names
        if not name.startswith("p_")
        for one in (name, name.replace("information_", "p_"))
        if one in names
    ]
    columns = []
    for name in dict.fromkeys(ordered):
        new = routing_column(name, name.replace("_", " ").capitalize())
        column = known.get(name, new)
        if why := WITHOUT_INTERVAL.get(name):
            column = column._replace(note=f"{column.note}; {NO_INTERVAL}: {why}")
        columns.append(column)
    return columns


def quantity_rows_table(numbers: TraceNumbers) -> PageTable:
    """Return a row a quantity: all layers together, then each from 1, with chance and limits."""
    sides = [(numbers.mean, numbers.chances)]
    sides += [(layer.quantities, layer.chances) for layer in numbers.layers]
    lines = []
    for column in quantity_columns(numbers):
        values = [own[column.name] for own, _ in sides if column.name in own]
        form = NumberFormat.of(column.form, values)
        cells = [
            format_quantity(form, own.get(column.name), chances.get(column.name))
            for own, chances in sides
        ]
        lines.append(TableRow(PageCell(column.label, note=column.note), cells))
    layers = [f"Layer {number}" for number in range(1, len(sides))]
    return PageTable(["Quantity", "All layers", *layers], lines)


def format_quantity(form: NumberFormat, value: Interval | None, chance: float | None) -> PageCell:
    """Return a cell: the value, what chance gives, and the limits or a dash."""
    if value is None:
        return NONE
    note = "" if chance is None else f"chance {form.value(chance)}"
    return PageCell(form.value(value.value), form.limits(value) or "–", note, value=value.value)


def print_numbers(numbers: TraceNumbers) -> None:
    """Print the quantities over all layers, with their limits and what chance gives."""
    for column in quantity_columns(numbers):
        if interval := numbers.mean.get(column.name):
            form = NumberFormat.of(column.form, [interval])
            line = f"{column.label:<32} {form.value_with_limits(interval)}"
            if column.name in numbers.chances:
                line += f"; by chance {form.value(numbers.chances[column.name])}"
            print(line)
    for remark in numbers.remarks:
        print(remark)


def render_lens(trace: Trace, numbers: TraceNumbers, explorer: str = "") -> str:
    """Return the whole page. explorer: the address of that page, where there is one."""
    words = read_words_with_experts(trace)
    layers = trace.card.layers
    return (
        template_environment()
        .get_template("lens.html.jinja")
        .render(
            model=trace.card.model,
            items=f"{numbers.items:,} of {trace.items:,} items",
            block=Block(
                "",
                words=numbers.remarks,
                grids=[quantity_rows_table(numbers)],
                pictures=[Picture(draw_loads(numbers), "Load of the experts")],
            ),
            sheets=Block(
                "",
                pictures=[
                    Picture(figure, name, getattr(figure, "caption", ""))
                    for name, figure in draw_trace_pictures(trace)
                ],
            ),
            glossary=WORDS,
            explorer=explorer,
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
