"""Files of a report, except compare.json; its SVG plots are for ``dvc plots show`` and ``diff``."""

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

from moecore.brain.age_calibration import AgeCalibration
from moecore.brain.age_measurement import PREDICTIONS
from moecore.measure.robustness import Robustness
from moecore.report.claims.claims_table import claims_markdown
from moecore.report.claims.evaluation import EvaluatedClaim
from moecore.report.figures.training_figures import training_curves
from moecore.report.headline_quantities import shown_attack
from moecore.report.page.explorer_page import FILE, explorer, has_explorer_images
from moecore.report.page.page_objects import Picture
from moecore.report.page.report_page import render_report, svg
from moecore.report.pictures.robustness import draw_attack_curve
from moecore.report.results import list_calculations
from moecore.report.study_results import Measured, Phase, Results
from moecore.report.tables.headline_metrics import render_metrics_files

INK = "#333"


def render_report_files(results: Results, evaluated: Sequence[EvaluatedClaim]) -> dict[str, str]:
    """Return path below reports/ → text of all files: pages, claims, CSVs, metrics and plots."""
    phases = list(results.phases.values())
    explorer_file = FILE if has_explorer_images(results) else None
    files = {
        "index.html": render_report(results, evaluated, explorer_file),
        FILE: explorer(results),
        "claims.md": claims_markdown(evaluated),
        "curves/training.csv": training_csv(results),
    }
    if any(phase.results(Robustness) for phase in phases):
        files["curves/robustness.csv"] = robustness_csv(results)
    if any(phase.task.kind == "regression" for phase in phases):
        files["curves/table_s1.csv"] = table_s1_csv(results)
    return files | render_metrics_files(results) | plot_svg_files(results)


def plot_svg_files(results: Results) -> dict[str, str]:
    """Return path below reports/ → SVG plots: trainings, scores under attack, calculations."""
    pictures = {}
    for phase in results.phases.values():
        trained = {method: outcomes for method, outcomes in phase.outcomes.items() if outcomes}
        if any(outcome.curve for seeds in trained.values() for outcome in seeds):
            picture = Picture(training_curves(trained), f"{phase.name}: training")
            pictures[f"{phase.name}_training"] = picture
        if attack := shown_attack(phase):
            pictures[f"{phase.name}_attacks"] = draw_attack_curve(phase, attack)
    for display, phase in list_calculations(results):
        for name, figure in chain(*map(display.pictures.figures, phase.results(display.kind))):
            pictures[f"{display.stage}_{name}"] = Picture(figure, name.replace("_", " "))
    texts = {name: svg(picture.figure, picture.label) for name, picture in pictures.items()}
    ink = f'<svg color="{INK}"'  # a single SVG file has no page to inherit a text colour from
    return {f"plots/{name}.svg": text.replace("<svg", ink, 1) for name, text in texts.items()}


Row = dict[str, Any]
Rows = Callable[[Measured, Phase], Iterator[Row]]  # of a model of a phase
ITEM = ("phase", "method", "seed")
ENDS = {"": "value", "_low": "low", "_high": "high"}
NUMBERS = ("mae", "corr", "slope", "intercept")


def training_csv(results: Results) -> str:
    """Return a CSV with a row per logged training step: step, epoch, losses and scores."""
    names = dict.fromkeys(phase.task.history_name for phase in results.phases.values())
    scores = [f"{split}_{name}" for name in names for split in ("train", "validation")]

    def rows(model: Measured, phase: Phase) -> Iterator[Row]:
        if trained := model.outcome:
            yield from trained.curve

    return _csv(results, ("step", "epoch", "train_loss", *scores), rows)


def robustness_csv(results: Results) -> str:
    """Return a CSV with a row per model, attack and epsilon: the score with its limits."""
    scores = dict.fromkeys(phase.task.history_name for phase in results.phases.values())

    def rows(model: Measured, phase: Phase) -> Iterator[Row]:
        if attacked := model.of(Robustness):
            for value in attacked.all("attacked"):
                score = {phase.task.history_name: value.value}
                yield value.at | score | {"low": value.low, "high": value.high}

    return _csv(results, ("attack", "epsilon", *scores, "low", "high"), rows)


def table_s1_csv(results: Results) -> str:
    """Return a CSV with a row per kind of age prediction: mae, corr, slope, intercept, limits."""
    columns = {f"{name}{end}": (name, part) for name in NUMBERS for end, part in ENDS.items()}

    def rows(model: Measured, phase: Phase) -> Iterator[Row]:
        measured = model.of(AgeCalibration)
        if measured is None:
            return
        for prediction in PREDICTIONS:
            values = {
                column: getattr(number, part)
                for column, (name, part) in columns.items()
                if (number := measured.find(f"{name}_{prediction}"))
            }
            if values:
                yield {"prediction": prediction, **values}

    return _csv(results, ("prediction", *columns), rows)


def _csv(results: Results, columns: Sequence[str], rows: Rows) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, (*ITEM, *columns), extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for phase in results.phases.values():
        for method, seeds in phase.models.items():
            for seed, model in seeds.items():
                item = dict(zip(ITEM, (phase.name, method, seed), strict=True))
                writer.writerows(item | row for row in rows(model, phase))
    return text.getvalue()
