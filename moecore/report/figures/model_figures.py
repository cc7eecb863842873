"""Figures of trained models: training curves, confusions, and experts by class, patch and word."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from moecore.measure.retrieval import Read
from moecore.measure.routing_metrics.expert_profiles import (
    OverlappingCrops,
    Overlays,
    parse_expert_grid,
)
from moecore.nn.experts.base import expert_grid_shape
from moecore.report.column import score_title, unit_suffix
from moecore.report.figures import charts, drawing
from moecore.report.figures.drawing import Axes, Figure
from moecore.training.monitor import RoutingPoint
from moecore.training.outcome import Outcome
from moecore.training.regularizers.group_sparsity import GroupSparsity

AGREEMENTS = {
    "agreement_with_final": "Agreement with the end",
    "saturation": "Saturation",
    "agreement_consecutive": "Agreement of epochs",
}
SCHEDULE_ITERATIONS = 45_000  # of MoGE's figure 3
SCHEDULE_EXPONENTS = (0.0, 0.3, 0.5, 1.0, 2.0, 3.0)  # γ: those that the paper's text tells apart
LOAD_COLOUR_SCALE_END = 3.0  # × an even share: end of the colour scale


@drawing.styled_drawing
def draw_training_curves(trained: Mapping[str, Sequence[Outcome]]) -> Figure:
    from matplotlib.ticker import LogLocator, NullFormatter

    figure = drawing.create_figure(4.8, 4.8)
    loss, below = figure.subplots(2, 1, sharex=True)
    task = next(iter(trained.values()))[0].task
    score = task.score
    ends = []
    for index, (label, seeds) in enumerate(trained.items()):
        for number, result in enumerate(seeds):
            style = drawing.line_style(index) | {"alpha": 0.45, "label": None}
            if number == 0:
                style |= {"alpha": 0.9, "label": label}
            learned = f"train_{task.history_name}" if task.long else "train_loss"
            _plot_logged(loss, result, learned, style | {"marker": ""})
            last = _plot_logged(below, result, f"validation_{result.task.history_name}", style)
            if number == 0 and last is not None:
                ends.append(charts.CurveEnd(label, *last, style))
    loss.set(ylabel="Loss in training", title="Training")
    below.set_ylabel(f"Validation {score_title(score)}{unit_suffix(score)}")
    if task.long:
        loss.set_ylabel("Perplexity in training")
        below.set_ylabel("Validation perplexity")
        for axes in (loss, below):
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axes.yaxis.set_minor_formatter(NullFormatter())
    drawing.set_epoch_axis(below)
    if score.form == "share":
        loss.set_ylabel("Cross-entropy in training")
        drawing.set_percent_axis(below, f"Validation {score.label}")
    if "" not in trained:
        charts.label_curves(figure, below, ends, 1.7)
    return figure


def _plot_logged(axes: Axes, result: Outcome, name: str, style: dict) -> tuple[float, float] | None:
    """Plot the logged value ``name`` over epochs; return its last point, None if never logged."""
    logged = np.array([(row["epoch"], row.get(name)) for row in result.curve], dtype=float)
    logged = logged.reshape(-1, 2)
    epochs, values = logged[np.isfinite(logged).all(axis=1)].T
    if result.task.long:
        values = np.exp(values)
    axes.plot(epochs, values, **style)
    return (epochs[-1], values[-1]) if len(epochs) else None


@drawing.styled_drawing
def draw_filter_sigma_schedule(settings: GroupSparsity, method: str) -> Figure:
    """Draw the width σ of MoGE's filter over iterations, for several exponents γ (figure 3)."""
    caption = (
        f"σ from {settings.sigma_start:g} to {settings.sigma_end:g} as in {method}, whose γ is "
        f"{settings.exponent:g}; T = {SCHEDULE_ITERATIONS:,} iterations (MoGE, figure 3)."
    )
    figure = drawing.create_figure(4.8, 3.5, caption)
    axes = figure.subplots()
    progress = np.linspace(0, 1, 201)
    for index, exponent in enumerate(sorted({*SCHEDULE_EXPONENTS, settings.exponent})):
        other = settings.model_copy(update={"exponent": exponent})
        style = drawing.line_style(index) | {"marker": ""}
        if exponent == settings.exponent:
            style |= {"linewidth": 3.2}
        sigmas = [other.sigma(float(share)) for share in progress]
        axes.plot(SCHEDULE_ITERATIONS * progress, sigmas, label=f"γ = {exponent:g}", **style)
    axes.set(xlabel="Iteration", ylabel="σ, in experts", title="σ over the training")
    axes.set_ylim(bottom=0)
    drawing.add_legend_below(figure, axes)
    return figure


def agreement_points(seeds: Sequence[Outcome], name: str) -> list[charts.CurvePoint]:
    """Return routing agreement ``name`` per epoch, mean over seeds; [] if any seed lacks it."""
    # name: a key of AGREEMENTS. Lists shorter than the training end with the last epoch.
    lists = [getattr(result, name) or () for result in seeds]
    if not all(lists):
        return []
    epochs = max(len(getattr(result, key) or ()) for result in seeds for key in AGREEMENTS)
    by_epoch: list[dict[float, float | None]] = [
        dict(enumerate(values, start=1 + epochs - len(values))) for values in lists
    ]
    return charts.points_over_seeds(by_epoch, (0.0, 1.0))


@drawing.styled_drawing
def draw_routing_agreement(
    curves: Mapping[str, Mapping[str, Sequence[charts.CurvePoint]]],
) -> Figure:
    """Draw a panel per kind of routing agreement, over epochs (TGR, figure 3)."""
    figure = drawing.create_figure(9.8, 3.9)
    panels = figure.subplots(1, len(AGREEMENTS), sharex=True, sharey=True)
    named = []
    for axes, (name, title) in zip(panels, AGREEMENTS.items(), strict=True):
        ends = charts.draw_curves(axes, curves[name])
        axes.set(title=title, ylim=(0, 1.02))
        drawing.set_epoch_axis(axes)
        if ends:
            named = [(axes, ends)]
    drawing.set_percent_axis(panels[0], "Tokens")
    for axes, ends in named:
        charts.label_curves(figure, axes, ends, 3.9 - charts.AXES_MARGIN)
    return figure


def draw_confusion_matrix(counts: Sequence[Sequence[int]], classes: Sequence[str]) -> Figure:
    shares = normalise_rows(counts)
    names = classes if len(classes) <= charts.MAX_ANNOTATED_COLUMNS else ()
    texts = charts.percent_annotations(shares, 0.005, charts.MAX_ANNOTATED_COLUMNS)
    labels = charts.HeatmapLabels("Confusion", names, names, "Predicted", "True", slanted=True)
    return charts.draw_heatmap(shares, texts, labels, (4.8, 4.7), "Percent of each true class.")


def normalise_rows(counts: Sequence[Sequence[int]]) -> np.ndarray:
    """Return counts (K, E) divided by their row sums; rows of zeros stay zero."""
    table = np.asarray(counts, dtype=float)
    return table / np.maximum(table.sum(axis=1, keepdims=True), 1)


def describe_strongest_preference(first: Mapping[str, Outcome]) -> str:
    """Return a phrase on the class with the highest mean probability of a single expert."""
    strongest = (0.0, "")
    for method, result in first.items():
        for layers in list(result.class_maps.values())[-1:]:
            maps = np.array([of_class[-1] for of_class in layers], dtype=float)
            if np.isfinite(maps).any():
                label, expert = np.unravel_index(np.nanargmax(maps), maps.shape)
                preference = f"{result.task.classes[label]} for expert {expert} of {method}"
                strongest = max(strongest, (float(maps[label, expert]), preference))
    share, preference = strongest
    if not preference:
        return ""
    chance = f"{100 * share:.0f} % of its probability"
    return f"the strongest preference is that of {preference} ({chance})"


CLASS_LIMIT = 12
PICTURE_SIDE = 1.5  # in inches, as the next three; also the height of a row of images and captions
TEXT_WIDTH = 4.6  # of the caption next to a picture
LETTER_WIDTH = 0.075  # monospaced, with padding
LINE_HEIGHT = 0.27
SUBSCRIPT_DIGITS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")


def draw_expert_grids_by_class(
    maps: Mapping[str, Sequence[Sequence[float | None]]], classes: Sequence[str], caption: str = ""
) -> Figure:
    """Draw mean routing probabilities per expert; rows: keys of ``maps``, columns: classes."""
    # maps: label of a row (model, layer or epoch) → (K classes, E experts), None for a class
    # without images, whose panel is empty. Each row has one scale, from 0 to its largest value.
    rows = {label: np.asarray(values, dtype=float)[:CLASS_LIMIT] for label, values in maps.items()}
    grid = expert_grid_shape(next(iter(rows.values())).shape[1])
    height = min(2.0, max(0.35, grid[0] / grid[1])) * 0.85
    largest = [np.nanmax(values) if np.isfinite(values).any() else 1.0 for values in rows.values()]
    tiles = [
        [drawing.ImageTile(drawing.heat_colours(values.reshape(grid), scale)) for values in line]
        for line, scale in zip(rows.values(), largest, strict=True)
    ]
    title = "Mean routing of each class"
    scales = [f"0 – {value:.2g}" for value in largest]
    caption = f"{caption} A cell is an expert; on the right the scale of each row.".lstrip()
    frame = drawing.SheetLabels(title, list(rows), list(classes)[:CLASS_LIMIT], scales, caption)
    return drawing.draw_picture_sheet(tiles, frame, 0.9, height)


@drawing.styled_drawing
def draw_expert_load(layers: list[tuple[float, ...]]) -> Figure:
    caption = "Share of the choices. Dotted: balance."
    figure = drawing.create_figure(4.8, 0.5 + 1.2 * len(layers), caption)
    panels = figure.subplots(len(layers), 1, sharex=True, squeeze=False)[:, 0]
    for number, (axes, load) in enumerate(zip(panels, layers, strict=True), start=1):
        axes.bar(range(len(load)), load, color=drawing.PALETTE[0], width=0.78)
        axes.axhline(1 / len(load), color=drawing.PALETTE[1], linewidth=1.2, linestyle=":")
        axes.grid(axis="x", visible=False)
        axes.set_ylim(bottom=0)
        drawing.set_percent_axis(axes, f"MoE {number}")
    panels[0].set_title("Expert load")
    panels[-1].set_xlabel("Expert")
    if len(layers[0]) <= 16:
        panels[-1].set_xticks(range(len(layers[0])))
    return figure


def draw_experts_of_patches(
    images: np.ndarray, layers: Mapping[str, tuple[Iterable[np.ndarray], int]], title: str
) -> Figure:
    # layers: name → (a grid of experts per image, number of experts).
    tiles = [[drawing.ImageTile(drawing.displayable_image(image)) for image in images]]
    for grids, experts in layers.values():
        colours = drawing.expert_colours(experts)
        pairs = zip(images, grids, strict=True)
        tiles.append([patch_experts_tile(image, grid, colours) for image, grid in pairs])
    caption = "The expert with the largest weight in each patch."
    labels = drawing.SheetLabels(title, ["Image", *layers], caption=caption)
    return drawing.draw_picture_sheet(tiles, labels, 1.35, 1.35)


def draw_patch_correspondence(pair: OverlappingCrops) -> Figure:
    """Draw two crops of one image, with equal numbers on patches that show the same part."""
    grids = [parse_expert_grid(rows) for rows in pair.numbers]
    colours = drawing.expert_colours(grids[0].size)
    pairs = zip(pair.views.array(), grids, strict=True)
    tiles = [patch_experts_tile(view, grid, colours) for view, grid in pairs]
    caption = (
        "Two random crops of a test image; patches of one number and colour show the same, bare "
        "ones have no partner (PRC, figure 4)."
    )
    labels = drawing.SheetLabels("Corresponding patches", ["Crops"], caption=caption)
    return drawing.draw_picture_sheet([tiles], labels, 1.9, 1.9)


def patch_experts_tile(
    image: np.ndarray, grid: np.ndarray, colours: Sequence[str]
) -> drawing.ImageTile:
    """Return an image (C, H, W) as a tile; grid: the expert of each patch, −1: none."""
    tint = drawing.patch_expert_colours(grid, colours)
    texts = np.where(grid < 0, "", grid.astype(str))
    return drawing.ImageTile(drawing.displayable_image(image), tint, texts)


@drawing.styled_drawing
def draw_caption_experts(stored: Overlays, captions: list[list[Read]], experts: int) -> Figure:
    """Draw each image with the experts of its patches, and its caption with those of words."""
    # The experts are from the last MoE layer; a dense tower has no colours. captions: per image the
    # layers of the text tower, each (word, expert) pairs; experts: number in a text layer.
    images = stored.images()
    size = (PICTURE_SIDE + TEXT_WIDTH, PICTURE_SIDE * len(images) + 0.05)
    caption = "Left: the expert with most weight in each patch, right: of each word. Last layers."
    figure = drawing.create_figure(*size, caption, raster=True)
    figure.set_layout_engine("none")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, size[0] / PICTURE_SIDE), ylim=(size[1] / PICTURE_SIDE, 0), aspect="auto")
    colours = drawing.expert_colours(stored.experts)
    for row, image in enumerate(images):
        tile = drawing.ImageTile(drawing.displayable_image(image))
        if stored.grids:
            tile = patch_experts_tile(image, parse_expert_grid(stored.grids[-1][row]), colours)
        drawing.draw_tile(axes, tile, 0, row)
        if captions[row]:
            draw_caption_words(axes, captions[row][-1], row, drawing.expert_colours(experts))
    drawing.strip_axes(axes)
    return figure


def draw_caption_words(axes: Axes, read_words: Read, row: int, colours: Sequence[str]) -> None:
    """Write the words of a caption beside the image in ``row``, coloured by their experts."""
    start, line = 0.0, 0
    for word, expert in read_words:
        text = word
        box = {"boxstyle": "round,pad=0.2", "linewidth": 0, "facecolor": "none"}
        if expert >= 0:
            text += str(expert).translate(SUBSCRIPT_DIGITS)
            box |= {"facecolor": colours[expert], "alpha": 0.45}
        width = LETTER_WIDTH * (len(text) + 1.5)
        if start + width > TEXT_WIDTH - 0.2 and start:
            start = 0.0
            line = line + 1
        x = (PICTURE_SIDE + 0.15 + start) / PICTURE_SIDE
        y = row + (0.12 + LINE_HEIGHT * line) / PICTURE_SIDE
        axes.text(x, y, text, fontsize=8, family="monospace", va="center", bbox=box)
        start += width


@drawing.styled_drawing
def draw_load_over_steps(points: Sequence[RoutingPoint]) -> Figure:
    names = list(points[0].layers)
    caption = "Load of each expert, 1: an even share. As the training counted it."
    figure = drawing.create_figure(6.4, 0.6 + 1.3 * len(names), caption, raster=True)
    panels = figure.subplots(len(names), 1, sharex=True, squeeze=False)[:, 0]
    edges = [0, *(point.step for point in points)]
    for axes, name in zip(panels, names, strict=True):
        loads = np.array([point.layers[name].load for point in points]).T
        experts = np.arange(len(loads) + 1) - 0.5
        style = {"cmap": "cividis", "vmin": 0, "vmax": LOAD_COLOUR_SCALE_END}
        mesh = axes.pcolormesh(edges, experts, loads * len(loads), **style)
        axes.grid(visible=False)
        axes.set_ylabel(name)
    panels[0].set_title("Expert load")
    panels[-1].set_xlabel("Step")
    figure.colorbar(mesh, ax=panels, label="× even share")
    return figure
