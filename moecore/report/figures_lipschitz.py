"""Figures of the theory studies: Lemma 1 at a model's tokens, and linear experts over the angle of their data."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from moecore.report.style import INK, PALETTE, legend_of, line_look, new_figure, styled

TARGETS = {"shared": "every expert learns the same", "opposed": "neighbours learn opposites", "drawn": "experts learn independent things"}


@styled
def lemma_terms(layers: Sequence[tuple[Sequence[float], Sequence[float], Sequence[float]]]) -> Figure:
    """One point a token and MoE layer: the lemma's bound against what it bounds (on or below the diagonal), and against the router's term alone.

    layers: for each MoE layer the bound, ‖∇f‖₂ and the router's term of every token.
    """
    figure = new_figure(7.6, 3.6)
    axes = figure.subplots(1, 2)
    highest = max(max(bound) for bound, _, _ in layers)
    for column, name in enumerate(("‖∇f(x)‖₂", "router term of the bound")):
        axes[column].plot([0, highest], [0, highest], color=INK, linewidth=0.9, linestyle=":", label="the bound")
        for index, layer in enumerate(layers):
            axes[column].scatter(layer[0], layer[1 + column], s=9, alpha=0.6, color=PALETTE[index % 7], label=f"MoE {index + 1}")
        axes[column].set(xlabel="Lemma 1's bound", ylabel=name, xlim=(0, None), ylim=(0, None))
    axes[0].set_title("Lemma 1 at real tokens")
    legend_of(figure, axes[0], "upper left")
    return figure


@styled
def ratio_over_angle(rows: Sequence[Mapping[str, Any]], targets: str) -> Figure:
    """max ‖w_i*‖ / ‖w*‖ over the angle for each E, and over E at the largest angle beside 1/√E.

    rows: experts, angle, ratio (an Interval) of one kind of targets; a ratio that is infinite is not drawn.
    """
    figure = new_figure(8.2, 3.8)
    left, right = figure.subplots(1, 2)
    numbers, last = sorted({row["experts"] for row in rows}), max(row["angle"] for row in rows)
    for index, experts in enumerate(numbers):
        own = sorted((row for row in rows if row["experts"] == experts), key=lambda row: row["angle"])
        left.plot([row["angle"] for row in own], [row["ratio"].value for row in own], label=f"E = {experts}", **line_look(index))
    left.axhline(1, color=INK, linewidth=0.9, linestyle=":")
    left.set(xlabel="Angle between subspaces in degrees", ylabel="max ‖wᵢ*‖ / ‖w*‖", ylim=(0, None))
    left.set_title(f"Linear experts: {TARGETS.get(targets, targets)}")
    legend_of(figure, left, "best")
    ends = {row["experts"]: row["ratio"].value for row in rows if row["angle"] == last}
    right.plot(numbers, [number**-0.5 for number in numbers], color=INK, linestyle="--", linewidth=1.2, label="1 / √E")
    right.plot(numbers, [ends[number] for number in numbers], linestyle="", marker="o", color=PALETTE[0], label=f"at {last:g}°")
    right.set(xscale="log", yscale="log", xlabel="Experts E", ylabel="max ‖wᵢ*‖ / ‖w*‖")
    right.set_xticks(numbers, [str(number) for number in numbers], minor=False)
    right.set_yticks([number**-0.5 for number in numbers], [f"{number**-0.5:.2f}" for number in numbers], minor=False)
    right.minorticks_off()
    legend_of(figure, right, "upper right")
    return figure
