"""Calibration for data whose labels are ages: correct, measure, and write what a user needs."""

from pathlib import Path

from moecore.brain.age_calibration import render_model_card
from moecore.brain.age_measurement import (
    AgeResult,
    Ages,
    CalibratorFit,
    fit_age_line,
    summarize_age_errors,
)
from moecore.brain.prediction_table import (
    age_range_flags,
    collect_training_ranges,
    out_of_range_flags,
    prediction_rows,
    write_predictions,
)
from moecore.brain.tissue_ridge import measure_tissue_ridge
from moecore.core.files import whole_folder, write_sealed, write_whole
from moecore.core.plain_values import to_jsonable
from moecore.data.prepared import SPLITS
from moecore.measure.base import MeasuredModel
from moecore.measure.calibration import Calibrate, CalibrationFiles
from moecore.nn.predict import predict_in_batches


def calibrate_ages(
    subject: MeasuredModel, settings: Calibrate, files: CalibrationFiles
) -> AgeResult:
    """A line from the split that the calibrator names; writes the folder ``files.out``."""
    data = subject.data
    predicted = {}
    for split in SPLITS:
        volumes = getattr(data, split).images
        outputs, _ = predict_in_batches(subject.model, volumes, settings.batch, routing=False)
        predicted[split] = outputs[:, 0].double().numpy()
    ages = Ages.of(data, predicted, files.model / "model.safetensors")
    line = fit_age_line(ages, settings.calibrator, files.out_of_fold, settings.on_refusal)
    result = summarize_age_errors(ages, line)
    if settings.tissue_ridge is not None:
        ridge = measure_tissue_ridge(data, settings.tissue_ridge)
        result = result.model_copy(update={"tissue_ridge": ridge})
    write_calibration_folder(files.out, ages, line, result, files.item)
    return result


def write_calibration_folder(
    folder: Path, ages: Ages, line: CalibratorFit, result: AgeResult, item: str
) -> None:
    """Write the folder that predictions of new volumes need, all or nothing.

    calibrator.json (where there is one), reference.json, predictions.csv of all splits, and
    MODEL_CARD.md. item: phase/method/seed.
    """
    reference = collect_training_ranges(ages.data, result.interval, ages.sha256)
    rows = []
    for split in SPLITS:
        corrected = ages.correct_split(split, line.fitted)
        volumes = getattr(ages.data, split).images
        flags = [
            [
                *out_of_range_flags(volume, reference),
                *age_range_flags(float(best), float(age), reference),
            ]
            for volume, best, age in zip(volumes, corrected.best, ages.known(split), strict=True)
        ]
        radius = result.interval.radius
        rows += prediction_rows(ages.subjects[split], split, corrected, radius, flags)
    with whole_folder(folder) as target:
        if line.fitted:
            write_sealed(target / "calibrator.json", line.fitted.model_dump(mode="json"))
        write_sealed(target / "reference.json", to_jsonable(reference))
        write_predictions(target / "predictions.csv", rows)
        card = render_model_card(ages.data.card, result, item)
        write_whole(target / "MODEL_CARD.md", card)
