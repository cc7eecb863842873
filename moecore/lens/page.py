"""What is said of a trace: a table in the terminal, and one HTML file that needs nothing else.

Its pictures, of a trace of images: the patches of every expert, and the experts of every patch. N
items, T tokens of a layer, E experts.
"""

from collections.abc import Iterator
from math import ceil
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure

from moecore.core.files import write_whole
from moecore.data.prepared import evenly_spaced_indices
from moecore.lens import trace_explorer
from moecore.lens.analyses import ROLES, TraceNumbers, analyse_trace, record_of_layer
from moecore.lens.traces import Trace
from moecore.measure.exploring.caption_word_experts import experts_by_weight
from moecore.measure.exploring.expert_gallery import ExpertUseByImage, expert_use_by_image
from moecore.measure.exploring.expert_overlay_data import patch_crop
from moecore.measure.routing import METRICS
from moecore.measure.routing_metrics.expert_roles import LABELS, SPECIAL, TELLS, ExpertRoles
from moecore.measure.values import Metric
from moecore.predict.continuation import MOST, WordWithExperts, expert_word_counts
from moecore.report.figures.charts import Labels, draw_heatmap, percent_annotations
from moecore.report.figures.drawing import expert_colours
from moecore.report.figures.expert_figures import patch_experts_tile
from moecore.report.figures.sheets import SheetLabels, Tile, displayable_image, sheet
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
LOCAL = ExpertRoles.metrics["consistency"]
LENS_METRICS = {
    "dropped": Metric("Dropped", "", "share", note="choices that no expert had room for"),
    "information_label": Metric("Experts tell the label", "", "share", note=TELLS),
    "specialisation_label": Metric("Specialisation by label", "", "share", note=SPECIAL),
    "purity": Metric("Purity", "", "share", note="of the commonest label of their first expert"),
    "matched_correlation": Metric(
        "Matched experts, correlation",
        note="of which tokens chose an expert and its partner in the other trace; matched on half "
        "of the items, compared on the others",
    ),
    "matched_overlap": Metric(
        "Matched experts, shared choices",
        form="share",
        note="experts of a token whose partner the other trace chose too; of the same items",
    ),
    **{
        f"p_{name}": Metric(
            f"p, {words}",
            note=f"share of permutations that tell as much; {NO_INTERVAL}, no mean: a test a layer",
        )
        for name, words in TOLD.items()
    },
    **{
        f"consistency_{window}": Metric(
            LOCAL.label.format(window), "", LOCAL.form, note=LOCAL.note.format(window)
        )
        for window in ROLES.windows
    },
}
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
    if trace_explorer.can_explore(trace.card.layers):
        head = PageHead(*HEAD, address=page.name, more="All numbers")
        ours = trace_explorer.ExploredTrace(trace_explorer.TraceExplorer(trace, items), numbers)
        theirs = None
        if other is not None:
            theirs = trace_explorer.ExploredTrace(
                trace_explorer.TraceExplorer(other, items), analyse_trace(other, items)
            )
        write_whole(page.with_name(explorer), trace_explorer.render_traces(ours, head, theirs))
    else:
        page.with_name(explorer).unlink(missing_ok=True)
        explorer = ""
        numbers.remarks.append(trace_explorer.UNLIKE)
    print_numbers(numbers)
    write_whole(page, render_lens(trace, numbers, explorer))


def quantity_metrics(numbers: TraceNumbers) -> dict[str, Metric]:
    """Return what is known of the quantities that any layer has, each p behind what it is of."""
    known = METRICS | dict(ExpertRoles.metrics) | LENS_METRICS
    names = dict.fromkeys(name for layer in numbers.layers for name in layer.quantities)
    ordered = [
        one
        for name in names
        if not name.startswith("p_")
        for one in (name, name.replace("information_", "p_"))
        if one in names
    ]
    metrics = {}
    for name in dict.fromkeys(ordered):
        metric = known.get(name, Metric(name.replace("_", " ").capitalize()))
        if why := WITHOUT_INTERVAL.get(name):
            metric = metric._replace(note=f"{metric.note}; {NO_INTERVAL}: {why}")
        metrics[name] = metric
    return metrics


def quantity_rows_table(numbers: TraceNumbers) -> PageTable:
    """Return a row a quantity: all layers together, then each from 1, with chance and limits."""
    sides = [(numbers.mean, numbers.chances)]
    sides += [(layer.quantities, layer.chances) for layer in numbers.layers]
    lines = []
    for name, metric in quantity_metrics(numbers).items():
        form = NumberFormat.of(metric.form, [own[name] for own, _ in sides if name in own])
        cells = [format_quantity(form, own.get(name), chances.get(name)) for own, chances in sides]
        lines.append(TableRow(PageCell(metric.label, note=metric.note), cells))
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
    for name, metric in quantity_metrics(numbers).items():
        if interval := numbers.mean.get(name):
            form = NumberFormat.of(metric.form, [interval])
            line = f"{metric.label:<32} {form.value_with_limits(interval)}"
            if name in numbers.chances:
                line += f"; by chance {form.value(numbers.chances[name])}"
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


PATCHES = 8  # of an expert
ROWS = 16  # experts of a layer, those that are used most
IMAGES = 6  # that are shown with the experts of their patches
EXAMINED = 2000  # items among which an expert's patches are looked for
SQUARE = 1.35  # inches of an image
CROP = 0.75  # inches of a patch
CAPTION = (
    "Of each of the most used experts those patches, one an image, to which the router gave the "
    "highest probability; each in the middle of what is around it."
)


def draw_trace_pictures(trace: Trace) -> Iterator[tuple[str, Figure]]:
    """Yield what a page shows of a trace with pictures, by name: a figure, then one a layer."""
    places = evenly_spaced_indices(trace.items, EXAMINED)
    pictures = trace.beside("pictures", places)
    if pictures is None:
        return
    yield "Experts of patches", draw_experts_of_patches(trace)
    for number, shape in enumerate(trace.card.layers):
        layout = shape.layout(pictures.shape[2:])
        record = record_of_layer(trace.layer(number, places))
        no_kinds = torch.zeros(*record.chosen.shape[:2], 0, dtype=torch.bool)
        use = expert_use_by_image(record, layout.special, no_kinds)
        most = use.chosen.sum(dim=0).argsort(descending=True, stable=True)[:ROWS].tolist()
        rows = {
            expert: [
                Tile(displayable_image(patch_crop(pictures[item], patch, layout).numpy()))
                for item, patch in patches
            ]
            for expert in sorted(most)
            if (patches := typical_patches(use, expert))
        }
        name = f"Patches of experts, layer {number + 1}"
        labels = SheetLabels(name, [f"Expert {expert}" for expert in rows], caption=CAPTION)
        yield name, sheet(list(rows.values()), labels, CROP, CROP)


def typical_patches(use: ExpertUseByImage, expert: int) -> list[tuple[int, int]]:
    """Return items and patches of the highest probability that chose the expert, one an item."""
    highest = use.highest[:, expert]
    order = highest.sort(descending=True, stable=True).indices[:PATCHES].tolist()
    return [(item, int(use.patch[item, expert])) for item in order if highest[item] >= 0]


def draw_experts_of_patches(trace: Trace) -> Figure:
    """Draw a few items, and below them the expert with most weight in each patch, a row a layer."""
    places = evenly_spaced_indices(trace.items, IMAGES)
    pictures = trace.beside("pictures", places)
    assert pictures is not None, "asked for where there are pictures"
    images = pictures.numpy()
    tiles = [[Tile(displayable_image(image)) for image in images]]
    for number, shape in enumerate(trace.card.layers):
        combine = trace.layer(number, places).combine[:, shape.special :]
        best = combine.argmax(dim=-1).where(combine.amax(dim=-1) > 0, -1)
        colours = expert_colours(shape.experts)
        grids = best.unflatten(1, shape.grid).numpy()
        tiles.append(
            [patch_experts_tile(*pair, colours) for pair in zip(images, grids, strict=True)]
        )
    names = ["Image", *(f"Layer {number}" for number in range(1, len(tiles)))]
    caption = "The expert with the largest weight in each patch."
    return sheet(tiles, SheetLabels("Experts of patches", names, caption=caption), SQUARE, SQUARE)
