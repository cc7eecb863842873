"""Predicted ages before and after correction (ERMoE-ba, supplement, table S1)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from moecore.brain.age_errors import GroupErrors
from moecore.brain.age_measurement import AgePoints, AgeResult
from moecore.measure.base import Estimate
from moecore.measure.values import place_slug
from moecore.report.column import (
    Column,
    ColumnPerRow,
    ResultColumn,
    decode_items,
)
from moecore.report.figures.drawing import (
    GUIDE,
    PALETTE,
    add_legend_below,
    empty_figure,
    styled_drawing,
)
from moecore.report.measures.result_display import (
    Figures,
    Shown,
    items_reader,
    path_reader,
    pictures_by_name,
)
from moecore.report.page.rows import format_column
from moecore.report.page.view import Block, PageCell, PageTable, TableRow
from moecore.report.tables.cells import cell_over_seeds
from moecore.report.typed_results import Phase
from moecore.tasks.base import Task

TABLE_S1 = {"raw": "as predicted", "pooled": "corrected", "sex_specific": "corrected per sex"}
NUMBERS = {
    "mae": "MAE, years",
    "corr": "corr(ŷ − y, y)",
    "slope": "slope",
    "intercept": "intercept",
}
SEXES = {
    "F": ("women", PALETTE[1], "o"),
    "M": ("men", PALETTE[0], "s"),
    "": ("sex unknown", PALETTE[6], "^"),
}
PANELS = {"raw": "as predicted", "pooled": "corrected"}
COLOURS = {"raw": PALETTE[1], "pooled": PALETTE[0]}

DIAGNOSIS_COLUMNS = (  # name, field, label, note; {1} is the reference
    ("gap", "difference", "Gap", "its mean minus that of {1}, years"),
    ("gap_adjusted", "adjusted", "Gap at equal age and sex", "minus that of {1}, years"),
    ("gap_auc", "auc", "AUC of the gap", "against {1}; ½ is chance"),
)


def applies(task: Task) -> bool:
    """What is a softmax over classes is calibrated in another way."""
    return task.needs_classes("label_smoothing") is not None


def age_number_reader(prediction: str, name: str) -> Callable[[AgeResult], Estimate | None]:
    """One number of the predictions as they are, or corrected; None where nothing was corrected."""

    def read(result: AgeResult) -> Estimate | None:
        estimate = path_reader(f"{prediction}.{name}")(result)
        return estimate if estimate is None or np.isfinite(estimate.value) else None

    return read


def correlation_size_reader(prediction: str) -> Callable[[AgeResult], float | None]:
    """The size of the correlation of the error with age: 0 is no leaning, to either side."""
    read = age_number_reader(prediction, "corr")

    def read_size(result: AgeResult) -> float | None:
        estimate = read(result)
        return None if estimate is None else abs(estimate.value)

    return read_size


def errors_over_median_mae(result: AgeResult) -> np.ndarray | None:
    errors = items_reader("raw")(result)
    return None if errors is None else errors / result.median_mae


age_column = partial(Column, paper="ages")
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
        items=errors_over_median_mae,
    ),
    Column(
        "mae_pooled",
        "MAE, corrected",
        age_number_reader("pooled", "mae"),
        "lower",
        note="one line for all, (ŷ − a)/b",
        items=items_reader("pooled"),
    ),
    age_column(
        "mae_sex_specific",
        "MAE, corrected per sex",
        age_number_reader("sex_specific", "mae"),
        "lower",
        note="a line for each sex",
        items=items_reader("sex_specific"),
    ),
    *(
        age_column(
            f"corr_{prediction}",
            f"Corr., {words}",
            age_number_reader(prediction, "corr"),
            note="of the error with age; 0 is no leaning",
        )
        for prediction, words in TABLE_S1.items()
    ),
    *(
        age_column(
            f"corr_size_{prediction}",
            f"|Corr.|, {words}",
            correlation_size_reader(prediction),
            "lower",
            note="of the error with age, without its sign",
            detail=True,
        )
        for prediction, words in TABLE_S1.items()
    ),
    *(
        age_column(
            f"{name}_{prediction}",
            f"{name.title()}, {words}",
            age_number_reader(prediction, name),
            note="of predicted on known age",
            detail=True,
        )
        for prediction, words in TABLE_S1.items()
        for name in ("slope", "intercept")
    ),
    *(
        ColumnPerRow(
            lambda result: {place_slug(one.diagnosis): one for one in result.diagnosis_gaps},
            age_column(f"{name}_{{}}", f"{label}, {{}}", attrgetter(field), note=note),
            lambda ahead: (),
            lambda key, one: (one.diagnosis, one.reference),
        )
        for name, field, label, note in DIAGNOSIS_COLUMNS
    ),
    age_column(
        "ridge_mae",
        "Ridge's MAE, years",
        path_reader("tissue_ridge.errors.mae"),
        "lower",
        note="of ridge regression on the volumes of the three tissues, of the same data",
        items=lambda result: decode_items(result.tissue_ridge and result.tissue_ridge.items),
    ),
    age_column(
        "interval_radius",
        "90 % interval, ± years",
        lambda result: result.interval.radius,
        "lower",
        note="split conformal, of a single prediction",
    ),
    age_column(
        "interval_coverage",
        "Interval's coverage",
        lambda result: result.interval.coverage,
        form="share",
        note="share of the test volumes inside the 90 % interval of a single prediction",
        limits="wilson",
        detail=True,
    ),
)


def figures(result: AgeResult) -> Figures:
    """Predicted age, its difference from the known one, and errors by group."""
    yield "age_scatter", age_scatter(result)
    yield "pad_against_age", pad_against_age(result)
    groups = {name: getattr(result, f"by_{name}") for name in ("decade", "sex", "site")}
    if having := {name: rows for name, rows in groups.items() if rows}:
        yield "errors_by_group", errors_by_group(having, result)


def phase_blocks(phase: Phase) -> Iterator[Block]:
    """Table S1 and the predicted ages of every method."""
    first = phase.results(AgeResult)[0]
    low, high = first.age_range
    words = (
        f"{first.n_test} test volumes, ages {low:.1f} to {high:.1f}. Always answering with the "
        f"training's median age has an MAE of {first.median_mae:.2f} years. The correction "
        f"was fitted on: {first.fit_on.replace('_', ' ')}; it takes "
        f"{'the known age, so it corrects gaps and predicts none' if first.uses_age else 'no age'}."
    )
    drawn = pictures_by_name(phase, AgeResult, figures)
    block = Block("Predicted age", [words], [table_s1(phase)], drawn["age_scatter"])
    yield block._replace(below=age_correction_refusals(phase), about="mae_pooled")
    others = drawn["pad_against_age"] + drawn["errors_by_group"]
    title = "Brain-PAD, and errors by decade, sex and site"
    yield Block(title, pictures=others, about="corr_raw")


def table_s1(phase: Phase) -> PageTable:
    """Raw, pooled and per-sex predictions of every method: means over seeds with intervals."""
    pairs = [(method, prediction) for method in phase.models for prediction in TABLE_S1]
    columns = []
    for name in NUMBERS:
        metrics = {
            prediction: ResultColumn(
                Column(name, name, age_number_reader(prediction, name)), AgeResult
            )
            for prediction in TABLE_S1
        }
        cells = [
            cell_over_seeds(metrics[prediction], list(phase.models[method].values()))
            for method, prediction in pairs
        ]
        columns.append(format_column(metrics["raw"].column, cells))
    lines = [
        TableRow(PageCell(method, note=TABLE_S1[prediction]), items)
        for (method, prediction), *items in zip(pairs, *columns, strict=True)
    ]
    return PageTable(["Prediction", *NUMBERS.values()], lines)


def age_correction_refusals(phase: Phase) -> list[str]:
    return [
        f"Not corrected: {method}, seed {seed}. {result.refused}"
        for method, seeds in phase.models.items()
        for seed, model in seeds.items()
        if (result := model.of(AgeResult)) and result.refused
    ]


@styled_drawing
def age_scatter(result: AgeResult) -> Figure:
    """Predicted against known age, before and after correction; a colour and a line per sex."""
    points = result.points
    figure, panels, known = new_prediction_panels(points, 4.3, "Test split.")
    every = np.concatenate([points.age, *known.values()])
    limits = (float(every.min()) - 2, float(every.max()) + 2)
    look = {"color": GUIDE, "linewidth": 1, "linestyle": ":", "label": "predicted = known"}
    for axes, (name, values) in zip(panels, known.items(), strict=True):
        axes.plot(limits, limits, **look)
        _by_sex(axes, points, values)
        axes.set(xlabel="Known age, years", title=PANELS[name], xlim=limits, ylim=limits)
        axes.set_aspect("equal")
    return add_title_and_legend(figure, panels, "Predicted age", "Predicted age, years", result)


@styled_drawing
def pad_against_age(result: AgeResult) -> Figure:
    """Predicted minus known age against known age, with mean, mean ± 1.96 SD, a line per sex."""
    points = result.points
    figure, panels, known = new_prediction_panels(
        points, 3.6, "Grey lines: mean and mean ± 1.96 SD."
    )
    for axes, (name, values) in zip(panels, known.items(), strict=True):
        gaps = values - np.asarray(points.age, float)
        mean = gaps.mean()
        width = 1.96 * gaps.std()
        axes.axhline(0, color=GUIDE, linewidth=1, linestyle=":")
        for height, dash in ((mean, "-"), (mean - width, "--"), (mean + width, "--")):
            axes.axhline(height, color=GUIDE, linewidth=1, linestyle=dash)
        _by_sex(axes, points, gaps)
        axes.set(xlabel="Known age, years", title=f"{PANELS[name]}: {mean:+.2f} ± {width:.2f}")
    return add_title_and_legend(figure, panels, "Brain-PAD", "Predicted − known age, years", result)


@styled_drawing
def errors_by_group(groups: Mapping[str, Sequence[GroupErrors]], result: AgeResult) -> Figure:
    """MAE as predicted and corrected in each group with its interval; groups: sex → rows."""
    widths = [len(rows) + 1 for rows in groups.values()]
    figure = empty_figure(1.2 + 0.62 * sum(widths), 3.5, "95 % intervals over participants.")
    panels = figure.subplots(1, len(groups), sharey=True, squeeze=False, width_ratios=widths)[0]
    for axes, (name, rows) in zip(panels, groups.items(), strict=True):
        _groups(axes, rows)
        axes.set(title=name, ylim=(0, None), xlim=(-0.6, len(rows) - 0.4))
    return add_title_and_legend(figure, panels, "Error by group", "MAE, years", result)


def add_title_and_legend(
    figure: Figure, panels: np.ndarray, title: str, label: str, result: AgeResult
) -> Figure:
    """Return the figure with a title that says where volumes are simulated, and one legend."""
    panels[0].set_ylabel(label)
    add_legend_below(figure, panels[0])
    if result.simulated:
        title += " (simulated data)"
    figure.suptitle(title, fontsize=11, fontweight="bold")
    return figure


def _groups(axes: Axes, rows: Sequence[GroupErrors]) -> None:
    """Two dots a group, as predicted and corrected."""
    for shift, variant in ((-0.15, "raw"), (0.15, "pooled")):
        look = {"color": COLOURS[variant]}
        for place, row in enumerate(rows):
            errors = getattr(row, variant)
            if errors is None:
                continue
            label = PANELS[variant] if place == 0 else None
            axes.plot(place + shift, errors.mae.value, "o", label=label, **look)
            if errors.mae.low is not None:
                ends = [errors.mae.low, errors.mae.high]
                axes.plot([place + shift] * 2, ends, linewidth=1.2, **look)
    names = [f"{row.group or 'unknown'}\nn {row.n}" for row in rows]
    axes.set_xticks(range(len(rows)), names, fontsize=8)


def new_prediction_panels(
    points: AgePoints, height: float, caption: str
) -> tuple[Figure, np.ndarray, dict[str, np.ndarray]]:
    """Return a figure, a panel per kind of prediction that there is, and the predictions."""
    given = {name: getattr(points, name) for name in PANELS}
    known = {name: np.asarray(ages, float) for name, ages in given.items() if ages is not None}
    figure = empty_figure(0.6 + 4.3 * len(known), height, caption)
    panels = figure.subplots(1, len(known), sharex=True, sharey=True, squeeze=False)[0]
    return figure, panels, known


def _by_sex(axes: Axes, points: AgePoints, values: np.ndarray) -> None:
    """A cloud and its least-squares line for each sex."""
    ages = np.asarray(points.age, float)
    sexes = np.array(points.sex, dtype=object)
    for sex, (label, colour, marker) in SEXES.items():
        own = sexes == sex
        if not own.any():
            continue
        look = {"color": colour, "marker": marker, "alpha": 0.55, "linewidths": 0}
        axes.scatter(ages[own], values[own], s=16, label=f"{label}, n {own.sum()}", **look)
        if own.sum() > 2 and np.ptp(ages[own]) > 0:
            slope, intercept = np.polyfit(ages[own], values[own], 1)
            ends = np.array([ages[own].min(), ages[own].max()])
            axes.plot(ends, intercept + slope * ends, color=colour, linewidth=1.6)


SHOWN = Shown(
    "calibrate", "calibration", AgeResult, COLUMNS, figures, phase_blocks, applies, place=3
)
