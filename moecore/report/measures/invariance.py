"""How far the routing of a moved image lies from that of the image (MoGE, table 1 and figure 2)."""

from collections.abc import Callable

import numpy as np

from moecore.data.views.transforms import TRANSFORMS
from moecore.measure.invariance import Result
from moecore.report.column import Column, Each, mean, mean_items, named, opened, slug
from moecore.report.maps import expert_maps
from moecore.report.shown import Figures
from moecore.statistics.intervals import Interval

NOTE = "image Euclidean distance of the routers' outputs, plain and transformed"


def moved(name: str, result: Result) -> Column:
    """IMED under one transform."""
    return Column(
        f"imed_{slug(name)}",
        f"IMED, {name}",
        distance_under(name),
        "lower",
        note=NOTE,
        paper="moge",
        items=items_under(name),
    )


def items_under(name: str) -> Callable[[Result], np.ndarray | None]:
    def read(result: Result) -> np.ndarray | None:
        row = named(result.transforms).get(name)
        return None if row is None else opened(row.items)

    return read


def distance_under(name: str):
    def read(result: Result) -> Interval | None:
        row = named(result.transforms).get(name)
        return None if row is None else Interval(row.d, row.d_low, row.d_high)

    return read


COLUMNS = (
    Column(
        "imed",
        "IMED, mean",
        lambda result: mean([row.d for row in result.transforms]),
        "lower",
        note=f"{NOTE}; mean over transforms",
        paper="moge",
        items=lambda result: mean_items([row.items for row in result.transforms]),
    ),
    Each(
        lambda result: [row.name for row in result.transforms],
        moved,
        lambda ahead: [f"imed_{slug(name)}" for name in TRANSFORMS],
    ),
)


def figures(result: Result) -> Figures:
    """The mean routing of each class, a row a MoE layer."""
    if not result.class_maps:
        return
    layers = len(result.class_maps[0])
    rows = {
        f"MoE {layer + 1}": [of_class[layer] for of_class in result.class_maps]
        for layer in range(layers)
    }
    yield "class_maps", expert_maps(rows, result.classes)
