"""The load of each expert over the steps of a training; drawn without torch, as imports need it."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from moecore.report.figures.drawing import empty_figure, styled_drawing
from moecore.training.monitor import RoutingPoint

LARGEST_LOAD = 3.0  # times an even share, from which on colours do not change


@styled_drawing
def draw_load_over_steps(points: Sequence[RoutingPoint]) -> Figure:
    """Draw how many times an even share each expert had, over the steps, layer by layer."""
    names = list(points[0].layers)
    caption = "Load of each expert, 1: an even share. As the training counted it."
    figure = empty_figure(6.4, 0.6 + 1.3 * len(names), caption, raster=True)
    panels = figure.subplots(len(names), 1, sharex=True, squeeze=False)[:, 0]
    ends = [point.step for point in points]
    edges = [0, *ends]
    for axes, name in zip(panels, names, strict=True):
        loads = np.array([point.layers[name].load for point in points]).T
        experts = np.arange(len(loads) + 1) - 0.5
        look = {"cmap": "cividis", "vmin": 0, "vmax": LARGEST_LOAD}
        mesh = axes.pcolormesh(edges, experts, loads * len(loads), **look)
        axes.grid(visible=False)
        axes.set_ylabel(name)
    panels[0].set_title("Expert load")
    panels[-1].set_xlabel("Step")
    figure.colorbar(mesh, ax=panels, label="× even share")
    return figure
