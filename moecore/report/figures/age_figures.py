"""Figures of predicted ages: clouds by sex, and errors by group."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from moecore.brain.age_errors import GroupErrors
from moecore.brain.measured_ages import AgePoints
from moecore.report.figures.drawing import GUIDE, PALETTE, legend_of, new_figure, styled

SEXES = {
    "F": ("women", PALETTE[1], "o"),
    "M": ("men", PALETTE[0], "s"),
    "": ("sex unknown", PALETTE[6], "^"),
}
PANELS = {"raw": "as predicted", "pooled": "corrected"}
COLOURS = {"raw": PALETTE[1], "pooled": PALETTE[0]}
TITLE = {"fontsize": 11, "fontweight": "bold"}


def data_title(title: str, simulated: bool) -> str:
    """A title that says where volumes are simulated."""
    return f"{title} (simulated data)" if simulated else title


@styled
def age_scatter(points: AgePoints, simulated: bool) -> Figure:
    """Predicted against known age, before and after correction; a colour and a line per sex."""
    known = _known_predictions(points)
    figure = new_figure(0.6 + 4.3 * len(known), 4.3, "Test split.")
    panels = figure.subplots(1, len(known), sharex=True, sharey=True, squeeze=False)[0]
    every = np.concatenate([points.age, *known.values()])
    limits = (float(every.min()) - 2, float(every.max()) + 2)
    look = {"color": GUIDE, "linewidth": 1, "linestyle": ":", "label": "predicted = known"}
    for axes, (name, values) in zip(panels, known.items(), strict=True):
        axes.plot(limits, limits, **look)
        _by_sex(axes, points, values)
        axes.set(xlabel="Known age, years", title=PANELS[name], xlim=limits, ylim=limits)
        axes.set_aspect("equal")
    panels[0].set_ylabel("Predicted age, years")
    legend_of(figure, panels[0])
    figure.suptitle(data_title("Predicted age", simulated), **TITLE)
    return figure


@styled
def pad_against_age(points: AgePoints, simulated: bool) -> Figure:
    """Predicted minus known age against known age, with mean, mean ± 1.96 SD, a line per sex."""
    known = _known_predictions(points)
    caption = "Grey lines: mean and mean ± 1.96 SD."
    figure = new_figure(0.6 + 4.3 * len(known), 3.6, caption)
    panels = figure.subplots(1, len(known), sharex=True, sharey=True, squeeze=False)[0]
    for axes, (name, values) in zip(panels, known.items(), strict=True):
        gaps = values - np.asarray(points.age, float)
        mean = gaps.mean()
        width = 1.96 * gaps.std()
        axes.axhline(0, color=GUIDE, linewidth=1, linestyle=":")
        for height, dash in ((mean, "-"), (mean - width, "--"), (mean + width, "--")):
            axes.axhline(height, color=GUIDE, linewidth=1, linestyle=dash)
        _by_sex(axes, points, gaps)
        axes.set(xlabel="Known age, years", title=f"{PANELS[name]}: {mean:+.2f} ± {width:.2f}")
    panels[0].set_ylabel("Predicted − known age, years")
    legend_of(figure, panels[0])
    figure.suptitle(data_title("Brain-PAD", simulated), **TITLE)
    return figure


@styled
def errors_by_group(groups: Mapping[str, Sequence[GroupErrors]], simulated: bool) -> Figure:
    """MAE as predicted and corrected in each group with its interval; groups: sex → rows."""
    widths = [len(rows) + 1 for rows in groups.values()]
    caption = "95 % intervals over participants."
    figure = new_figure(1.2 + 0.62 * sum(widths), 3.5, caption)
    panels = figure.subplots(1, len(groups), sharey=True, squeeze=False, width_ratios=widths)[0]
    for axes, (name, rows) in zip(panels, groups.items(), strict=True):
        _groups(axes, rows)
        axes.set(title=name, ylim=(0, None), xlim=(-0.6, len(rows) - 0.4))
    panels[0].set_ylabel("MAE, years")
    legend_of(figure, panels[0])
    figure.suptitle(data_title("Error by group", simulated), **TITLE)
    return figure


def _groups(axes: Axes, rows: Sequence[GroupErrors]) -> None:
    """Two dots a group, as predicted and corrected."""
    for shift, variant in ((-0.15, "raw"), (0.15, "pooled")):
        look = {"color": COLOURS[variant]}
        for place, row in enumerate(rows):
            errors = getattr(row, variant)
            if errors is None:
                continue
            label = PANELS[variant] if place == 0 else None
            axes.plot(place + shift, errors.mae.value, "o", label=label, **look)
            if errors.mae.low is not None:
                ends = [errors.mae.low, errors.mae.high]
                axes.plot([place + shift] * 2, ends, linewidth=1.2, **look)
    names = [f"{row.group or 'unknown'}\nn {row.n}" for row in rows]
    axes.set_xticks(range(len(rows)), names, fontsize=8)


def _known_predictions(points: AgePoints) -> dict[str, np.ndarray]:
    values = {name: getattr(points, name) for name in PANELS}
    return {name: np.asarray(one, float) for name, one in values.items() if one is not None}


def _by_sex(axes: Axes, points: AgePoints, values: np.ndarray) -> None:
    """A cloud and its least-squares line for each sex."""
    ages = np.asarray(points.age, float)
    sexes = np.array(points.sex, dtype=object)
    for sex, (label, colour, marker) in SEXES.items():
        own = sexes == sex
        if not own.any():
            continue
        look = {"color": colour, "marker": marker, "alpha": 0.55, "linewidths": 0}
        axes.scatter(ages[own], values[own], s=16, label=f"{label}, n {own.sum()}", **look)
        if own.sum() > 2 and np.ptp(ages[own]) > 0:
            slope, intercept = np.polyfit(ages[own], values[own], 1)
            ends = np.array([ages[own].min(), ages[own].max()])
            axes.plot(ends, intercept + slope * ends, color=colour, linewidth=1.6)
