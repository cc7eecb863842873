"""Sweeps over the router's settings, and what the pictures of routing show, in a line each."""

from collections.abc import Callable, Mapping
from operator import attrgetter

import numpy as np

from moecore.measure.cost import Cost
from moecore.measure.exploring.expert_overlay_data import parse_expert_grid
from moecore.measure.routing import Result, RoutingLayer
from moecore.measure.values import Found
from moecore.report.column import (
    Column,
    ColumnContext,
    ColumnPerRow,
    PlannedPhase,
    has_routers,
    has_score_thresholds,
    score_title,
)
from moecore.report.figures.charts import ChartSpec
from moecore.report.measures.result_display import draw_method_curves, items_reader
from moecore.report.page.view import Picture
from moecore.report.tables.number_format import NumberFormat
from moecore.report.typed_results import Phase
from moecore.tasks.base import Score
from moecore.training.outcome import Outcome


def describe_adjacent_patches(first: Mapping[str, Result]) -> str:
    """Say how often patches side by side have the same expert in the last layer.

    first: method → the result whose patches are shown; "" where none are.
    """
    shares = {}
    for method, result in first.items():
        grids = [parse_expert_grid(rows) for layer in result.overlays.grids[-1:] for rows in layer]
        same = [(row[:, 1:] == row[:, :-1]).mean() for row in grids if row.shape[1] > 1]
        if same:
            shares[method] = float(np.mean(same))
    if not shares:
        return ""
    least = min(shares, key=shares.__getitem__)
    most = max(shares, key=shares.__getitem__)
    ends = [f"{100 * shares[one]:.0f} % ({one})" for one in dict.fromkeys((least, most))]
    return f"patches side by side share their expert in {' to '.join(ends)} of the pairs"


def describe_k_effect(scores: Mapping[str, Mapping[float, float]], score: Score) -> str:
    """How far the score moves where fewer or more experts see a token; scores: method → k → it."""
    moved = {
        method: max(by_k.values()) - min(by_k.values())
        for method, by_k in scores.items()
        if len(by_k) > 1
    }
    if not moved:
        return ""
    most = max(moved, key=moved.__getitem__)
    by = NumberFormat(score.form).difference(moved[most]).strip("+±")
    tried = list(scores[most])
    return (
        f"{score_title(score)} moves by up to {by} ({most}) from k = {tried[0]:g} to {tried[-1]:g}"
    )


def describe_strongest_preference(first: Mapping[str, Outcome]) -> str:
    """The class and the expert that belong together most, in the last MoE layer and epoch."""
    most = (0.0, "")
    for method, result in first.items():
        for layers in list(result.class_maps.values())[-1:]:
            maps = np.array([of_class[-1] for of_class in layers], dtype=float)
            if np.isfinite(maps).any():
                label, expert = np.unravel_index(np.nanargmax(maps), maps.shape)
                words = f"{result.task.classes[label]} for expert {expert} of {method}"
                most = max(most, (float(maps[label, expert]), words))
    share, words = most
    if not words:
        return ""
    return f"the strongest preference is that of {words} ({100 * share:.0f} % of its probability)"


FIGURES = {"threshold": "S3", "k": "S5"}  # of ERMoE's supplement


def draw_all_sweeps(phase: Phase) -> list[Picture]:
    """Small curves over the threshold and over k at test time (ERMoE, figures S3 and S5)."""
    score = phase.task.score
    share = score.form == "share"
    panels = (
        ("threshold", "fallback", "Fallback", True),
        ("threshold", "tail_mass", "Tail mass", False),
        ("threshold", "score", score_title(score), share),
        ("threshold", "load_cv2", "Load CV²", False),
        ("k", "score", score_title(score), share),
        ("k", "tail_mass", "Tail mass", False),
        ("k", "load_cv2", "Load CV²", False),
    )
    drawn = [picture for panel in panels for picture in draw_sweep(phase, *panel)]
    look = ChartSpec(
        "Step time over k", "Experts per token k", "Time of a batch / that of k = 1", height=3.2
    )
    words = "Forward passes of this machine (ERMoE, figure S5)."
    return drawn + draw_method_curves(phase, Cost, time_relative_to_top_1, look, words)


def draw_sweep(phase: Phase, setting: str, name: str, label: str, share: bool) -> list[Picture]:
    """One value over one setting, a line per method; [] where no model was swept."""
    words = {"threshold": ("the threshold", "Threshold T"), "k": ("k", "Experts per token k")}
    over_what, axis = words[setting]
    look = ChartSpec(f"{label} over {over_what}", axis, label, share, height=3.2)
    what = f"Trained weights, another setting at test time (ERMoE, figure {FIGURES[setting]})."
    return draw_method_curves(
        phase, Result, lambda one: swept_values(one, setting, name), look, what
    )


def time_relative_to_top_1(result: Found) -> dict[float, float]:
    """k → the time of a batch, as a multiple of that with one expert per token."""
    times = result.curve("batch_ms", "k")
    return {k: time / times[1] for k, time in times.items()} if 1 in times else {}


def swept_values(result: Result, setting: str, name: str) -> dict[float, float]:
    """The setting → a value; without the points that have none."""
    rows = sorted(getattr(result.sweeps, setting), key=lambda row: getattr(row, setting))
    values = {getattr(row, setting): getattr(row, name) for row in rows}
    return {x: value for x, value in values.items() if value is not None}


def swept_columns(
    setting: str, name: str, label: str, better: str, form: str, is_monotone: bool = False
) -> ColumnPerRow:
    """A value at each setting that was tried: a claim compares it as any other column.

    is_monotone: the value can only rise, or only fall, with the setting.
    """
    symbol = {"threshold": "T", "k": "k"}[setting]

    def values(result: Result) -> dict[str, tuple[float, float]]:
        points = swept_values(result, setting, name)
        return {setting_slug(tried): (tried, value) for tried, value in points.items()}

    column = Column(
        f"{name}_{setting}_{{}}",
        f"{label}, {symbol}\u00a0=\u00a0{{}}",
        lambda point: point[1],
        better,
        form,
        f"trained weights with {symbol} = {{}} at test time (figure {FIGURES[setting]})",
        "ermoe",
        detail=True,
        curve=f"{name}_{setting}" if is_monotone else "",
        is_expected=has_score_thresholds if setting == "threshold" else has_routers,
    )
    foreseen = lambda ahead: map(setting_slug, getattr(ahead.study.routing.sweeps, setting))
    return ColumnPerRow(values, column, foreseen, lambda key, point: [f"{point[0]:g}"])


def setting_slug(tried: float) -> str:
    """A setting inside the name of a column: 0_5."""
    return f"{tried:g}".replace(".", "_")


TRAINED_THRESHOLD = 0.5  # T of figure S3, where its curve is said to bend


def fallback_threshold_slope_columns() -> list[Column]:
    """Return how fast the fallback rises on either side of the trained threshold (figure S3)."""

    def slope(result: Result, above: bool) -> float | None:
        points = swept_values(result, "threshold", "fallback")
        ends = [min(points, default=0.0), max(points, default=0.0)]
        other = ends[above]
        if TRAINED_THRESHOLD not in points or other == TRAINED_THRESHOLD:
            return None
        rise = points[other] - points[TRAINED_THRESHOLD]
        return rise / (other - TRAINED_THRESHOLD)

    at = f"T\u00a0=\u00a0{TRAINED_THRESHOLD:g}"
    return [
        Column(
            f"fallback_slope_{side}",
            f"Fallback, slope {side} {at}",
            lambda result, above=side == "above": slope(result, above),
            note=f"more fallback for T higher by 1: from {at} to the {end} T tried (figure S3)",
            paper="ermoe",
            detail=True,
            is_expected=has_score_thresholds,
        )
        for side, end in (("below", "lowest"), ("above", "highest"))
    ]


def layers_of(result: Result) -> dict[str, RoutingLayer]:
    return {str(place): layer for place, layer in enumerate(result.layers, 1)}


def layer_columns(
    name: str,
    label: str,
    better: str,
    form: str,
    note: str,
    paper: str,
    detail: bool = True,
    field: str = "",
    is_expected: Callable[[PlannedPhase], bool] = lambda ahead: True,
) -> ColumnPerRow:
    """A column for each MoE layer that has the value, from 1; field: of it, if not its name."""
    column = Column(
        f"{name}_layer_{{}}",
        f"{label}, MoE {{}}",
        attrgetter(field or name),
        better,
        form,
        f"{note}; MoE layer {{}}",
        paper,
        items=items_reader(name),
        detail=detail,
        is_expected=is_expected,
    )
    return ColumnPerRow(layers_of, column, lambda ahead: map(str, ahead.layers))


def score_over_k_columns(seen: ColumnContext) -> list[Column]:
    score = seen.task.score
    return swept_columns("k", "score", score_title(score), score.better, score.form).columns(seen)


def planned_score_names(ahead: PlannedPhase) -> list[str]:
    return [f"score_k_{value}" for value in ahead.study.routing.sweeps.k]


def draw_teacher_agreement(phase: Phase) -> list[Picture]:
    """Agreement with the teacher over the MoE layers, a line per method (TGR, table 7)."""

    def shares(result: Result) -> dict[float, float | None]:
        return {place: layer.teacher_agreement for place, layer in enumerate(result.layers, 1)}

    look = ChartSpec("Agreement with the teacher", "MoE layer", "Tokens", True, 1.02, 3.2)
    words = "Tokens whose first expert is the teacher's (TGR, table 7)."
    return draw_method_curves(phase, Result, shares, look, words, "teacher's agreement")
