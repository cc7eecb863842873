"""How far the routing of a moved image lies from that of the image (MoGE, table 1 and figure 2)."""

from moecore.data.views.invariance_transforms import TRANSFORMS
from moecore.measure.invariance import MovedRow, Result
from moecore.report.column import (
    Column,
    ColumnPerRow,
    column_slug,
    decode_items,
    itemwise_mean,
    mean_or_none,
)
from moecore.report.figures.expert_figures import draw_expert_grids_by_class
from moecore.report.measures.result_display import Figures, Shown
from moecore.report.typed_results import list_without_none
from moecore.statistics.intervals import Interval

NOTE = "image Euclidean distance of the routers' outputs, plain and transformed"
NORMALISED = "IMED under a transform / mean IMED between different images; flat routing has no gain"
AGREEMENT = "tokens whose first expert is the same in the image and its transformed version"


def transforms_of(result: Result) -> dict[str, MovedRow]:
    return {column_slug(row.name): row for row in result.transforms}


def columns_per_transform(column: Column) -> ColumnPerRow:
    slugs = [column_slug(name) for name in TRANSFORMS]
    return ColumnPerRow(transforms_of, column, lambda ahead: slugs, lambda key, row: [row.name])


def normalised_imed(row: MovedRow) -> Interval | None:
    """IMED as a share of that between different images; None where these are routed alike."""
    if row.normalised is None:
        return None
    return Interval(row.normalised, row.normalised_low, row.normalised_high)


COLUMNS = (
    Column(
        "imed",
        "IMED, mean",
        lambda result: mean_or_none([row.d for row in result.transforms]),
        "lower",
        note=f"{NOTE}; mean over transforms",
        paper="moge",
        items=lambda result: itemwise_mean([row.items for row in result.transforms]),
    ),
    columns_per_transform(
        Column(
            "imed_{}",
            "IMED, {}",
            lambda row: Interval(row.d, row.d_low, row.d_high),
            "lower",
            note=NOTE,
            paper="moge",
            items=lambda row: decode_items(row.items),
        )
    ),
    Column(
        "imed_normalised",
        "IMED, normalised",
        lambda result: mean_or_none(list_without_none(row.normalised for row in result.transforms)),
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
    columns_per_transform(
        Column(
            "imed_normalised_{}",
            "IMED, normalised, {}",
            normalised_imed,
            "lower",
            note=NORMALISED,
            paper="moge",
            detail=True,
        )
    ),
    columns_per_transform(
        Column(
            "agreement_transformed_{}",
            "Agreement, {}",
            lambda row: row.agreement,
            "higher",
            "share",
            AGREEMENT,
            "moge",
            detail=True,
        )
    ),
)


def figures(result: Result) -> Figures:
    """The mean routing of each class, a row per MoE layer."""
    by_layer = enumerate(zip(*result.class_maps, strict=True), 1)
    if rows := {f"MoE {layer}": maps for layer, maps in by_layer}:
        yield "class_maps", draw_expert_grids_by_class(rows, result.classes)


SHOWN = Shown("invariance", "invariance", Result, COLUMNS, figures, place=6)
