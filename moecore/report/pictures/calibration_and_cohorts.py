"""Pictures of calibration (classes; ages as in ERMoE-ba, table S1), and checks of cohorts."""

from collections.abc import Iterator, Mapping, Sequence
from operator import methodcaller
from typing import Any

import numpy as np

from moecore.brain.age_calibration import AgeCalibrationMeasurement
from moecore.brain.age_correction import PREDICTIONS
from moecore.measure import calibration, training
from moecore.measure.cohort_checks import CohortChecks
from moecore.measure.probes.simulated_people import compute_mean_rising_step_share
from moecore.measure.values import Found
from moecore.report.column import Column
from moecore.report.figures import drawing
from moecore.report.figures.drawing import Axes, Figure
from moecore.report.page.page_objects import (
    DASH,
    PageBlock,
    PageCell,
    PageTable,
    Picture,
    TableRow,
    format_column_cells,
    format_method_cells,
)
from moecore.report.result_types import Models, PhaseResults, list_without_none
from moecore.report.results_and_displays import (
    Figures,
    Pictures,
    draw_pictures_by_name,
    first_seed_pictures,
)
from moecore.report.tables.cells import NumberFormat, cell_over_seeds

Facts = Mapping[str, Any]  # of ``AgeResult``, or of a part of it, as JSON has them
AGE_ERROR_LABELS = {
    "mae": "MAE, years",
    "corr": "corr(ŷ − y, y)",
    "slope": "slope",
    "intercept": "intercept",
}
SEX_STYLES = {
    "F": ("women", drawing.PALETTE[1], "o"),
    "M": ("men", drawing.PALETTE[0], "s"),
    "": ("sex unknown", drawing.PALETTE[6], "^"),
}
AGE_TITLES = {"raw": "as predicted", "pooled": "corrected"}
PREDICTION_COLOURS = {"raw": drawing.PALETTE[1], "pooled": drawing.PALETTE[0]}


def draw_age_predictions(result: Found) -> Figures:
    yield "age_scatter", draw_age_scatter(result.facts)
    yield "pad_against_age", draw_pad_against_age(result.facts)
    groups = {name: result.facts[f"by_{name}"] for name in ("decade", "sex", "site")}
    if having := {name: rows for name, rows in groups.items() if rows}:
        yield "errors_by_group", draw_errors_by_group(having, result.facts)


def age_blocks(phase: PhaseResults) -> Iterator[PageBlock]:
    first = phase.results(AgeCalibrationMeasurement)[0]
    facts = first.facts
    low, high = facts["age_range"]
    median = first.interval("median_mae")
    takes = "no age"
    if facts["uses_age"]:
        takes = "the known age, so it corrects gaps but does not predict ages"
    text = (
        f"{facts['n_test']} test volumes, ages {low:.1f} to {high:.1f}. Always answering the "
        f"median age of training has an MAE of {median.value if median else 0:.2f} years. The "
        f"correction was fitted on: {facts['fit_on'].replace('_', ' ')}; it takes {takes}."
    )
    if facts["diagnosis_gaps"]:
        text += f" Gaps of a diagnosis are relative to {facts['diagnosis_gaps'][0]['reference']}."
    pictures = draw_pictures_by_name(phase, AgeCalibrationMeasurement, draw_age_predictions)
    refusals = [
        f"Not corrected: {method}, seed {seed}. {result.facts['refused']}"
        for method, seeds in phase.models.items()
        for seed, model in seeds.items()
        if (result := model.of(AgeCalibrationMeasurement)) and result.facts["refused"]
    ]
    block = PageBlock("Predicted age", [text], [age_errors_table(phase)], pictures["age_scatter"])
    yield block._replace(below=refusals, about="mae_pooled")
    gaps_and_errors = pictures["pad_against_age"] + pictures["errors_by_group"]
    title = "Brain-PAD, and errors by decade, sex and site"
    yield PageBlock(title, pictures=gaps_and_errors, about="corr_raw")


def age_errors_table(phase: PhaseResults) -> PageTable:
    """Return a table of age errors and bias: a row per method and prediction (raw, corrected …)."""
    pairs = [(method, prediction) for method in phase.models for prediction in PREDICTIONS]
    columns = []
    for name in AGE_ERROR_LABELS:
        column = Column(name, name, lambda result: None, kind=AgeCalibrationMeasurement)
        cells = []
        for method, prediction in pairs:
            read = methodcaller("interval", f"{name}_{prediction}")
            models = list(phase.models[method].values())
            cells.append(cell_over_seeds(column._replace(read_result=read), models))
        columns.append(format_column_cells(column, cells))
    lines = [
        TableRow(PageCell(method, note=PREDICTIONS[prediction]), items)
        for (method, prediction), *items in zip(pairs, *columns, strict=True)
    ]
    return PageTable(["Prediction", *AGE_ERROR_LABELS.values()], lines)


@drawing.styled_drawing
def draw_age_scatter(facts: Facts) -> Figure:
    points = facts["points"]
    figure, panels, predictions = create_prediction_panels(points, 4.3, "Test split.")
    ages = np.concatenate([points["age"], *predictions.values()])
    limits = (float(ages.min()) - 2, float(ages.max()) + 2)
    style = {"color": drawing.GUIDE, "linewidth": 1, "linestyle": ":", "label": "predicted = known"}
    for axes, (name, values) in zip(panels, predictions.items(), strict=True):
        axes.plot(limits, limits, **style)
        _scatter_by_sex(axes, points, values)
        axes.set(xlabel="Known age, years", title=AGE_TITLES[name], xlim=limits, ylim=limits)
        axes.set_aspect("equal")
    return label_age_figure(figure, panels, "Predicted age", "Predicted age, years", facts)


@drawing.styled_drawing
def draw_pad_against_age(facts: Facts) -> Figure:
    """Draw the brain-PAD (predicted − known age) over known age, with mean ± 1.96 SD."""
    points = facts["points"]
    caption = "Grey lines: mean and mean ± 1.96 SD."
    figure, panels, predictions = create_prediction_panels(points, 3.6, caption)
    for axes, (name, values) in zip(panels, predictions.items(), strict=True):
        gaps = values - np.asarray(points["age"], float)
        mean = gaps.mean()
        width = 1.96 * gaps.std()
        axes.axhline(0, color=drawing.GUIDE, linewidth=1, linestyle=":")
        for height, dash in ((mean, "-"), (mean - width, "--"), (mean + width, "--")):
            axes.axhline(height, color=drawing.GUIDE, linewidth=1, linestyle=dash)
        _scatter_by_sex(axes, points, gaps)
        axes.set(xlabel="Known age, years", title=f"{AGE_TITLES[name]}: {mean:+.2f} ± {width:.2f}")
    return label_age_figure(figure, panels, "Brain-PAD", "Predicted − known age, years", facts)


@drawing.styled_drawing
def draw_errors_by_group(groups: Mapping[str, Sequence[Facts]], facts: Facts) -> Figure:
    widths = [len(rows) + 1 for rows in groups.values()]
    caption = "95 % intervals over participants."
    figure = drawing.create_figure(1.2 + 0.62 * sum(widths), 3.5, caption)
    panels = figure.subplots(1, len(groups), sharey=True, squeeze=False, width_ratios=widths)[0]
    for axes, (name, rows) in zip(panels, groups.items(), strict=True):
        _draw_group_errors(axes, rows)
        axes.set(title=name, ylim=(0, None), xlim=(-0.6, len(rows) - 0.4))
    return label_age_figure(figure, panels, "Error by group", "MAE, years", facts)


def label_age_figure(
    figure: Figure, panels: np.ndarray, title: str, label: str, facts: Facts
) -> Figure:
    """Add the title, marked if data are simulated, a legend and the vertical label; return it."""
    panels[0].set_ylabel(label)
    drawing.add_legend_below(figure, panels[0])
    if facts["simulated"]:
        title += " (simulated data)"
    figure.suptitle(title, fontsize=11, fontweight="bold")
    return figure


def _draw_group_errors(axes: Axes, rows: Sequence[Facts]) -> None:
    for shift, variant in ((-0.15, "raw"), (0.15, "pooled")):
        colour = PREDICTION_COLOURS[variant]
        for place, row in enumerate(rows):
            if row[variant] is None:
                continue
            label = AGE_TITLES[variant] if place == 0 else None
            mae = row[variant]["mae"]
            axes.plot(place + shift, mae["value"], "o", label=label, color=colour)
            if mae["low"] is not None:
                ends = [mae["low"], mae["high"]]
                axes.plot([place + shift] * 2, ends, linewidth=1.2, color=colour)
    names = [f"{row['group'] or 'unknown'}\nn {row['n']}" for row in rows]
    axes.set_xticks(range(len(rows)), names, fontsize=8)


def create_prediction_panels(
    points: Facts, height: float, caption: str
) -> tuple[Figure, np.ndarray, dict[str, np.ndarray]]:
    """Return a figure, a panel per prediction (raw, corrected), and name → ages (N volumes,)."""
    names = [name for name in AGE_TITLES if points[name] is not None]
    predictions = {name: np.asarray(points[name], float) for name in names}
    figure = drawing.create_figure(0.6 + 4.3 * len(predictions), height, caption)
    panels = figure.subplots(1, len(predictions), sharex=True, sharey=True, squeeze=False)[0]
    return figure, panels, predictions


def _scatter_by_sex(axes: Axes, points: Facts, values: np.ndarray) -> None:
    ages = np.asarray(points["age"], float)
    sexes = np.array(points["sex"], dtype=object)
    for sex, (label, colour, marker) in SEX_STYLES.items():
        mask = sexes == sex
        if not mask.any():
            continue
        style = {"color": colour, "marker": marker, "alpha": 0.55, "linewidths": 0}
        axes.scatter(ages[mask], values[mask], s=16, label=f"{label}, n {mask.sum()}", **style)
        if mask.sum() > 2 and np.ptp(ages[mask]) > 0:
            slope, intercept = np.polyfit(ages[mask], values[mask], 1)
            ends = np.array([ages[mask].min(), ages[mask].max()])
            axes.plot(ends, intercept + slope * ends, color=colour, linewidth=1.6)


PROBE_NOTE = (
    "Probe: a new linear head that predicts age from the frozen model, fitted on such volumes of "
    "the training split."
)
ERRORS = {  # label → metric
    "Whole volume": "whole_mae",
    **{f"{label} alone": f"isolated_{name}" for name, label in training.TISSUES.items()},
    "Whole volume, probe": "whole_probe_mae",
    **{f"{label} alone, probe": f"probe_{name}" for name, label in training.TISSUES.items()},
    "GM − CSF, probe": "gm_over_csf",
    "WM − GM, probe": "wm_over_gm",
    "Rescan, years apart": "rescan",
}
WHOLE_PERCENT_FORMAT = NumberFormat("share", 0)
REGION_NOTE = (
    "Share of tokens whose first region expert is the expert of the cube's most frequent tissue. "
    "Isolated volumes of the training's generator were taught, so their row is no finding; the "
    "other rows were not taught. Chance: the same decisions against the person's cubes in another "
    "order, the best fixed answer, and the decisions against other people's cubes of the same "
    "places, which experts that depend only on the place reach, too."
)
VOLUMES_BY_LABEL = {  # label → volumes
    "Isolated, as taught": "isolated",
    "Two tissues mixed": "mixed",
    "Whole volumes": "whole",
    "Other generator, isolated": "other_generator_isolated",
    "Other generator, whole": "other_generator",
}
AGREEMENT_HEADS = {
    "agreement": "Agreement",
    "permuted": "Cubes permuted",
    "over_chance": "Agreement − permuted",
    "fixed": "Best fixed answer",
    "same_place": "Same place, other person",
}


def draw_cohort_checks(result: Found) -> Figures:
    if ageing := result.facts.get("ageing"):
        yield "ageing", draw_ageing(ageing)


def cohort_blocks(phase: PhaseResults) -> Iterator[PageBlock]:
    """Yield region experts (one per tissue) on untrained volumes, if measured; then age errors."""
    reasons: dict[str, str] = {}
    mixtures = []
    for method, result in phase.first(CohortChecks).items():
        reasons |= result.facts["not_checked"]
        if result.find("whole_agreement"):
            mixtures.append(mixture_agreement_table(result, method))
    if tried := region_expert_agreement_table(phase):
        reasons.pop("generalisation", None)  # the reason of methods without region experts
        title = "Region experts where they were not taught"
        notes = [f"Mixtures: one model per method.{phase.seed_note}"]
        yield PageBlock(title, notes, [tried, *mixtures], about="whole_over_chance")
    grid = tissue_error_table(phase)
    probed = grid is not None and any(name.endswith(", probe") for name in grid.columns)
    notes = [PROBE_NOTE] if probed else []
    pictures = first_seed_pictures(phase, CohortChecks, draw_cohort_checks)
    below = [f"Not checked, {name}: {reason}." for name, reason in reasons.items()]
    block = PageBlock("Tissues alone, ageing, rescans", notes, list_without_none([grid]), pictures)
    yield block._replace(below=below, about="isolated_gm")


def cohort_metric_cells(models: Models, metric: str, form: str = "number") -> list[PageCell]:
    read = methodcaller("interval", metric)
    return format_method_cells(Column(metric, metric, read, form=form, kind=CohortChecks), models)


def tissue_error_table(phase: PhaseResults) -> PageTable | None:
    """Return age errors (years): methods × ``ERRORS``, such as one tissue's; None if unmeasured."""
    cells = {label: cohort_metric_cells(phase.models, metric) for label, metric in ERRORS.items()}
    having = {label: items for label, items in cells.items() if set(items) != {DASH}}
    if not having:
        return None
    rows = zip(phase.models, *having.values(), strict=True)
    lines = [TableRow(PageCell(method), items) for method, *items in rows]
    return PageTable(["MAE, years", *having], lines)


def region_expert_agreement_table(phase: PhaseResults) -> PageTable | None:
    lines = []
    measured = phase.of(CohortChecks)
    for method, seeds in phase.models.items():
        if not any(result.find("whole_agreement") for result in measured[method]):
            continue
        lines.append(TableRow(PageCell(method), look="group"))
        for label, volumes in VOLUMES_BY_LABEL.items():
            items = []
            for number in AGREEMENT_HEADS:
                form = "number" if number == "over_chance" else "share"
                items += cohort_metric_cells({method: seeds}, f"{volumes}_{number}", form)
            lines.append(TableRow(PageCell(label), items))
    if not lines:
        return None
    return PageTable(["First region expert", *AGREEMENT_HEADS.values()], lines, below=REGION_NOTE)


def mixture_agreement_table(result: Found, method: str) -> PageTable:
    """Return the share of tokens choosing their largest tissue's expert, in volumes of two tissues.

    Rows: pairs of tissues. Columns: share of the second tissue's voxels that is not removed.
    """
    shares = result.all("mixture_agreement")
    chances = result.all("mixture_permuted")
    remaining: list[Any] = sorted({value.at["left"] for value in shares})
    items: dict[str, list[PageCell]] = {}
    for share, chance in zip(shares, chances, strict=True):
        pair = " with ".join(str(share.at[name]).upper() for name in ("whole", "thinned"))
        note = f"chance {WHOLE_PERCENT_FORMAT.value(chance.value)}"
        items.setdefault(pair, []).append(PageCell(WHOLE_PERCENT_FORMAT.value(share.value), note))
    lines = [TableRow(PageCell(pair), of_pair) for pair, of_pair in items.items()]
    heads = [f"{WHOLE_PERCENT_FORMAT.value(value)} of the second" for value in remaining]
    number = NumberFormat("number", 2)
    text = "Rank correlation of a tissue's share of a cube and its expert's score"
    for volumes, label in {"whole": "whole volumes", "other_generator": "other generator"}.items():
        ranks = [
            f"{str(value.at['tissue']).upper()} {number.value(value.value)}"
            for value in result.all("expert_correlation")
            if value.at["volumes"] == volumes
        ]
        text += f"; {label}: {', '.join(ranks) or 'none'}"
    return PageTable(["Mixture", *heads], lines, title=method, below=f"{text}.")


@drawing.styled_drawing
def draw_ageing(ageing: Mapping[str, Any]) -> Figure:
    ages, predictions = ageing["ages"], ageing["predictions"]
    rising = compute_mean_rising_step_share(np.array(predictions))
    figure = drawing.create_figure(4.4, 4.0, f"Rising steps: {rising:.0%}.")
    axes = figure.subplots()
    ends = [ages[0], ages[-1]]
    axes.plot(ends, ends, color=drawing.GUIDE, linewidth=1, linestyle=":", label="identity")
    style = {"color": drawing.line_style(0)["color"], "linewidth": 0.8, "alpha": 0.6}
    for row in predictions:
        axes.plot(ages, row, marker="o", markersize=2, **style)
    axes.set(xlabel="Age in years", ylabel="Predicted age in years")
    axes.set_title("Simulated subjects, aged")
    drawing.add_legend_below(figure, axes)
    return figure


def draw_reliability(result: Found) -> Figures:
    yield "reliability", draw_reliability_diagram(result.facts["bins"], "Reliability")


def calibration_blocks(phase: PhaseResults) -> Iterator[PageBlock]:
    first = phase.first(calibration.ClassCalibration)
    temperatures = [
        f"{method} {value.value:.2f}" + (" (at its limit)" if result.facts["at_limit"] else "")
        for method, result in first.items()
        if (value := result.find("temperature"))
    ]
    captions = {
        "before": "A point is a bin of confidence; its area grows with the number of images.",
        "after": f"Temperatures: {', '.join(temperatures)}." if temperatures else "",
    }
    pictures = []
    for when, caption in captions.items():
        bins = {method: result.facts["bins"][when] for method, result in first.items()}
        title = f"Reliability {when} calibration"
        chart = draw_reliability_diagram(bins, title)
        pictures.append(Picture(chart, f"{phase.name}: {title}", caption + phase.seed_note))
    yield PageBlock("Calibration", pictures=pictures, about="ece_after")


@drawing.styled_drawing
def draw_reliability_diagram(curves: Mapping[str, Mapping[str, Any]], title: str) -> Figure:
    """Draw accuracy over confidence, in bins; curves: label → ``ReliabilityBins`` as JSON."""
    from matplotlib.collections import PathCollection

    figure = drawing.create_figure(4.8, 4.2)
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], color=drawing.GUIDE, linewidth=1, linestyle=":", label="calibrated")
    for index, (label, bins) in enumerate(curves.items()):
        points = np.array([bins[name] for name in ("confidence", "accuracy", "count")], dtype=float)
        x, y, counts = points[:, np.isfinite(points).all(axis=0)]
        line = drawing.line_style(index)
        axes.plot(x, y, color=line["color"], linestyle=line["linestyle"], linewidth=1.2)
        areas = 14 + 180 * np.sqrt(counts / max(1, counts.sum()))
        style = {"color": line["color"], "marker": line["marker"], "alpha": 0.75, "linewidths": 0}
        axes.scatter(x, y, s=areas, label=label, **style)
    axes.set(xlabel="Confidence", title=title, xlim=(0, 1.02), ylim=(0, 1.02))
    drawing.set_percent_axis(axes, "Accuracy")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    for handle in drawing.add_legend_below(figure, axes).legend_handles:
        if isinstance(handle, PathCollection):
            handle.set_sizes([30])
    return figure


HAS_CLASSES = lambda task: task.needs_classes("label_smoothing") is None
HAS_NO_CLASSES = lambda task: not HAS_CLASSES(task)
CLASS_PICTURES = Pictures("calibrate", draw_reliability, is_on_page=False, more=calibration_blocks)
AGE_PICTURES = Pictures("calibrate", draw_age_predictions, is_on_page=False, more=age_blocks)
PICTURES = [
    CLASS_PICTURES._replace(kind=calibration.ClassCalibration, applies=HAS_CLASSES),
    AGE_PICTURES._replace(kind=AgeCalibrationMeasurement, applies=HAS_NO_CLASSES),
    Pictures("cohort_checks", draw_cohort_checks, is_on_page=False, more=cohort_blocks),
]
