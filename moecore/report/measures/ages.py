"""Predicted ages before and after correction (ERMoE-ba, supplement, table S1)."""

from collections.abc import Callable, Iterator

import numpy as np

from moecore.brain.measured_ages import AgeResult
from moecore.measure.base import Estimate
from moecore.report.column import Column, Metric, decode_items
from moecore.report.figures.age_figures import age_scatter, errors_by_group, pad_against_age
from moecore.report.measured import Phase
from moecore.report.measures.shown import Figures, by_name
from moecore.report.page.rows import format_column
from moecore.report.page.view import Block, Grid, Item, Line
from moecore.report.tables.cells import read_cell
from moecore.tasks.base import Task

TABLE_S1 = {"raw": "as predicted", "pooled": "corrected", "sex_specific": "corrected per sex"}
NUMBERS = {
    "mae": "MAE, years",
    "corr": "corr(ŷ − y, y)",
    "slope": "slope",
    "intercept": "intercept",
}


def applies(task: Task) -> bool:
    """What has a probability is calibrated in another way."""
    return task.needs_classes("confidence") is not None


def read_number(prediction: str, name: str) -> Callable[[AgeResult], Estimate | None]:
    """One number of the predictions as they are, or corrected; None where nothing was corrected."""

    def read(result: AgeResult) -> Estimate | None:
        estimate: Estimate | None = getattr(getattr(result, prediction), name, None)
        if estimate is None or not np.isfinite(estimate.value):
            return None
        return estimate

    return read


def read_person_errors(prediction: str) -> Callable[[AgeResult], np.ndarray | None]:
    """Read one error per person."""
    return lambda result: decode_items(result.items.get(prediction))


def shares_of_median(result: AgeResult) -> np.ndarray | None:
    """The error of each person as a share of the median predictor's."""
    errors = decode_items(result.items.get("raw"))
    return None if errors is None else errors / result.median_mae


COLUMNS = (
    Column(
        "median_mae",
        "Median predictor's MAE",
        lambda result: result.median_mae,
        note="of always answering with the median age of training",
    ),
    Column(
        "mae_of_median",
        "MAE / median predictor's",
        lambda result: result.raw.mae.value / result.median_mae,
        "lower",
        note="test MAE / the median predictor's; below 0.5 is less than half its error",
        items=shares_of_median,
    ),
    Column(
        "mae_pooled",
        "MAE, corrected",
        read_number("pooled", "mae"),
        "lower",
        note="one line for all, (ŷ − a)/b",
        items=read_person_errors("pooled"),
    ),
    Column(
        "mae_sex_specific",
        "MAE, corrected per sex",
        read_number("sex_specific", "mae"),
        "lower",
        note="a line for each sex",
        items=read_person_errors("sex_specific"),
        paper="ages",
    ),
    *(
        Column(
            f"corr_{prediction}",
            f"Corr., {words}",
            read_number(prediction, "corr"),
            note="of the error with age; 0 is no leaning",
            paper="ages",
        )
        for prediction, words in TABLE_S1.items()
    ),
    *(
        Column(
            f"{name}_{prediction}",
            f"{name.title()}, {words}",
            read_number(prediction, name),
            note="of predicted on known age",
            paper="ages",
            detail=True,
        )
        for prediction, words in TABLE_S1.items()
        for name in ("slope", "intercept")
    ),
    Column(
        "interval_radius",
        "90 % interval, ± years",
        lambda result: result.interval.radius,
        "lower",
        note="split conformal, of a single prediction",
        paper="ages",
    ),
    Column(
        "interval_coverage",
        "Interval's coverage",
        lambda result: result.interval.coverage,
        form="share",
        note="share of the test volumes inside the 90 % interval of a single prediction",
        paper="ages",
        limits="wilson",
        detail=True,
    ),
)


def figures(result: AgeResult) -> Figures:
    """Predicted age, its difference from the known one, and errors by group."""
    yield "age_scatter", age_scatter(result.points, result.simulated)
    yield "pad_against_age", pad_against_age(result.points, result.simulated)
    groups = {"decade": result.by_decade, "sex": result.by_sex, "site": result.by_site}
    yield "errors_by_group", errors_by_group(groups, result.simulated)


def part(phase: Phase) -> Iterator[Block]:
    """Table S1 and the predicted ages of every method."""
    if not (results := phase.first(AgeResult)):
        return
    first = next(iter(results.values()))
    low, high = first.age_range
    words = [
        f"{first.n_test} test volumes, ages {low:.1f} to {high:.1f}. Always answering with the "
        f"training's median age has an MAE of {first.median_mae:.2f} years. The correction "
        f"(ŷ − a)/b was fitted on: {first.fit_on.replace('_', ' ')}; it takes no age."
    ]
    drawn = by_name(phase, AgeResult, figures)
    scatter = drawn["age_scatter"]
    yield Block(
        "Predicted age",
        words,
        [table_s1(phase)],
        scatter,
        below=list_refusals(phase),
        folded=True,
        about="mae_pooled",
    )
    others = drawn["pad_against_age"] + drawn["errors_by_group"]
    title = "Brain-PAD, and errors by decade, sex and site"
    yield Block(title, pictures=others, folded=True, about="corr_raw")


def table_s1(phase: Phase) -> Grid:
    """Raw, pooled and per-sex predictions of every method: means over seeds with intervals."""
    pairs = [(method, prediction) for method in phase.models for prediction in TABLE_S1]
    columns = []
    for name in NUMBERS:
        cells = []
        for method, prediction in pairs:
            column = Column(name, name, read_number(prediction, name))
            models = list(phase.models[method].values())
            cells.append(read_cell(Metric(column, AgeResult), models))
        columns.append(format_column(column, cells))
    lines = [
        Line(Item(method, note=TABLE_S1[prediction]), [column[row] for column in columns])
        for row, (method, prediction) in enumerate(pairs)
    ]
    return Grid(["Prediction", *NUMBERS.values()], lines)


def list_refusals(phase: Phase) -> list[str]:
    """List the models that got no correction, and why."""
    return [
        f"Not corrected: {method}, seed {seed}. {result.refused}"
        for method, seeds in phase.models.items()
        for seed, model in seeds.items()
        if (result := model.of(AgeResult)) is not None and result.refused
    ]
