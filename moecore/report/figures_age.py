"""Figures of predicted ages: plain data in, a matplotlib Figure out; no file is written, nothing is kept."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from moecore.report.style import PALETTE, new_figure, styled

SEXES = {"F": ("women", PALETTE[1], "o"), "M": ("men", PALETTE[0], "s"), "": ("sex unknown", PALETTE[6], "^")}
Points = Mapping[str, Sequence[Any]]  # columns of equal length: age, sex, raw, pooled (None where nothing was corrected)
PANELS = {"raw": "as predicted", "pooled": "corrected"}


def data_title(title: str, simulated: bool) -> str:
    """A title that says where volumes are simulated."""
    return f"{title} (simulated data)" if simulated else title


@styled
def age_scatter(points: Points, title: str = "Predicted age", simulated: bool = False) -> Figure:
    """Predicted against known age, a colour and a fitted line a sex, before and after the correction; grey: predicted = known."""
    names = _known(points)
    figure = new_figure(0.6 + 4.3 * len(names), 4.3)
    panels = figure.subplots(1, len(names), sharex=True, sharey=True, squeeze=False)[0]
    every = np.concatenate([points["age"], *(points[name] for name in names)])
    limits = (float(every.min()) - 2, float(every.max()) + 2)
    for axes, name in zip(panels, names, strict=True):
        axes.plot(limits, limits, color="#999999", linewidth=1, linestyle=":", label="predicted = known")
        _by_sex(axes, points, np.asarray(points[name], float))
        axes.set(xlabel="Known age, years", title=PANELS[name], xlim=limits, ylim=limits)
        axes.set_aspect("equal")
    panels[0].set_ylabel("Predicted age, years")
    panels[0].legend(loc="upper left", fontsize=8)
    figure.suptitle(data_title(title, simulated), fontsize=11, fontweight="bold")
    return figure


@styled
def pad_against_age(points: Points, title: str = "Brain-PAD", simulated: bool = False) -> Figure:
    """Predicted minus known age against known age, before and after the correction, with its mean, mean ± 1.96 SD, and a fitted line a sex."""
    names = _known(points)
    figure = new_figure(0.6 + 4.3 * len(names), 3.6)
    panels = figure.subplots(1, len(names), sharex=True, sharey=True, squeeze=False)[0]
    for axes, name in zip(panels, names, strict=True):
        gaps = np.asarray(points[name], float) - np.asarray(points["age"], float)
        mean, spread = gaps.mean(), 1.96 * gaps.std()
        axes.axhline(0, color="#999999", linewidth=1, linestyle=":")
        for height, look in ((mean, "-"), (mean - spread, "--"), (mean + spread, "--")):
            axes.axhline(height, color="#999999", linewidth=1, linestyle=look)
        _by_sex(axes, points, gaps)
        axes.set(xlabel="Known age, years", title=f"{PANELS[name]}: {mean:+.2f} ± {spread:.2f}")
    panels[0].set_ylabel("Predicted − known age, years")
    panels[0].legend(loc="upper right", fontsize=8)
    figure.suptitle(data_title(title, simulated), fontsize=11, fontweight="bold")
    return figure


@styled
def errors_by_group(panels: Mapping[str, Sequence[Mapping[str, Any]]], title: str = "Error by group", simulated: bool = False) -> Figure:
    """MAE as predicted and corrected in each group with its interval; ``panels``: decade, sex, site → rows as ``errors_by`` gives them."""
    shown = {name: rows for name, rows in panels.items() if rows}
    figure = new_figure(1.2 + 0.62 * sum(len(rows) + 1 for rows in shown.values()), 3.5)
    widths = [len(rows) + 1 for rows in shown.values()]
    for axes, (name, rows) in zip(figure.subplots(1, len(shown), sharey=True, squeeze=False, width_ratios=widths)[0], shown.items(), strict=True):
        for shift, (variant, colour) in zip((-0.15, 0.15), (("raw", PALETTE[1]), ("pooled", PALETTE[0])), strict=True):
            for place, row in enumerate(rows):
                if found := row.get(variant):
                    value, low, high = (found["mae"][key] for key in ("value", "low", "high"))
                    axes.plot(place + shift, value, "o", color=colour, label=PANELS[variant] if place == 0 else None)
                    axes.plot([place + shift] * 2, [value, value] if low is None else [low, high], color=colour, linewidth=1.2)
        axes.set_xticks(range(len(rows)), [f"{row['group'] or 'unknown'}\nn {row['n']}" for row in rows], fontsize=8)
        axes.set(title=name, ylim=(0, None), xlim=(-0.6, len(rows) - 0.4))
    figure.axes[0].set_ylabel("MAE, years")
    figure.axes[0].legend(loc="lower left", fontsize=8)
    figure.suptitle(data_title(title, simulated), fontsize=11, fontweight="bold")
    return figure


def _known(points: Points) -> list[str]:
    return [name for name in PANELS if points.get(name) is not None]


def _by_sex(axes: Axes, points: Points, values: np.ndarray) -> None:
    """A cloud and its least-squares line for each sex."""
    ages, sexes = np.asarray(points["age"], float), np.array(points["sex"], dtype=object)
    for sex, (label, colour, marker) in SEXES.items():
        own = sexes == sex
        if not own.any():
            continue
        axes.scatter(ages[own], values[own], s=16, color=colour, marker=marker, alpha=0.55, linewidths=0, label=f"{label}, n {own.sum()}")
        if own.sum() > 2 and np.ptp(ages[own]) > 0:
            slope, intercept = np.polyfit(ages[own], values[own], 1)
            ends = np.array([ages[own].min(), ages[own].max()])
            axes.plot(ends, intercept + slope * ends, color=colour, linewidth=1.6)
