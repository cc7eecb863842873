"""The score over the experts left, of models that were pruned and merged without training."""

from collections.abc import Iterator

from moecore.measure.fewer_experts import FewerExperts, ReducedScore, Result
from moecore.report.column import (
    SCORE,
    Column,
    ColumnContext,
    ContextDependentColumns,
    PlannedPhase,
    decode_items,
    score_interval_kind,
    score_slug,
    score_title,
    unit_suffix,
)
from moecore.report.figures.charts import ChartSpec
from moecore.report.measures.result_display import (
    Shown,
    draw_method_curves,
    path_reader,
)
from moecore.report.page.view import Block
from moecore.report.typed_results import Phase
from moecore.tasks.base import Task

read_score, read_items = path_reader("score"), path_reader("items")
TITLES = {"reap": "Pruned by REAP's score", "load": "Pruned by load", "merge": "Merged by outputs"}


def row_key(way: str, left: float) -> str:
    """Return reap_50 of the way and the percent of the experts that are left."""
    return f"{way}_{100 * left:.3g}".replace(".", "_")


def score_columns(seen: ColumnContext) -> list[Column]:
    """Return a column for each way and share that any model has."""
    score = seen.task.score
    keys = {
        row_key(row.way, row.left): row
        for result in seen.results
        for row in result.rows
        if row.way != "all"
    }
    return [
        Column(
            f"{score_slug(score)}_{key}",
            f"{score_title(score)}, {TITLES[row.way].lower()}, {100 * row.left:.3g} % left"
            f"{unit_suffix(score)}",
            lambda result, key=key: read_score(find_row(result, key)),
            score.better,
            score.form,
            "without training, on test images; what experts do is known from training images",
            items=lambda result, key=key: decode_items(read_items(find_row(result, key))),
            limits=score_interval_kind(score),
            detail=True,
        )
        for key, row in keys.items()
    ]


def find_row(result: Result, key: str) -> ReducedScore | None:
    """Return the row of ``row_key``, None where a model has none."""
    return next((row for row in result.rows if row_key(row.way, row.left) == key), None)


def planned_names(ahead: PlannedPhase) -> list[str]:
    """Return the names of the columns before anything has run."""
    settings = ahead.study.fewer_experts or FewerExperts()
    return [
        f"{ahead.score}_{row_key(way, left)}"
        for way, left in settings.planned_reductions()
        if way != "all"
    ]


COLUMNS = (ContextDependentColumns(score_columns, planned_names, SCORE, SCORE),)


def scores_by_percent_removed(result: Result, way: str) -> dict[float, float | None]:
    """Return percent of the experts that are gone → score, from the model with all of them on; {}
    where no expert could go that way.
    """
    rows = [row for row in result.rows if row.way in ("all", way)]
    if len(rows) == 1:
        return {}
    return {100 * (1 - row.left): row.score.value for row in rows}


def chart_spec(task: Task, title: str) -> ChartSpec:
    """Return the words of a chart of scores over the experts that are gone."""
    share = task.score.form == "share"
    label = f"{score_title(task.score)}{unit_suffix(task.score)}"
    return ChartSpec(title, "Experts gone, %", label, share=share, top=1.02 if share else None)


def phase_blocks(phase: Phase) -> Iterator[Block]:
    """Yield a chart for each way, a line per method, and what could not be."""
    results = phase.results(Result)
    ways = dict.fromkeys(row.way for one in results for row in one.rows if row.way != "all")
    drawn = [
        picture
        for way in ways
        for picture in draw_method_curves(
            phase,
            Result,
            lambda result, way=way: scores_by_percent_removed(result, way),
            chart_spec(phase.task, TITLES[way]),
            "Without training.",
        )
    ]
    skipped: dict[str, dict[str, None]] = {}
    for one in results:
        for name, why in one.skipped.items():
            skipped.setdefault(why, {})[name] = None
    below = [f"{', '.join(names)}: {why}." for why, names in skipped.items()]
    yield Block("Fewer experts", pictures=drawn, below=below)


SHOWN = Shown("fewer_experts", "fewer experts", Result, COLUMNS, part=phase_blocks, place=13)
