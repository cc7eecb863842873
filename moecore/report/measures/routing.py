"""Which experts tokens choose: balance, agreement of views, eligibility, sureness."""

from collections.abc import Iterator
from functools import partial
from operator import attrgetter

from moecore.measure.routing import Result
from moecore.measure.routing_metrics.two_view_agreement import AugmentedRow
from moecore.measure.routing_metrics.two_view_augmentations import look_up_augmentation
from moecore.measure.values import place_slug
from moecore.report.column import (
    SCORE,
    Column,
    ColumnPerRow,
    Columns,
    ContextDependentColumns,
    PlannedPhase,
    has_guided_routers,
    has_score_thresholds,
    mean_or_none,
)
from moecore.report.figures.expert_figures import (
    draw_patch_correspondence,
    expert_load,
    expert_overlays,
)
from moecore.report.measures.result_display import Figures, Shown, items_reader, pictures_by_name
from moecore.report.measures.routing_sweeps import (
    describe_adjacent_patches,
    describe_k_effect,
    draw_all_sweeps,
    draw_teacher_agreement,
    fallback_threshold_slope_columns,
    layer_columns,
    planned_score_names,
    score_over_k_columns,
    swept_columns,
    swept_values,
)
from moecore.report.page.view import Block, Picture
from moecore.report.typed_results import Phase, list_without_none
from moecore.statistics.intervals import Interval

MATCHES = {
    "match_top1": ("first expert", "same first expert"),
    "match_top2_ordered": ("top 2 in order", "same first and second"),
    "match_top2_sets": ("top 2 as sets", "same two experts"),
}
SURE = {
    "highest": ("Highest probability", "higher", "of a token, mean over tokens and layers"),
    "second": ("Second probability", "", ""),
    "others": ("Sum of the others", "lower", "probability outside the best two"),
}


def routing_column(
    name: str, label: str, better: str = "", form: str = "number", note: str = "", paper: str = ""
) -> Column:
    """A number that the result has under the column's own name."""
    read = attrgetter(name)
    return Column(name, label, read, better, form, note, paper, items=items_reader(name))


def router_confidence_column(place: str) -> Column:
    """The highest, the second or the sum of the other probabilities of a token."""
    label, better, note = SURE[place]

    def read(result: Result) -> float | None:
        return mean_or_none([getattr(layer.confidence, place) for layer in result.layers])

    name = f"confidence_{place}"
    return Column(name, label, read, better, note=note, paper="prc", items=items_reader(name))


def confidence_layer_columns(place: str) -> ColumnPerRow:
    """Return the same of each MoE layer."""
    label, better, _ = SURE[place]
    texts = (label, better, "number", "of a token, mean over tokens", "prc")
    return layer_columns(f"confidence_{place}", *texts, field=f"confidence.{place}")


def match_columns(match: str) -> ColumnPerRow:
    """A match of two views under each recorded augmentation (PRC, table 4)."""
    column = Column(
        f"{match}_{{}}",
        f"Match, {MATCHES[match][0]}: {{}}",
        lambda row: Interval(*(getattr(row, f"{match}{end}") for end in ("", "_low", "_high"))),
        "higher",
        "share",
        paper="prc",
        items=items_reader(match),
        detail=True,
    )
    return ColumnPerRow(
        rows_by_augmentation, column, planned_augmentations, lambda key, row: [row.name]
    )


def rows_by_augmentation(result: Result) -> dict[str, AugmentedRow]:
    return {place_slug(row.name): row for row in result.augmentations}


def planned_augmentations(ahead: PlannedPhase) -> list[str]:
    """Return those that are asked for; a text has none."""
    if ahead.score == "nats":
        return []
    volumes = ahead.score == "mae"
    asked = [look_up_augmentation(one, volumes) for one in ahead.study.routing.augmentations]
    return [place_slug(one.name) for one in asked]


PLACES = {
    "border": "on the border of the map of experts, corners included",
    "corner": "in the corners of the map of experts",
    "inner": "inside the map of experts; none where a side has two experts at most: all border",
}
SHARES = {
    "load": ("Load", "share of the choices"),
    "mass": ("Mass", "share of the probability"),
    "cells": ("Cells", "share of the experts that lie"),
}


def map_region_columns(place: str) -> list[Columns]:
    """Load and mass of a part of the map, beside the share of experts that lie there (MoGE)."""
    columns: list[Columns] = []
    for share, (word, what) in SHARES.items():
        words = (f"{place}_{share}", f"{word}, {place}", "", "share", f"{what} {PLACES[place]}")
        column = routing_column(*words, "moge")
        columns.append(column._replace(is_fixed=share == "cells"))
        if share != "cells":
            columns.append(layer_columns(*words, "moge"))
    return columns


TEACHER = ("teacher_agreement", "Agreement with teacher", "", "share")
AGREED = "tokens that agree on the first expert"
ermoe_column = partial(routing_column, paper="ermoe")
tgr_column = partial(routing_column, paper="tgr")


def threshold_column(name: str, label: str, better: str, form: str, note: str) -> Column:
    """A number of routers whose scores must exceed a threshold."""
    column = ermoe_column(name, label, better, form, note)
    return column._replace(is_expected=has_score_thresholds)


COLUMNS = (
    *(
        routing_column(
            match, f"Match, {words}", "higher", "share", f"{same} in two augmented views", "prc"
        )
        for match, (words, same) in MATCHES.items()
    ),
    routing_column(
        "switch_fraction",
        "Switch fraction",
        "lower",
        "share",
        "experts of a patch that it had not in another augmented view; 1 − k/E by chance",
    ),
    *(router_confidence_column(place) for place in SURE),
    *(match_columns(match) for match in MATCHES),
    *(
        layer_columns(match, f"Match, {words}", "higher", "share", same, "prc")
        for match, (words, same) in MATCHES.items()
    ),
    *(confidence_layer_columns(place) for place in SURE),
    ermoe_column(
        "load_cv2",
        "Load CV²",
        "lower",
        note="variance / mean² of the tokens per expert, mean over layers",
    ),
    routing_column(
        "max_violation",
        "MaxVio",
        "lower",
        note="load of the most used expert over the mean load − 1, mean over layers",
    ),
    routing_column(
        "dead", "Dead experts", "lower", "share", "experts with under 1 % of the mean load"
    ),
    routing_column(
        "experts_per_token", "Experts a token", note="chosen before capacity, mean over layers"
    ),
    routing_column(
        "unrouted", "Unrouted", "", "share", "tokens that chose no expert, mean over layers"
    ),
    threshold_column(
        "fallback", "Fallback", "lower", "share", "tokens with no expert above the threshold"
    ),
    threshold_column(
        "below_k",
        "Fewer than k",
        "",
        "share",
        "tokens with fewer than k experts above the threshold",
    ),
    threshold_column(
        "tail_mass",
        "Tail mass",
        "lower",
        "number",
        "weight above the threshold but outside the best k",
    ),
    ermoe_column(
        "tail_of_probs", "Tail of the probabilities", note="probability outside the best k"
    ),
    tgr_column(*TEACHER, f"{AGREED}; mean over layers")._replace(is_expected=has_guided_routers),
    layer_columns(*TEACHER, AGREED, "tgr", detail=False, is_expected=has_guided_routers),
    tgr_column(
        "entropy",
        "Expert entropy",
        "higher",
        note="normalised entropy of expert use, mean over layers",
    ),
    tgr_column(
        "token_entropy", "Token entropy", note="nats, of a token's probabilities; mean over layers"
    ),
    *(column for place in PLACES for column in map_region_columns(place)),
    swept_columns("threshold", "fallback", "Fallback", "lower", "share", is_monotone=True),
    *fallback_threshold_slope_columns(),
    swept_columns("k", "tail_mass", "Tail mass", "lower", "number", is_monotone=True),
    ContextDependentColumns(score_over_k_columns, planned_score_names, SCORE, SCORE),
)


def figures(result: Result) -> Figures:
    if result.layers:
        yield "expert_load", expert_load([layer.load for layer in result.layers])
    if result.overlays.shape[0] and result.overlays.grids:
        yield "expert_overlays", expert_overlays(result.overlays)


def phase_blocks(phase: Phase) -> Iterator[Block]:
    """Load and patches of the methods with MoE layers, then other settings of their routers."""
    drawn = pictures_by_name(phase, Result, figures)
    loads = drawn["expert_load"]
    yield Block("Load of the experts", pictures=loads, about="load_cv2")
    patches = drawn["expert_overlays"]
    yield Block(
        "Which expert sees which patch",
        pictures=patches,
        finding=describe_adjacent_patches(phase.first(Result)),
    )
    pairs = list_without_none(result.corresponding for result in phase.results(Result))
    crops = [  # the same for every method
        Picture(figure, f"{phase.name}: corresponding patches", getattr(figure, "caption", ""))
        for figure in map(draw_patch_correspondence, pairs[:1])
    ]
    yield Block("Corresponding patches", pictures=crops, about="match_top1")
    yield Block(
        "Agreement with the teacher by layer",
        pictures=draw_teacher_agreement(phase),
        about="teacher_agreement",
    )
    yield Block(
        "Other thresholds and other k at test time",
        pictures=draw_all_sweeps(phase),
        finding=describe_k_effect(
            {
                method: swept_values(result, "k", "score")
                for method, result in phase.first(Result).items()
            },
            phase.task.score,
        ),
    )


SHOWN = Shown("routing", "routing", Result, COLUMNS, figures, phase_blocks, place=5)
