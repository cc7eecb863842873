"""Linear experts over the angle of their data: theorems 1 and 2 on drawn data."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from matplotlib.figure import Figure

from moecore.measure.values import Found
from moecore.report.figures.drawing import INK, PALETTE, empty_figure, line_look, styled_drawing
from moecore.report.page.view import Block, Picture
from moecore.report.results import Figures

TARGETS = {
    "shared": "every expert learns the same",
    "opposed": "neighbours learn opposites",
    "drawn": "experts learn independent things",
}


def figures(result: Found) -> Figures:
    """Yield a picture per kind of targets."""
    curves: dict[Any, dict[Any, dict[Any, float]]] = {}
    for one in result.all("ratio"):
        of_targets = curves.setdefault(one.at["targets"], {})
        of_targets.setdefault(one.at["experts"], {})[one.at["angle"]] = one.value
    for targets, of_targets in curves.items():
        yield f"ratio_over_angle_{targets}", ratio_over_angle(of_targets, targets)


def theorem_failure_blocks(result: Found) -> Iterator[Block]:
    """Yield what was drawn, and how often the theorems failed."""
    totals = {one.metric: int(one.value) for one in result.values if not one.at}
    words = [
        f"{totals['draws']} draws of data for linear experts, without any trained model. Theorem 1 "
        f"fails {totals['violations']} times. Theorem 2 promises something "
        f"{totals['theorem_2_promises']} times and fails {totals['theorem_2_violations']} times."
    ]
    drawn = [Picture(figure, name.replace("_", " ")) for name, figure in figures(result)]
    yield Block("The experts' Lipschitz constant over the dense model's", words, pictures=drawn)


@styled_drawing
def ratio_over_angle(curves: Mapping[int, Mapping[float, float]], targets: str) -> Figure:
    """max ‖w_i*‖ / ‖w*‖ over the angle for each E, and over E at the largest angle beside 1/√E.

    curves: experts → angle → ratio.
    """
    figure = empty_figure(8.2, 3.8, "Means over draws.")
    left, right = figure.subplots(1, 2)
    numbers = sorted(curves)
    last = max(angle for curve in curves.values() for angle in curve)
    for index, experts in enumerate(numbers):
        angles, ratios = zip(*sorted(curves[experts].items()), strict=True)
        left.plot(angles, ratios, label=f"E = {experts}", **line_look(index))
    left.axhline(1, color=INK, linewidth=0.9, linestyle=":")
    left.set(xlabel="Angle between subspaces in degrees", ylabel="max ‖wᵢ*‖ / ‖w*‖", ylim=(0, None))
    left.set_title(f"Linear experts: {TARGETS.get(targets, targets)}")
    left.legend(loc="best")
    promised = [number**-0.5 for number in numbers]
    right.plot(numbers, promised, color=INK, linestyle="--", linewidth=1.2, label="1 / √E")
    measured = [curves[number].get(last, math.nan) for number in numbers]
    look = {"linestyle": "", "marker": "o", "color": PALETTE[0]}
    right.plot(numbers, measured, label=f"at {last:g}°", **look)
    right.set(xscale="log", yscale="log", xlabel="Experts E", ylabel="max ‖wᵢ*‖ / ‖w*‖")
    right.set_xticks(numbers, [str(number) for number in numbers], minor=False)
    right.set_yticks(promised, [f"{value:.2f}" for value in promised], minor=False)
    right.minorticks_off()
    right.legend(loc="upper right")
    return figure
