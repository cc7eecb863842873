"""Show the analysis of a trace as a table in the terminal and as one HTML file."""

from collections.abc import Iterator, Mapping, Sequence
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from moecore.core.files import write_atomic
from moecore.data.prepared import evenly_spaced_indices
from moecore.lens import analyses, trace_explorer, traces
from moecore.lens.analyses import ROLE_SETTINGS, Column, TraceQuantities, analyse_trace
from moecore.measure.routing import METRICS
from moecore.measure.routing_metrics import expert_profiles
from moecore.measure.routing_metrics.expert_roles import LABELS, MI_NOTE, SHARE_NOTE, ExpertRoles
from moecore.measure.values import Metric
from moecore.predict.continuation import MAX_EXPERTS, WordWithExperts, count_expert_words
from moecore.report.figures import charts, drawing, model_figures
from moecore.report.page import explorer_page, report_page
from moecore.report.page.page_objects import DASH, PageBlock, PageCell, PageTable, Picture, TableRow
from moecore.report.tables.cells import NumberFormat
from moecore.statistics.intervals import Interval

MAX_WORDS = 300  # of the page
EXPLORER_HEAD = (
    "Which expert gets which token?",
    "Every patch or word has the colour and the number of the expert with most weight. Point at "
    "one, or move with the arrow keys, to see its router probabilities. Click an expert to see "
    "which tokens it gets.",
)
MAX_ANNOTATED_EXPERTS = 16  # experts; the shares of more experts would not fit into the figure
LABEL_NAMES = {**LABELS, "label": "label"}
NO_INTERVAL = "no interval"
CONSISTENCY = ExpertRoles.metrics["consistency"]
LENS_METRICS = {
    "dropped": Metric("Dropped", "", "share", note="choices beyond the experts' capacity"),
    "information_label": Metric("Experts tell the label", "", "share", note=MI_NOTE),
    "specialisation_label": Metric("Specialisation by label", "", "share", note=SHARE_NOTE),
    "purity": Metric("Purity", "", "share", note="tokens with their first expert's top label"),
    "matched_correlation": Metric(
        "Matched experts, correlation",
        note="between the tokens of an expert and of its partner in the other trace; matched on "
        "half of the items, compared on the other half",
    ),
    "matched_overlap": Metric(
        "Matched experts, shared choices",
        form="share",
        note="experts of a token whose partner was chosen in the other trace, on the same items",
    ),
    **{
        f"p_{name}": Metric(
            f"p, {title}",
            note="share of permutations with as much information; one test per layer, so "
            f"{NO_INTERVAL} and no mean",
        )
        for name, title in LABEL_NAMES.items()
    },
    **{
        f"consistency_{window}": CONSISTENCY._replace(
            label=CONSISTENCY.label.format(window), note=CONSISTENCY.note.format(window)
        )
        for window in ROLE_SETTINGS.windows
    },
}
REASONS_WITHOUT_INTERVAL = {  # name → reason
    "dead": "resampled items never choose an expert that no item chose",
    "smallest_margin": "a quantile over tokens",
    "batch_violation": f"computed over batches of {ROLE_SETTINGS.batch} items",
}
SHOWN_EXPERTS = 16  # per layer: the most used ones
SHOWN_ITEMS = 6  # shown with the experts of their patches
MAX_EXAMINED_ITEMS = 2000  # an expert's patches are chosen from these
CROP_SIZE = 0.75  # inches
EXPERT_PATCHES_CAPTION = (
    "The patches with the highest router probability of each of the most used experts, one per "
    "image, with their surroundings."
)


def write_lens_pages(
    folder: Path, page: Path, items: int | None = None, against: Path | None = None
) -> None:
    """Analyse a trace, print its quantities, and write ``page`` and the explorer."""
    # The explorer is written next to ``page``; if the trace has none, an old explorer is removed.
    trace = traces.Trace(folder)
    other = None if against is None else traces.Trace(against)
    numbers = analyse_trace(trace, items, other)
    explorer = f"{page.stem}_explorer.html"
    if trace_explorer.can_explore(trace.card.layers):
        head = explorer_page.ExplorerHead(*EXPLORER_HEAD, address=page.name, more="All numbers")
        collector = trace_explorer.ExplorerDataCollector(trace, items)
        ours, theirs = trace_explorer.TraceWithNumbers(collector, numbers), None
        if other is not None:
            collector = trace_explorer.ExplorerDataCollector(other, items)
            theirs = trace_explorer.TraceWithNumbers(collector, analyse_trace(other, items))
        write_atomic(page.with_name(explorer), trace_explorer.render_traces(ours, head, theirs))
    else:
        page.with_name(explorer).unlink(missing_ok=True)
        explorer = ""
        numbers.remarks.append(trace_explorer.NOT_EXPLORABLE)
    print_quantities(numbers)
    write_atomic(page, render_trace_page(trace, numbers, explorer))


def write_engine_page(page: Path, rows: Sequence[Mapping[str, Any]], files: str) -> None:
    """Write a page with the ``rows`` of ``analyse_engines``; ``files`` is part of its title."""
    by_layer: dict[Any, tuple[dict[str, Interval], dict[str, float]]] = {"mean": ({}, {})}
    for row in rows:
        quantities, chances = by_layer.setdefault(row["layer"], ({}, {}))
        quantities[row["quantity"]] = Interval(row["value"], row["low"], row["high"])
        chances[row["quantity"]] = row["chance"]
    _, first, *_ = by_layer
    table = tabulate_quantities_by_layer([*by_layer.values()], first)
    template = report_page.template_environment().get_template("lens.html.jinja")
    items = "Items are requests; layers have the engine's numbers"
    blocks = {
        "block": PageBlock("", grids=[table]),
        "sheets": PageBlock(""),
        "words": [],
        "explorer": "",
    }
    write_atomic(page, template.render(model=files, items=items, **blocks))


def quantity_metrics(columns: Sequence[Column]) -> dict[str, Metric]:
    """Return name → Metric for the quantities of all layers, in the order of the page."""
    by_name = METRICS | dict(ExpertRoles.metrics) | LENS_METRICS
    names = dict.fromkeys(name for quantities, _ in columns[1:] for name in quantities)
    without_p = [name for name in names if not name.startswith("p_")]
    pairs = [(name, name.replace("information_", "p_")) for name in without_p]
    metrics = {}
    for name in dict.fromkeys(name for pair in pairs for name in pair if name in names):
        metric = by_name.get(name, Metric(name.replace("_", " ").capitalize()))
        if reason := REASONS_WITHOUT_INTERVAL.get(name):
            metric = metric._replace(note=f"{metric.note}; {NO_INTERVAL}: {reason}")
        metrics[name] = metric
    return metrics


def tabulate_quantities_by_layer(columns: Sequence[Column], first: int = 1) -> PageTable:
    """Return a table with one row per quantity; layers are numbered from ``first``."""
    lines = []
    for name, metric in quantity_metrics(columns).items():
        intervals = [quantities[name] for quantities, _ in columns if name in quantities]
        form = NumberFormat.of(metric.form, intervals)
        cells = [
            format_quantity(form, quantities.get(name), chances.get(name))
            for quantities, chances in columns
        ]
        lines.append(TableRow(PageCell(metric.label, note=metric.note), cells))
    layers = [f"Layer {first + index}" for index in range(len(columns) - 1)]
    return PageTable(["Quantity", "All layers", *layers], lines)


def format_quantity(form: NumberFormat, value: Interval | None, chance: float | None) -> PageCell:
    if value is None:
        return DASH
    note = "" if chance is None else f"chance {form.value(chance)}"
    return PageCell(form.value(value.value), form.limits(value) or "–", note, value=value.value)


def print_quantities(numbers: TraceQuantities) -> None:
    for name, metric in quantity_metrics(numbers.columns).items():
        if interval := numbers.mean.get(name):
            form = NumberFormat.of(metric.form, [interval])
            line = f"{metric.label:<32} {form.value_with_limits(interval)}"
            if name in numbers.chances:
                line += f"; by chance {form.value(numbers.chances[name])}"
            print(line)
    for remark in numbers.remarks:
        print(remark)


def render_trace_page(trace: traces.Trace, numbers: TraceQuantities, explorer: str = "") -> str:
    """Return the HTML of a trace's page, with a link to ``explorer`` unless it is empty."""
    routed_words = read_words_with_experts(trace)
    layers = trace.card.layers
    loads = Picture(draw_layer_loads(numbers), "Load of the experts")
    block = PageBlock("", numbers.remarks, [tabulate_quantities_by_layer(numbers.columns)], [loads])
    drawn = draw_expert_patch_figures(trace)
    sheets = [Picture(figure, name, getattr(figure, "caption", "")) for name, figure in drawn]
    template = report_page.template_environment().get_template("lens.html.jinja")
    return template.render(
        model=trace.card.model,
        items=f"{numbers.items:,} of {trace.items:,} items, evenly spread",
        block=block,
        sheets=PageBlock("", pictures=sheets),
        explorer=explorer,
        words=routed_words,
        layers=[
            {expert: count_expert_words(routed_words, n, expert) for expert in range(layer.experts)}
            for n, layer in enumerate(layers)
        ],
        colours=drawing.expert_colours(max(layer.experts for layer in layers)),
    )


def draw_layer_loads(numbers: TraceQuantities) -> Figure:
    experts = max(len(layer.load) for layer in numbers.layers)
    shares = np.full((len(numbers.layers), experts), np.nan)
    for row, layer in enumerate(numbers.layers):
        shares[row, : len(layer.load)] = layer.load
    texts = charts.percent_annotations(shares, limit=MAX_ANNOTATED_EXPERTS)
    step = max(1, experts // MAX_ANNOTATED_EXPERTS)
    columns = [str(n) if n % step == 0 else "" for n in range(experts)]
    rows = [str(number) for number in range(1, 1 + len(shares))]
    labels = charts.HeatmapLabels("Share of the choices, %", rows, columns, "Expert", "MoE layer")
    size = (min(10.0, 2.0 + 0.4 * experts), 1.2 + 0.25 * len(shares))
    return charts.draw_heatmap(shares / np.nanmax(shares), texts, labels, size)


def read_words_with_experts(trace: traces.Trace) -> list[WordWithExperts]:
    """Read the trace's first words, each with its experts per layer; [] without words."""
    first = np.arange(min(trace.items, ceil(MAX_WORDS / trace.card.layers[0].tokens)))
    tokens = trace.item_tensor("tokens", first)
    if tokens is None or not trace.card.vocabulary:
        return []
    layers = []
    for number, shape in enumerate(trace.card.layers):
        combine = trace.layer(number, first).combine.flatten(0, 1)[:MAX_WORDS]
        experts = expert_profiles.experts_by_weight(combine, MAX_EXPERTS)
        layers.append(experts if shape.tokens == tokens.shape[1] else [[]] * MAX_WORDS)
    return [
        WordWithExperts(trace.card.vocabulary[number], True, [layer[place] for layer in layers])
        for place, number in enumerate(tokens.flatten()[:MAX_WORDS].tolist())
    ]


def draw_expert_patch_figures(trace: traces.Trace) -> Iterator[tuple[str, Figure]]:
    """Draw patches of each expert; yield (name, figure) for all layers, then for each layer."""
    items = evenly_spaced_indices(trace.items, MAX_EXAMINED_ITEMS)
    pictures = trace.item_tensor("pictures", evenly_spaced_indices(trace.items, SHOWN_ITEMS))
    if pictures is None:
        return
    grids = {
        f"Layer {number}": (find_main_expert_per_patch(trace, number - 1), shape.experts)
        for number, shape in enumerate(trace.card.layers, 1)
    }
    title = "Experts of patches"
    yield title, model_figures.draw_experts_of_patches(pictures.numpy(), grids, title)
    for number, shape in enumerate(trace.card.layers):
        layout = shape.layout(pictures.shape[2:])
        record = analyses.convert_to_routing_record(trace.layer(number, items))
        top = analyses.TopTokens.of_none(shape.experts)
        top = analyses.update_top_tokens(top, record, record.probs, layout, items)
        examples = analyses.read_examples(trace, top, layout, layout)
        order = record.chosen.sum(dim=(0, 1)).argsort(descending=True, stable=True)
        rows = {
            f"Expert {expert}": [
                drawing.ImageTile(drawing.displayable_image(example.crop.numpy()))
                for example in examples[expert]
                if example.crop is not None
            ]
            for expert in sorted(order[:SHOWN_EXPERTS].tolist())
            if examples[expert]
        }
        name = f"Patches of experts, layer {number + 1}"
        labels = drawing.SheetLabels(name, list(rows), caption=EXPERT_PATCHES_CAPTION)
        yield name, drawing.draw_picture_sheet(list(rows.values()), labels, CROP_SIZE, CROP_SIZE)


def find_main_expert_per_patch(trace: traces.Trace, number: int) -> np.ndarray:
    """Return each patch's expert of largest weight in layer ``number``, (N, *grid); −1: none."""
    shape = trace.card.layers[number]
    items = evenly_spaced_indices(trace.items, SHOWN_ITEMS)
    combine = trace.layer(number, items).combine[:, shape.special :]
    best = combine.argmax(dim=-1).where(combine.amax(dim=-1) > 0, -1)
    return best.unflatten(1, shape.grid).numpy()
