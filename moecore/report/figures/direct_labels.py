"""Names beside what they name, so that nobody has to look them up in a legend."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.transforms import Bbox
from scipy.optimize import isotonic_regression

from moecore.report.figures.drawing import INK, finish_layout

FONT = 9.0
LINE = 0.165  # inches from one name to the next
# Where a point's name may stand: right and left of it, below and above, then further away.
SIDES = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (1, -1), (-1, 1), (-1, -1))
REACHES = (7, 14, 24, 38, 55, 75)  # pixels between a point and its name


class End(NamedTuple):
    """Where a curve ends."""

    name: str
    x: float
    y: float
    look: Mapping[str, object]


def label_ends(axes: Axes, ends: Sequence[End], height: float) -> None:
    """Names to the right of the axes, in the order of the ends, each with a thin line to its own.

    height: of the axes in inches; the limits of the axes are those that they will keep.
    """
    low, high = axes.get_ylim()
    at = sorted(ends, key=lambda end: end.y)
    wanted = [(end.y - low) / (high - low) for end in at]
    right = axes.get_xlim()[1]
    line = {"arrowstyle": "-", "linewidth": 0.9, "shrinkA": 1, "shrinkB": 2, "alpha": 0.9}
    for end, place in zip(at, spread_heights(wanted, LINE / height), strict=True):
        axes.annotate(
            end.name,
            (end.x, end.y),
            xytext=(1.06, place),
            textcoords="axes fraction",
            va="center",
            fontsize=FONT,
            annotation_clip=False,
            arrowprops=line | {"color": end.look["color"]},
        )
    axes.set_xlim(right=right)


def spread_heights(wanted: Sequence[float], least: float) -> np.ndarray:
    """Return the rising heights moved as little as it takes to lie ``least`` apart, from 0 to 1.

    More than fit there keep their distance, and reach below 0.
    """
    steps = least * np.arange(len(wanted))
    return np.clip(isotonic_regression(wanted - steps).x, 0, 1 - steps[-1]) + steps


def label_points(
    figure: Figure,
    axes: Axes,
    points: Mapping[str, tuple[float, float]],
    lines: Sequence[Line2D],
) -> None:
    """A name near each point, where it covers no other name, no point and no line.

    points: name → place in the data; lines: whiskers, and points without names. The layout of the
    figure is done here.
    """
    finish_layout(figure)
    frame = axes.get_window_extent()
    dots = {name: axes.transData.transform(place) for name, place in points.items()}
    taken = [(line.get_window_extent().padded(1), 3) for line in lines]  # box and weight
    taken += [(Bbox.from_bounds(x - 6, y - 6, 12, 12), 10) for x, y in dots.values()]
    for name, dot in sorted(dots.items(), key=lambda named: -named[1][1]):
        size = _size(figure, name)
        places = [
            (reach, candidate_label_bounds(dot, reach, side, size))
            for reach in REACHES
            for side in SIDES
        ]
        reach, box = min(places, key=lambda one: _cost(*one, taken, frame))
        taken.append((box, 10))
        arrow = {"arrowstyle": "-", "color": INK, "linewidth": 0.7, "shrinkA": 0, "shrinkB": 4}
        right, up = (box.get_points().mean(axis=0) - dot) * 72 / figure.dpi
        axes.annotate(
            name,
            points[name],
            xytext=(right, up),
            textcoords="offset points",
            ha="center",
            va="center",
            fontsize=FONT,
            arrowprops=arrow if reach > REACHES[1] else None,
        )


def candidate_label_bounds(
    dot: np.ndarray, reach: float, side: tuple[int, int], size: np.ndarray
) -> Bbox:
    """Return where a name of this size in pixels would stand, ``reach`` from its point."""
    middle = dot + np.array(side) * (reach + size / 2)
    return Bbox([middle - size / 2, middle + size / 2])


def _cost(reach: float, box: Bbox, taken: Sequence[tuple[Bbox, int]], frame: Bbox) -> float:
    """How bad a place is: names and points count most, then whiskers, then the distance."""
    outside = box.width * box.height - _shared(box, frame)
    return 20 * outside + sum(weight * _shared(box, other) for other, weight in taken) + reach


def _shared(first: Bbox, second: Bbox) -> float:
    """The area that two boxes share."""
    overlap = Bbox.intersection(first, second)
    return 0.0 if overlap is None else overlap.width * overlap.height


def _size(figure: Figure, name: str) -> np.ndarray:
    text = figure.text(0, 0, name, fontsize=FONT)
    box = text.get_window_extent()
    text.remove()
    return np.array([box.width + 4, box.height + 2])
