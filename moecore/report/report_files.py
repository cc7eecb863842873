"""The files of a report, without its numbers as JSON.

The figures among them are for ``dvc plots show`` and ``diff``: they open without a network.
"""

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from moecore.brain.age_calibration import AgeCalibration
from moecore.brain.age_measurement import PREDICTIONS
from moecore.measure.robustness import Robustness
from moecore.measure.sizes import Sizes
from moecore.report.claims.claims_table import claims_markdown
from moecore.report.claims.evaluation import EvaluatedClaim
from moecore.report.figures.training_figures import training_curves
from moecore.report.headline_quantities import shown_attack
from moecore.report.page.explorer_page import FILE, explorer, has_explorer_images
from moecore.report.page.report_page import render_report, svg
from moecore.report.page.view import Picture
from moecore.report.pictures import sizes
from moecore.report.pictures.robustness import draw_attack_curve
from moecore.report.tables.headline_metrics import render_metrics_files
from moecore.report.typed_results import Measured, Phase, Results

INK = "#333"


def render_report_files(results: Results, evaluated: Sequence[EvaluatedClaim]) -> dict[str, str]:
    """Path below reports/ → content."""
    phases = list(results.phases.values())
    files = {
        "index.html": render_report(
            results, evaluated, FILE if has_explorer_images(results) else None
        ),
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
    """Path below reports/ → SVG: how trainings went and what attacks leave, and the sizes."""
    pictures = {}
    for phase in results.phases.values():
        trained = {method: outcomes for method, outcomes in phase.outcomes.items() if outcomes}
        if any(outcome.curve for seeds in trained.values() for outcome in seeds):
            picture = Picture(training_curves(trained), f"{phase.name}: training")
            pictures[f"{phase.name}_training"] = picture
        if attack := shown_attack(phase):
            pictures[f"{phase.name}_attacks"] = draw_attack_curve(phase, attack)
    if counted := results.alone.get(Sizes):
        for name, figure in sizes.figures(counted):
            pictures[f"sizes_{name}"] = Picture(figure, name.replace("_", " "))
    texts = {name: svg(picture.figure, picture.label) for name, picture in pictures.items()}
    ink = f'<svg color="{INK}"'  # alone in a page, a figure has no text colour to take over
    return {f"plots/{name}.svg": text.replace("<svg", ink, 1) for name, text in texts.items()}


Row = dict[str, Any]
ITEM = ("phase", "method", "seed")
ENDS = {"": "value", "_low": "low", "_high": "high"}
NUMBERS = ("mae", "corr", "slope", "intercept")


def training_csv(results: Results) -> str:
    """Every logged point of every training: phase, method, seed, step, epoch, losses and scores."""
    words = dict.fromkeys(phase.task.history_name for phase in results.phases.values())
    scores = [f"{split}_{word}" for word in words for split in ("train", "validation")]

    def rows(model: Measured, phase: Phase) -> Iterator[Row]:
        if trained := model.outcome:
            yield from trained.curve

    return _csv(results, ("step", "epoch", "train_loss", *scores), rows)


def robustness_csv(results: Results) -> str:
    """Every attack of every model: phase, method, seed, attack, epsilon, score with its limits."""
    scores = dict.fromkeys(phase.task.history_name for phase in results.phases.values())

    def rows(model: Measured, phase: Phase) -> Iterator[Row]:
        if attacked := model.of(Robustness):
            for left in attacked.all("attacked"):
                score = {phase.task.history_name: left.value}
                yield left.at | score | {"low": left.low, "high": left.high}

    return _csv(results, ("attack", "epsilon", *scores, "low", "high"), rows)


def table_s1_csv(results: Results) -> str:
    """Every kind of prediction of every model: mae, corr, slope and intercept with their limits."""
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


def _csv(
    results: Results, columns: Sequence[str], rows: Callable[[Measured, Phase], Iterator[Row]]
) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(
        text, (*ITEM, *columns), extrasaction="ignore", restval="", lineterminator="\n"
    )
    writer.writeheader()
    for phase in results.phases.values():
        for method, seeds in phase.models.items():
            for seed, model in seeds.items():
                item = dict(zip(ITEM, (phase.name, method, seed), strict=True))
                writer.writerows(item | row for row in rows(model, phase))
    return text.getvalue()
