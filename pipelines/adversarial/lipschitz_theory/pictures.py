"""Linear experts on random data: theorems 1 and 2 over the angle between subspaces."""

import math
from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from moecore.measure.values import Found
from moecore.report.figures.drawing import INK, PALETTE, create_figure, line_style, styled_drawing
from moecore.report.results_and_displays import Figures, Pictures

TARGETS = {
    "shared": "every expert learns the same",
    "opposed": "neighbours learn opposites",
    "drawn": "experts learn independent things",
}


def figures(result: Found) -> Figures:
    curves: dict[Any, dict[Any, dict[Any, float]]] = {}
    for ratio in result.all("ratio"):
        of_targets = curves.setdefault(ratio.at["targets"], {})
        of_targets.setdefault(ratio.at["experts"], {})[ratio.at["angle"]] = ratio.value
    for targets, of_targets in curves.items():
        yield f"ratio_over_angle_{targets}", ratio_over_angle(of_targets, targets)


@styled_drawing
def ratio_over_angle(curves: Mapping[int, Mapping[float, float]], targets: str) -> Figure:
    """Draw max ‖w_i*‖ / ‖w*‖ over the angle per E, and over E at the largest angle with 1/√E.

    curves: number of experts E → angle in degrees → ratio.
    """
    figure = create_figure(8.2, 3.8, "Means over draws.")
    over_angle, over_experts = figure.subplots(1, 2)
    numbers = sorted(curves)
    last = max(angle for curve in curves.values() for angle in curve)
    for index, experts in enumerate(numbers):
        angles, ratios = zip(*sorted(curves[experts].items()), strict=True)
        over_angle.plot(angles, ratios, label=f"E = {experts}", **line_style(index))
    over_angle.axhline(1, color=INK, linewidth=0.9, linestyle=":")
    over_angle.set(xlabel="Angle between subspaces in degrees", ylabel="max ‖wᵢ*‖ / ‖w*‖")
    over_angle.set_ylim(0, None)
    over_angle.set_title(f"Linear experts: {TARGETS.get(targets, targets)}")
    over_angle.legend(loc="best")
    promised = [number**-0.5 for number in numbers]
    over_experts.plot(numbers, promised, color=INK, linestyle="--", linewidth=1.2, label="1 / √E")
    measured = [curves[number].get(last, math.nan) for number in numbers]
    style = {"linestyle": "", "marker": "o", "color": PALETTE[0]}
    over_experts.plot(numbers, measured, label=f"at {last:g}°", **style)
    over_experts.set(xscale="log", yscale="log", xlabel="Experts E", ylabel="max ‖wᵢ*‖ / ‖w*‖")
    over_experts.set_xticks(numbers, [str(number) for number in numbers], minor=False)
    over_experts.set_yticks(promised, [f"{value:.2f}" for value in promised], minor=False)
    over_experts.minorticks_off()
    over_experts.legend(loc="upper right")
    return figure


PICTURES = Pictures("lipschitz_theory.linear_experts", figures)
