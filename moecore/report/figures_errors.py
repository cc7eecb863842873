"""Figures of errors of a real target: under attack, and over the life of one subject."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from moecore.report.style import legend_of, line_look, new_figure, styled

Rows = Sequence[Mapping[str, Any]]


@styled
def error_curve(curves: Mapping[str, Rows], title: str = "Error under attack", label: str = "Mean absolute error") -> Figure:
    """An error over epsilon with its interval as a band; ``curves``: name → rows with epsilon, value, low, high."""
    figure = new_figure(4.8, 3.5)
    axes = figure.subplots()
    for index, (name, rows) in enumerate(curves.items()):
        look, epsilons = line_look(index), [row["epsilon"] * 255 for row in rows]
        axes.plot(epsilons, [row["value"] for row in rows], label=name, **look)
        axes.fill_between(epsilons, [row["low"] for row in rows], [row["high"] for row in rows], color=look["color"], alpha=0.13, linewidth=0)
    axes.set(xlabel="ε in 1/255", ylabel=label, title=title)
    axes.set_ylim(bottom=0)
    legend_of(figure, axes, "best")
    return figure


@styled
def ageing_curves(ages: Sequence[float], predictions: Sequence[Sequence[float]], title: str = "The same simulated subjects, aged") -> Figure:
    """Predicted age over age, one line a subject, with the identity; predictions: (S, A), ages: (A,), in years."""
    figure = new_figure(4.4, 4.0)
    axes = figure.subplots()
    axes.plot([ages[0], ages[-1]], [ages[0], ages[-1]], color="#999999", linewidth=1, linestyle=":", label="identity")
    for row in predictions:
        axes.plot(ages, row, color=line_look(0)["color"], linewidth=0.8, alpha=0.6, marker="o", markersize=2)
    axes.set(xlabel="Age in years", ylabel="Predicted age in years", title=title)
    legend_of(figure, axes, "best")
    return figure
