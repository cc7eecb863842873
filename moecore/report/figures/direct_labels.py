"""Names beside what they name, so that nobody has to look them up in a legend."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from moecore.report.figures.drawing import INK, laid_out

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
    for end, place in zip(at, apart(wanted, LINE / height), strict=True):
        axes.annotate(
            end.name,
            (end.x, end.y),
            xytext=(1.06, place),
            textcoords="axes fraction",
            va="center",
            fontsize=FONT,
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": end.look["color"],
                "linewidth": 0.9,
                "shrinkA": 1,
                "shrinkB": 2,
                "alpha": 0.9,
            },
        )
    axes.set_xlim(right=right)


def apart(wanted: Sequence[float], least: float) -> list[float]:
    """The rising heights moved as little as it takes to lie ``least`` apart, from 0 to 1.

    More than fit there keep their distance, and reach below 0.
    """
    merged: list[list[float]] = []  # groups of names: their middle, and how many they are
    for height in wanted:
        merged.append([height, 1.0])
        while len(merged) > 1 and _overlap(merged[-2], merged[-1], least):
            last = merged.pop()
            first = merged.pop()
            number = first[1] + last[1]
            middle = (first[0] * first[1] + last[0] * last[1]) / number
            merged.append([_inside(middle, number, least), number])
        merged[-1][0] = _inside(merged[-1][0], merged[-1][1], least)
    return [
        middle + (place - (number - 1) / 2) * least
        for middle, number in merged
        for place in range(int(number))
    ]


def _overlap(lower: Sequence[float], upper: Sequence[float], least: float) -> bool:
    return upper[0] - lower[0] < least * (upper[1] + lower[1]) / 2 - 1e-9


def _inside(middle: float, number: float, least: float) -> float:
    """A group's middle so that none of it lies above 1, nor below 0 where there is room."""
    reach = (number - 1) / 2 * least
    return min(1 - reach, max(reach, middle))


def label_points(
    figure: Figure,
    axes: Axes,
    points: Mapping[str, tuple[float, float]],
    whiskers: Callable[[], Sequence[Bbox]],
) -> None:
    """A name near each point, where it covers no other name, no point and no whisker.

    points: name → place in the data; whiskers: their boxes in pixels, once the layout of the figure
    is done, which is done here.
    """
    laid_out(figure)
    taken = whiskers()
    frame = axes.get_window_extent()
    dots: dict[str, Sequence[float]] = {
        name: axes.transData.transform(place).tolist() for name, place in points.items()
    }
    used = [Bbox.from_bounds(x - 6, y - 6, 12, 12) for x, y in dots.values()]
    for name in sorted(points, key=lambda name: -dots[name][1]):
        size = _size(figure, name)
        tried = [Tried(reach, side, size) for reach in REACHES for side in SIDES]
        best = min(tried, key=lambda one: _cost(one.box(dots[name]), one, used, taken, frame))
        box = best.box(dots[name])
        used.append(box)
        _write(axes, name, points[name], (box.x0 - dots[name][0], box.y0 - dots[name][1]), best)


class Tried(NamedTuple):
    """A place for a name."""

    reach: float  # pixels between the point and the name
    side: tuple[int, int]
    size: tuple[float, float]  # of the name in pixels

    def box(self, dot: Sequence[float]) -> Bbox:
        """Where the name of this point would stand."""
        width, height = self.size
        right, up = self.side
        middle_x = dot[0] + right * (self.reach + width / 2)
        middle_y = dot[1] + up * (self.reach + height / 2)
        return Bbox.from_bounds(middle_x - width / 2, middle_y - height / 2, width, height)


def _cost(
    box: Bbox, tried: Tried, used: Sequence[Bbox], taken: Sequence[Bbox], frame: Bbox
) -> float:
    """How bad a place is: names and points count most, then whiskers, then the distance."""
    outside = box.width * box.height - _shared(box, frame)
    covered = sum(_shared(box, other) for other in used)
    crossed = sum(_shared(box, other) for other in taken)
    return 20 * outside + 10 * covered + 3 * crossed + tried.reach


def _shared(first: Bbox, second: Bbox) -> float:
    """The area that two boxes share."""
    overlap = Bbox.intersection(first, second)
    return 0.0 if overlap is None else overlap.width * overlap.height


def _size(figure: Figure, name: str) -> tuple[float, float]:
    """Width and height of a name in pixels."""
    text = figure.text(0, 0, name, fontsize=FONT)
    box = text.get_window_extent()
    text.remove()
    return box.width + 4, box.height + 2


def _write(
    axes: Axes, name: str, place: tuple[float, float], moved: tuple[float, float], tried: Tried
) -> None:
    """The name, and a line from it to its point where it stands far away."""
    scale = 72 / axes.figure.dpi
    offset = ((moved[0] + tried.size[0] / 2) * scale, (moved[1] + tried.size[1] / 2) * scale)
    line = {"arrowstyle": "-", "color": INK, "linewidth": 0.7, "shrinkA": 0, "shrinkB": 4}
    axes.annotate(
        name,
        place,
        xytext=offset,
        textcoords="offset points",
        ha="center",
        va="center",
        fontsize=FONT,
        arrowprops=line if tried.reach > REACHES[1] else None,
    )
