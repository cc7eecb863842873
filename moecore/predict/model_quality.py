"""Describe how good a trained model is, from the test results stored in its run."""

from pathlib import Path

from moecore.core.config import read_json_settings
from moecore.measure import base, values
from moecore.report.tables.cells import NumberFormat
from moecore.training import artifacts, outcome


def sibling_artifact(model_folder: Path, stage: str) -> Path:
    """Return the path artifacts/<stage>/<phase>/<method>/<seed> of a model's stage result."""
    model = model_folder.absolute()
    phase = model.parent.parent
    return phase.parent / stage / phase.name / model.parent.name / model.name


def calibrator_folder(model_folder: Path) -> Path:
    return sibling_artifact(model_folder, "calibrate")


def describe_model_quality(model_folder: Path) -> str:
    """Return a sentence with the model's test score, interval and, for classes, calibration."""
    path = model_folder / outcome.SCORE_FILE
    if not path.is_file():
        return f"how good this model is was not measured: there is no {path}"
    stored = read_json_settings(path, outcome.ModelScore, "the score of a model")
    score = artifacts.load_model_card(model_folder).image.task.score
    interval = stored.test_score.interval
    number_format = NumberFormat.of(score.form, [interval])
    value = f"{number_format.value_with_limits(interval, '()')} {score.unit}"
    items = f"{stored.test_count:,} test items of {stored.data}"
    text = f"{score.label} of this model: {value.rstrip()} on {items}"
    if score.form != "share":
        return text
    folder = sibling_artifact(model_folder, "measured/calibrate")
    measured = folder.with_name(f"{folder.name}.json")
    error = None
    if measured.is_file():
        result = base.read_result(measured, values.Found, "calibrate")
        error = result.find("ece_after") if isinstance(result, values.Found) else None
    if error is None:
        return f"{text}; its calibration was not measured"
    value = NumberFormat.of("number", [error.interval]).value_with_limits(error.interval, "()")
    return f"{text}; expected calibration error after calibration: {value}"
