"""How far the routing of a moved image lies from that of the image (MoGE, table 1 and figure 2)."""

from collections.abc import Callable

import numpy as np

from moecore.data.views.transforms import TRANSFORMS
from moecore.measure.invariance import Result
from moecore.report.column import (
    Column,
    Each,
    column_slug,
    decode_items,
    mean_items,
    mean_or_none,
    rows_by_name,
)
from moecore.report.figures.expert_maps import expert_maps
from moecore.report.measured import drop_none
from moecore.report.measures.shown import Figures
from moecore.statistics.intervals import Interval

NOTE = "image Euclidean distance of the routers' outputs, plain and transformed"
NORMALISED = "IMED under a transform / mean IMED between different images; flat routing has no gain"
AGREEMENT = "tokens whose first expert is the same in the image and its transformed version"


def moved(name: str, result: Result) -> Column:
    """IMED under one transform."""
    return Column(
        f"imed_{column_slug(name)}",
        f"IMED, {name}",
        distance_under(name),
        "lower",
        note=NOTE,
        paper="moge",
        items=items_under(name),
    )


def items_under(name: str) -> Callable[[Result], np.ndarray | None]:
    def read(result: Result) -> np.ndarray | None:
        row = rows_by_name(result.transforms).get(name)
        return None if row is None else decode_items(row.items)

    return read


def distance_under(name: str):
    def read(result: Result) -> Interval | None:
        row = rows_by_name(result.transforms).get(name)
        return None if row is None else Interval(row.d, row.d_low, row.d_high)

    return read


def normalised(name: str, result: Result) -> Column:
    """IMED under one transform, as a share of that between different images."""

    def read(result: Result) -> Interval | None:
        row = rows_by_name(result.transforms).get(name)
        if row is None or row.normalised is None:
            return None
        return Interval(row.normalised, row.normalised_low, row.normalised_high)

    key = f"imed_normalised_{column_slug(name)}"
    label = f"IMED, normalised, {name}"
    return Column(key, label, read, "lower", note=NORMALISED, paper="moge", detail=True)


def agreeing(name: str, result: Result) -> Column:
    """Top-1 agreement under one transform."""

    def read(result: Result) -> float | None:
        row = rows_by_name(result.transforms).get(name)
        return None if row is None else row.agreement

    return Column(
        f"agreement_transformed_{column_slug(name)}",
        f"Agreement, {name}",
        read,
        "higher",
        "share",
        AGREEMENT,
        "moge",
        detail=True,
    )


def mean_normalised(result: Result) -> float | None:
    """Over the transforms; None where different images are routed alike."""
    return mean_or_none(drop_none(row.normalised for row in result.transforms))


def names_of(result: Result) -> list[str]:
    """The transforms."""
    return [row.name for row in result.transforms]


def slugs() -> list[str]:
    """The transforms as names of columns have them."""
    return [column_slug(name) for name in TRANSFORMS]


COLUMNS = (
    Column(
        "imed",
        "IMED, mean",
        lambda result: mean_or_none([row.d for row in result.transforms]),
        "lower",
        note=f"{NOTE}; mean over transforms",
        paper="moge",
        items=lambda result: mean_items([row.items for row in result.transforms]),
    ),
    Each(names_of, moved, lambda ahead: [f"imed_{one}" for one in slugs()]),
    Column(
        "imed_normalised",
        "IMED, normalised",
        mean_normalised,
        "lower",
        note=f"{NORMALISED}; mean over transforms",
        paper="moge",
    ),
    Column(
        "agreement_transformed",
        "Agreement, transformed",
        lambda result: mean_or_none([row.agreement for row in result.transforms]),
        "higher",
        "share",
        f"{AGREEMENT}; mean over transforms",
        "moge",
    ),
    Each(names_of, normalised, lambda ahead: [f"imed_normalised_{one}" for one in slugs()]),
    Each(
        names_of,
        agreeing,
        lambda ahead: [f"agreement_transformed_{one}" for one in slugs()],
        "share",
    ),
)


def figures(result: Result) -> Figures:
    """The mean routing of each class, a row per MoE layer."""
    if not result.class_maps:
        return
    layers = len(result.class_maps[0])
    rows = {
        f"MoE {layer + 1}": [of_class[layer] for of_class in result.class_maps]
        for layer in range(layers)
    }
    yield "class_maps", expert_maps(rows, result.classes)
