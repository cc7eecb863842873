"""The files below reports/ (pages, CSVs, metrics, plots), and a run's numbers for MLflow."""

import csv
import io
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from moecore.brain import age_calibration, age_correction
from moecore.core.config import Config
from moecore.core.files import UserError
from moecore.data.prepared import Prepared
from moecore.measure import base, robustness
from moecore.measure.values import Found
from moecore.report import headline_quantities, results_and_displays
from moecore.report.claims import claims_table, evaluation
from moecore.report.column import score_slug
from moecore.report.figures.model_figures import draw_training_curves
from moecore.report.figures.overview import draw_dataset_samples
from moecore.report.page.explorer_page import PAGE_FILE, has_explorer_results, render_study_explorer
from moecore.report.page.page_objects import Picture
from moecore.report.page.report_page import render_report, render_svg
from moecore.report.pictures.robustness import draw_attack_curve, draw_transfer
from moecore.report.result_types import ModelResults, PhaseResults, StudyResults
from moecore.report.tables.metrics_by_method import phase_result_columns
from moecore.statistics.intervals import Interval
from moecore.study.stages import MODEL_STAGES, REDUCING_PHASES, TRAINING_PHASES

SINGLE_SVG_COLOUR = "#333"


def render_report_files(
    results: StudyResults, evaluated: Sequence[evaluation.EvaluatedClaim]
) -> dict[str, str]:
    """Return path below reports/ → content, for all files except compare.json and its items."""
    phases = list(results.phases.values())
    explorer_file = PAGE_FILE if has_explorer_results(results) else None
    files = {
        "index.html": render_report(results, evaluated, explorer_file),
        PAGE_FILE: render_study_explorer(results),
        "claims.md": claims_table.claims_markdown(evaluated),
        "curves/training.csv": training_csv(results),
    }
    if any(phase.results(robustness.Robustness) for phase in phases):
        files["curves/robustness.csv"] = robustness_csv(results)
    if any(phase.task.kind == "regression" for phase in phases):
        files["curves/table_s1.csv"] = age_errors_by_model_csv(results)
    return files | render_metrics_files(results) | render_plot_svgs(results)


def render_plot_svgs(results: StudyResults) -> dict[str, str]:
    pictures = {}
    for phase in results.phases.values():
        trained = {method: outcomes for method, outcomes in phase.outcomes.items() if outcomes}
        if any(outcome.curve for seeds in trained.values() for outcome in seeds):
            picture = Picture(draw_training_curves(trained), f"{phase.name}: training")
            pictures[f"{phase.name}_training"] = picture
        if attack := headline_quantities.choose_headline_attack(phase):
            pictures[f"{phase.name}_attacks"] = draw_attack_curve(phase, attack)
    for display, phase in results_and_displays.list_calculations(results):
        for name, figure in chain(*map(display.pictures.figures, phase.results(display.kind))):
            pictures[f"{display.stage}_{name}"] = Picture(figure, name.replace("_", " "))
    texts = {name: render_svg(picture.figure, picture.label) for name, picture in pictures.items()}
    ink = f'<svg color="{SINGLE_SVG_COLOUR}"'  # no page gives it a text colour
    return {f"plots/{name}.svg": text.replace("<svg", ink, 1) for name, text in texts.items()}


Row = dict[str, Any]
Rows = Callable[[ModelResults, PhaseResults], Iterator[Row]]  # of a model of a phase
MODEL_IDS = ("phase", "method", "seed")
SUFFIXES = {"": "value", "_low": "low", "_high": "high"}
AGE_ERRORS = ("mae", "corr", "slope", "intercept")


def training_csv(results: StudyResults) -> str:
    names = dict.fromkeys(phase.task.history_name for phase in results.phases.values())
    scores = [f"{split}_{name}" for name in names for split in ("train", "validation")]

    def rows(model: ModelResults, phase: PhaseResults) -> Iterator[Row]:
        if trained := model.outcome:
            yield from trained.curve

    return _render_csv(results, ("step", "epoch", "train_loss", *scores), rows)


def robustness_csv(results: StudyResults) -> str:
    scores = dict.fromkeys(phase.task.history_name for phase in results.phases.values())

    def rows(model: ModelResults, phase: PhaseResults) -> Iterator[Row]:
        if attacked := model.of(robustness.Robustness):
            for value in attacked.all("attacked"):
                score = {phase.task.history_name: value.value}
                yield value.at | score | {"low": value.low, "high": value.high}

    return _render_csv(results, ("attack", "epsilon", *scores, "low", "high"), rows)


def age_errors_by_model_csv(results: StudyResults) -> str:
    """Return a CSV with one row per model and kind of age prediction: errors and their limits."""
    columns = {f"{name}{end}": (name, key) for name in AGE_ERRORS for end, key in SUFFIXES.items()}

    def rows(model: ModelResults, phase: PhaseResults) -> Iterator[Row]:
        measured = model.of(age_calibration.AgeCalibrationMeasurement)
        if measured is None:
            return
        for prediction in age_correction.PREDICTIONS:
            values = {
                column: getattr(number, key)
                for column, (name, key) in columns.items()
                if (number := measured.find(f"{name}_{prediction}"))
            }
            if values:
                yield {"prediction": prediction, **values}

    return _render_csv(results, ("prediction", *columns), rows)


def _render_csv(results: StudyResults, columns: Sequence[str], rows: Rows) -> str:
    text = io.StringIO()
    names = (*MODEL_IDS, *columns)
    writer = csv.DictWriter(text, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for phase in results.phases.values():
        for method, seeds in phase.models.items():
            for seed, model in seeds.items():
                item = dict(zip(MODEL_IDS, (phase.name, method, seed), strict=True))
                writer.writerows(item | row for row in rows(model, phase))
    return text.getvalue()


MAX_METRICS = 12  # per file of a model
SIGNIFICANT_DIGITS = 5
MLFLOW_DIGITS = 4
MAX_MLFLOW_NAME_LETTERS = 14  # width of a column in MLflow's table
SHORT_PHASES = {"pretrain": "pre", "finetune": "fine", "adversarial": "adv"}
Items = Mapping[str, Collection[str]]  # method → the items whose results are of its model
FIGURE_DRAWERS_BY_STAGE: Mapping[str, results_and_displays.Draw] = {
    "transfer": draw_transfer
}  # by stage, of no single model


def render_metrics_files(results: StudyResults) -> dict[str, str]:
    """Return path below reports/ → JSON text {metric: number}, one file per model."""
    numbers: dict[str, dict[str, float]] = {}
    for name, result in results.calculations.items():
        rounded = {key: round_significant(number) for key, number in result.numbers().items()}
        numbers[f"calculations/{name}"] = rounded
    for phase in results.phases.values():
        columns = {column.name: column for column in phase_result_columns(phase)}
        names = [headline.name for headline in headline_quantities.HEADLINES if headline.run]
        names = [*names[:4], *headline_quantities.choose_attack_and_change_columns(phase), *names]
        # The score comes first, then the score under attack, routing, and cost.
        metrics = [columns[name] for name in dict.fromkeys(names) if name in columns][:MAX_METRICS]
        for method, seeds in phase.models.items():
            for seed, model in seeds.items():
                numbers[f"{phase.name}/{method}-{seed}"] = {
                    metric.name: round_significant(interval.value)
                    for metric in metrics
                    if (interval := metric.read(model)) is not None
                }
    return {
        f"metrics/{name}.json": json.dumps(values, indent=1) + "\n"
        for name, values in numbers.items()
    }


def round_significant(value: float, digits: int = SIGNIFICANT_DIGITS) -> float:
    if value.is_integer():
        return int(value)
    return float(f"{value:.{digits}g}")


def read_model_numbers_for_mlflow(
    study: Path, method: str, seed: int, items: Items
) -> tuple[dict[str, float], dict[str, int]]:
    """Return MLflow name → headline number, "phase.column" → count (parameters …), of ``items``."""
    # The last training comes first, and of each phase the score, then the score under attack.
    # items: method (this one, and dense, to which some numbers are relative) → paths of up-to-date
    # results, such as routing/pretrain/vmoe/0. Results of other code are omitted.
    numbers: dict[str, float] = {}
    counts: dict[str, int] = {}
    for name in (*reversed(TRAINING_PHASES), *REDUCING_PHASES):
        try:
            card, task = results_and_displays.read_data_card_and_task(study, name)
        except UserError:
            continue  # missing, or from other code: the run of `prepare` reports it
        displays = [shown for shown in results_and_displays.list_displays() if shown.applies(task)]
        models = {
            key: {seed: read_current_model_results(study, name, f"{key}/{seed}", displays, current)}
            for key, current in items.items()
        }
        phase = PhaseResults(name, card, task, models)
        if not models[method][seed].results:
            continue
        metrics = {metric.name: metric for metric in phase_result_columns(phase)}
        slugs = headline_quantities.first_table_mlflow_names(phase, metrics)
        attacked, _ = headline_quantities.choose_attack_and_change_columns(phase)
        scores = [f"test_{score_slug(task.score)}", attacked]
        for key in sorted(slugs, key=lambda key: scores.index(key) if key in scores else 2):
            interval = metrics[key].read(models[method][seed])
            if interval is not None and metrics[key].form == "count":
                counts[f"{name}.{key}"] = int(interval.value)
            elif interval is not None:
                numbers |= name_numbers_for_mlflow(slugs[key], name, interval)
    return numbers, counts


def name_numbers_for_mlflow(slug: str, phase: str, interval: Interval) -> dict[str, float]:
    """Return a metric's rounded value and limits by their names in MLflow (``acc/fine.lo``)."""
    short = f"{slug}/{SHORT_PHASES.get(phase, phase)}"
    name = f"{slug}/{phase}"
    numbers = {name if len(name) <= MAX_MLFLOW_NAME_LETTERS else short: interval.value}
    if interval.limits is not None:
        numbers |= zip((f"{short}.lo", f"{short}.hi"), interval.limits, strict=True)
    return {name: round_significant(value, MLFLOW_DIGITS) for name, value in numbers.items()}


def read_current_model_results(
    study: Path,
    phase: str,
    model: str,
    displays: Iterable[results_and_displays.MeasurementDisplay],
    items: Collection[str],
) -> ModelResults:
    """Return a model's results whose paths are in ``items``; model: method/seed, as vmoe/0."""
    results: dict[type[Config], Config] = {}
    for shown in displays:
        if Path(shown.stage, phase, model).as_posix() in items:
            with suppress(UserError):  # from other code, or missing: the stage's own run reports it
                read = results_and_displays.read_model_results(study, phase, model, [shown])
                results |= read.results
    return ModelResults(results)


def draw_run_figures(study: Path, stage: str, item: str) -> Iterator[tuple[str, Figure]]:
    # item: its path in artifacts/history.
    if stage == "prepare":
        folder = study / "artifacts/data" / item.removeprefix("prepare/")
        yield "samples", draw_dataset_samples(Prepared.open(folder))
        return
    path = study / "artifacts/measured" / f"{item}.json"
    if stage in FIGURE_DRAWERS_BY_STAGE:
        yield from FIGURE_DRAWERS_BY_STAGE[stage](base.read_result(path, Found, stage))
        return
    folder = "" if stage in MODEL_STAGES else stage
    displays = [shown for shown in results_and_displays.list_displays() if shown.stage == folder]
    for display in sorted(displays, key=lambda entry: bool(entry.within)):  # parts come last
        result = display.read(path, stage)
        if result is None or isinstance(result, base.SkipReason):
            continue
        names = {value.metric for value in getattr(result, "values", ())}
        # ``calibrate`` writes ages or classes.
        if display.within or not names or not names.isdisjoint(display.kind.metrics):
            yield from display.pictures.figures(result)
