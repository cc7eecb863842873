"""Linear experts over the angle of their data: theorems 1 and 2 on drawn data."""

from collections.abc import Iterator

from matplotlib.figure import Figure

from moecore.measure.linear_experts import LipschitzRatioRow, Result
from moecore.report.figures.drawing import INK, PALETTE, empty_figure, line_look, styled_drawing
from moecore.report.measures.result_display import Figures
from moecore.report.page.view import Block, Picture

TARGETS = {
    "shared": "every expert learns the same",
    "opposed": "neighbours learn opposites",
    "drawn": "experts learn independent things",
}


def figures(result: Result) -> Figures:
    for targets in dict.fromkeys(row.targets for row in result.theorem_1):
        rows = [row for row in result.theorem_1 if row.targets == targets]
        yield f"ratio_over_angle_{targets}", ratio_over_angle(rows, targets)


def theorem_failure_blocks(result: Result) -> Iterator[Block]:
    """What was drawn, and how often the theorems failed."""
    words = [
        f"{result.draws} draws of data for linear experts, without any trained model. Theorem 1 "
        f"fails {result.violations} times. Theorem 2 promises something {result.theorem_2_promises}"
        f" times and fails {result.theorem_2_violations} times."
    ]
    drawn = [Picture(figure, name.replace("_", " ")) for name, figure in figures(result)]
    yield Block("The experts' Lipschitz constant over the dense model's", words, pictures=drawn)


@styled_drawing
def ratio_over_angle(rows: list[LipschitzRatioRow], targets: str) -> Figure:
    """max ‖w_i*‖ / ‖w*‖ over the angle for each E, and over E at the largest angle beside 1/√E.

    rows: of one kind of targets; a ratio that is infinite is not drawn.
    """
    figure = empty_figure(8.2, 3.8, "Means over draws.")
    left, right = figure.subplots(1, 2)
    numbers = sorted({row.experts for row in rows})
    last = max(row.angle for row in rows)
    for index, experts in enumerate(numbers):
        own = sorted((row for row in rows if row.experts == experts), key=lambda row: row.angle)
        angles = [row.angle for row in own]
        ratios = [row.ratio.value for row in own]
        left.plot(angles, ratios, label=f"E = {experts}", **line_look(index))
    left.axhline(1, color=INK, linewidth=0.9, linestyle=":")
    left.set(xlabel="Angle between subspaces in degrees", ylabel="max ‖wᵢ*‖ / ‖w*‖", ylim=(0, None))
    left.set_title(f"Linear experts: {TARGETS.get(targets, targets)}")
    left.legend(loc="best")
    ends = {row.experts: row.ratio.value for row in rows if row.angle == last}
    promised = [number**-0.5 for number in numbers]
    right.plot(numbers, promised, color=INK, linestyle="--", linewidth=1.2, label="1 / √E")
    measured = [ends[number] for number in numbers]
    look = {"linestyle": "", "marker": "o", "color": PALETTE[0]}
    right.plot(numbers, measured, label=f"at {last:g}°", **look)
    right.set(xscale="log", yscale="log", xlabel="Experts E", ylabel="max ‖wᵢ*‖ / ‖w*‖")
    right.set_xticks(numbers, [str(number) for number in numbers], minor=False)
    right.set_yticks(promised, [f"{value:.2f}" for value in promised], minor=False)
    right.minorticks_off()
    right.legend(loc="upper right")
    return figure
