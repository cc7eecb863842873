"""Small figures of one value over one setting: the router's threshold and k, the strength of a noise or a corruption."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from moecore.report.style import legend_of, line_look, new_figure, share_axis, styled

Rows = Sequence[Mapping[str, Any]]


@styled
def value_curves(curves: Mapping[str, Rows], title: str, setting: str, label: str, share: bool = False) -> Figure:
    """One line a method with a band; ``curves``: method → rows with x, value, low, high; share: the vertical axis is printed as percent.

    A method without rows has no line but keeps its colour, so that a method looks the same in all figures.
    """
    figure = new_figure(4.8, 3.2)
    axes = figure.subplots()
    for index, (method, rows) in enumerate(curves.items()):
        if rows:
            look, places = line_look(index), [row["x"] for row in rows]
            axes.plot(places, [row["value"] for row in rows], label=method, **look)
            axes.fill_between(places, [row["low"] for row in rows], [row["high"] for row in rows], color=look["color"], alpha=0.13, linewidth=0)
    axes.set(xlabel=setting, title=title, ylim=(0, None))
    if share:
        share_axis(axes, label)
    else:
        axes.set_ylabel(label)
    if all(float(row["x"]).is_integer() for rows in curves.values() for row in rows):
        axes.set_xticks(sorted({row["x"] for rows in curves.values() for row in rows}))
    legend_of(figure, axes, "best")
    return figure
