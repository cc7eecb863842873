"""Reliability diagrams of classes, before and after calibration."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from moecore.measure.calibration import ClassCalibration
from moecore.measure.values import Found
from moecore.report.figures import drawing
from moecore.report.figures.drawing import Figure
from moecore.report.page.page_objects import Block, Picture
from moecore.report.results import Figures, Pictures
from moecore.report.study_results import Phase


def figures(result: Found) -> Figures:
    yield "reliability", reliability_diagram(result.facts["bins"], "Reliability")


def phase_blocks(phase: Phase) -> Iterator[Block]:
    """Yield a block with the reliability diagrams before and after calibration, all methods."""
    first = phase.first(ClassCalibration)
    temperatures = [
        f"{method} {value.value:.2f}" + (" (at its limit)" if result.facts["at_limit"] else "")
        for method, result in first.items()
        if (value := result.find("temperature"))
    ]
    captions = {
        "before": "A point is a bin of confidence; its area grows with the number of images.",
        "after": f"Temperatures: {', '.join(temperatures)}." if temperatures else "",
    }
    pictures = []
    for when, caption in captions.items():
        bins = {method: result.facts["bins"][when] for method, result in first.items()}
        title = f"Reliability {when} calibration"
        chart = reliability_diagram(bins, title)
        pictures.append(Picture(chart, f"{phase.name}: {title}", caption + phase.first_seed))
    yield Block("Calibration", pictures=pictures, about="ece_after")


@drawing.styled_drawing
def reliability_diagram(curves: Mapping[str, Mapping[str, Any]], title: str) -> Figure:
    """Draw accuracy against confidence in bins; curves: label → ``ReliabilityBins`` as JSON."""
    from matplotlib.collections import PathCollection

    figure = drawing.empty_figure(4.8, 4.2)
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], color=drawing.GUIDE, linewidth=1, linestyle=":", label="calibrated")
    for index, (label, bins) in enumerate(curves.items()):
        points = np.array([bins[name] for name in ("confidence", "accuracy", "count")], dtype=float)
        x, y, counts = points[:, np.isfinite(points).all(axis=0)]
        line = drawing.line_look(index)
        axes.plot(x, y, color=line["color"], linestyle=line["linestyle"], linewidth=1.2)
        areas = 14 + 180 * np.sqrt(counts / max(1, counts.sum()))
        style = {"color": line["color"], "marker": line["marker"], "alpha": 0.75, "linewidths": 0}
        axes.scatter(x, y, s=areas, label=label, **style)
    axes.set(xlabel="Confidence", title=title, xlim=(0, 1.02), ylim=(0, 1.02))
    drawing.set_percent_axis(axes, "Accuracy")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    for handle in drawing.add_legend_below(figure, axes).legend_handles:
        if isinstance(handle, PathCollection):
            handle.set_sizes([30])
    return figure


FITS = lambda task: task.needs_classes("label_smoothing") is None
PICTURES = Pictures(
    "calibrate", figures, is_on_page=False, more=phase_blocks, kind=ClassCalibration, applies=FITS
)
