"""Figures of trainings: curves, how the routing settles, which class is taken for which."""

from collections.abc import Mapping, Sequence

import numpy as np

from moecore.report.column import score_title, unit_suffix
from moecore.report.figures import charts, drawing
from moecore.report.figures.drawing import Axes, Figure
from moecore.training.outcome import Outcome
from moecore.training.regularizers.group_sparsity import GroupSparsity

AGREEMENTS = {
    "agreement_with_final": "Agreement with the end",
    "saturation": "Saturation",
    "agreement_consecutive": "Agreement of epochs",
}
ITERATIONS = 45_000  # of MoGE's figure 3
EXPONENTS = (0.0, 0.3, 0.5, 1.0, 2.0, 3.0)  # γ: its own, and what the paper's text tells apart


@drawing.styled_drawing
def training_curves(trained: Mapping[str, Sequence[Outcome]]) -> Figure:
    """Draw loss, or perplexity, and validation score over epochs; trained: method → its seeds."""
    from matplotlib.ticker import LogLocator, NullFormatter

    figure = drawing.empty_figure(4.8, 4.8)
    loss, below = figure.subplots(2, 1, sharex=True)
    task = next(iter(trained.values()))[0].task
    score = task.score
    ends = []
    for index, (label, seeds) in enumerate(trained.items()):
        for number, result in enumerate(seeds):
            style = drawing.line_look(index) | {"alpha": 0.45, "label": None}
            if number == 0:
                style |= {"alpha": 0.9, "label": label}
            learned = f"train_{task.history_name}" if task.long else "train_loss"
            _plot(loss, result, learned, style | {"marker": ""})
            last = _plot(below, result, f"validation_{result.task.history_name}", style)
            if number == 0 and last is not None:
                ends.append(charts.End(label, *last, style))
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
        charts.name_curves(figure, below, ends, 1.7)
    return figure


def _plot(axes: Axes, result: Outcome, name: str, style: Mapping) -> tuple[float, float] | None:
    """Plot the logged value ``name`` over epochs; return its last point (x, y), or None."""
    logged = np.array([(row["epoch"], row.get(name)) for row in result.curve], dtype=float)
    logged = logged.reshape(-1, 2)
    epochs, values = logged[np.isfinite(logged).all(axis=1)].T
    if result.task.long:
        values = np.exp(values)
    axes.plot(epochs, values, **style)
    return (epochs[-1], values[-1]) if len(epochs) else None


@drawing.styled_drawing
def draw_filter_sigma_schedule(settings: GroupSparsity, method: str) -> Figure:
    """Draw σ of MoGE's filter over the iterations for several γ, the method's bold (figure 3)."""
    caption = (
        f"σ from {settings.sigma_start:g} to {settings.sigma_end:g} as in {method}, whose γ is "
        f"{settings.exponent:g}; T = {ITERATIONS:,} iterations (MoGE, figure 3)."
    )
    figure = drawing.empty_figure(4.8, 3.5, caption)
    axes = figure.subplots()
    progress = np.linspace(0, 1, 201)
    for index, exponent in enumerate(sorted({*EXPONENTS, settings.exponent})):
        other = settings.model_copy(update={"exponent": exponent})
        style = drawing.line_look(index) | {"marker": ""}
        if exponent == settings.exponent:
            style |= {"linewidth": 3.2}
        sigmas = [other.sigma(float(share)) for share in progress]
        axes.plot(ITERATIONS * progress, sigmas, label=f"γ = {exponent:g}", **style)
    axes.set(xlabel="Iteration", ylabel="σ, in experts", title="σ over the training")
    axes.set_ylim(bottom=0)
    drawing.add_legend_below(figure, axes)
    return figure


def agreement_points(seeds: Sequence[Outcome], name: str) -> list[charts.Point]:
    """Return a point per epoch, the mean over a method's seeds; [] if a seed has no values."""
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
def routing_agreement(curves: Mapping[str, Mapping[str, Sequence[charts.Point]]]) -> Figure:
    """Draw a panel per key of AGREEMENTS (TGR, figure 3); curves: key → method → points."""
    figure = drawing.empty_figure(9.8, 3.9)
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
        charts.name_curves(figure, axes, ends, 3.9 - charts.AROUND)
    return figure


def confusion_matrix(counts: Sequence[Sequence[int]], classes: Sequence[str]) -> Figure:
    """Draw the share of each true class (row) predicted as each (column); counts: images (K, K)."""
    shares = row_shares(counts)
    names = classes if len(classes) <= charts.NUMBERED else ()
    texts = charts.percent_annotations(shares, 0.005, charts.NUMBERED)
    labels = charts.Labels("Confusion", names, names, "Predicted", "True", slanted=True)
    return charts.draw_heatmap(shares, texts, labels, (4.8, 4.7), "Percent of each true class.")


def row_shares(counts: Sequence[Sequence[int]]) -> np.ndarray:
    """Return counts (K, E) as shares of their row's sum; rows without counts are zero."""
    table = np.asarray(counts, dtype=float)
    return table / np.maximum(table.sum(axis=1, keepdims=True), 1)


def describe_strongest_preference(first: Mapping[str, Outcome]) -> str:
    """Return a phrase on the class that most prefers one expert; first: method → outcome."""
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
