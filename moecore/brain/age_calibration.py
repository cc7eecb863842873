"""Calibrate a brain-age model, and write its calibrator, predictions and model card."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moecore.brain import age_correction, age_errors, age_predictions
from moecore.brain.age_correction import AgeResult, ModelAges, fit_calibrator
from moecore.brain.tissue_ridge import measure_tissue_ridge
from moecore.core.files import atomic_folder, to_jsonable, write_atomic, write_json_sha256
from moecore.data.prepared import SPLITS
from moecore.measure.base import MeasuredModel
from moecore.measure.calibration import CalibrationMeasurementBase
from moecore.measure.values import OnPage, Values
from moecore.nn.predict import predict_in_batches
from moecore.statistics.intervals import Estimate


class AgeCalibrationMeasurement(CalibrationMeasurementBase):
    """Measurement that calibrates predicted ages, and reports errors before and after it."""

    metrics = age_correction.METRICS
    page = OnPage("calibration", place=3)

    def measure(self, subject: MeasuredModel, out: Values) -> None:
        """Fit and write a calibrator; put the values of ``age_correction.METRICS`` into ``out``."""
        data, settings = subject.data, self.settings
        predicted = {}
        for split in SPLITS:
            volumes = getattr(data, split).images
            outputs, _ = predict_in_batches(subject.model, volumes, settings.batch, routing=False)
            predicted[split] = outputs[:, 0].double().numpy()
        ages = ModelAges.of(data, predicted, self.files.model / "model.safetensors")
        fit = fit_calibrator(ages, settings.calibrator, self.files.out_of_fold, settings.on_refusal)
        result = age_correction.summarize_age_errors(ages, fit)
        if settings.tissue_ridge is not None:
            result = result._replace(tissue_ridge=measure_tissue_ridge(data, settings.tissue_ridge))
        write_calibration_folder(self.files.out, ages, fit, result, self.files.item)
        out.people = data.test.people
        result.put_metrics(out)


def write_calibration_folder(
    folder: Path, ages: ModelAges, line: age_correction.CalibratorFit, result: AgeResult, item: str
) -> None:
    """Write calibrator.json, reference.json, predictions.csv and MODEL_CARD.md to ``folder``."""
    # item: phase/method/seed.
    reference = age_predictions.collect_training_ranges(ages.data, result.interval, ages.sha256)
    rows = []
    for split in SPLITS:
        corrected = ages.correct_split(split, line.fitted)
        volumes = getattr(ages.data, split).images
        flags = [
            age_predictions.flag_volume(volume, float(best), float(age), reference)
            for volume, best, age in zip(volumes, corrected.best, ages.known(split), strict=True)
        ]
        subjects, radius = ages.subjects[split], result.interval.radius
        rows += age_predictions.prediction_rows(subjects, split, corrected, radius, flags)
    with atomic_folder(folder) as target:
        if line.fitted:
            write_json_sha256(target / "calibrator.json", line.fitted.model_dump(mode="json"))
        write_json_sha256(target / "reference.json", to_jsonable(reference))
        age_predictions.write_predictions(target / "predictions.csv", rows)
        write_atomic(target / "MODEL_CARD.md", render_model_card(ages.data.card, result, item))


SIMULATED_DATA_WARNING = """\
**The volumes are SIMULATED.** They show that the software works: that it finds an effect of age \
that was put in, and how large its errors are on this simulation. They can support no statement \
about people, patients, scanners or diseases. The error on this simulation does not tell the error \
on real scans."""
REAL_DATA_CAVEAT = """\
The volumes are scans of people. The numbers hold only for people, scanners and preparations like \
this cohort's."""
MISUSE_WARNINGS = """\
- **No diagnosis and no decision about a person.** The interval of one prediction is wide (see \
above); a large brain-PAD is no finding.
- **No use outside the age range, the scanners and the preparation of the training data.** Volumes \
unlike these are flagged in `qc_flags`:
  a flagged prediction must not be used, and an unflagged prediction is not necessarily right.
- **No comparison of groups that differ in age, sex, site or head size** without taking these into \
account: brain-PAD depends on age by
  construction, and the correction removes that dependence only for people like those it was \
fitted to.
- **No causal reading.** Brain-PAD (predicted minus known age) is not a measured rate of ageing, \
nor brain health, nor a biological age. It
  mixes individual anatomy, errors of the model and artefacts of the scan.
- **No selection of people** (insurance, employment, asylum, access to treatment)."""
USES_AGE_NOTE = """\
The correction uses the known age: it corrects the gap (brain-PAD) of people whose age is known, \
and does not predict ages. It therefore has no MAE, and intervals are around the uncorrected \
predictions."""
ERRORS_HEAD = """\
| Prediction | MAE, years | corr(ŷ − y, y) | slope | intercept |
| --- | --- | --- | --- | --- |"""
GAPS_HEAD = """\
| Gap against diagnosis | difference, years | at equal age and sex | AUC |
| --- | --- | --- | --- |"""


def render_model_card(card: Mapping[str, Any], result: AgeResult, item: str) -> str:
    """Return MODEL_CARD.md as text; card: of the data set; item: phase/method/seed of the model."""
    title = f"# Brain-age model {item}"
    low, high = card["target_range"]
    size = " × ".join(map(str, card["size"]))
    edges = " × ".join(f"{edge:g}" for edge in card["voxel_mm"])
    lines = [f"{card['name']}; {card['source']}. Licence: {card['licence']}."]
    for split, counts in card["counts"].items():
        sexes = ", ".join(f"{name} {number}" for name, number in counts.items())
        lines.append(f"{split}: {card['images'][split]} volumes ({sexes}).")
    lines += [
        f"Ages in training: {low:.1f} to {high:.1f} {result.unit}.",
        f"Volumes of {size} voxels of {edges} mm.",
        f"Volumes skipped when the cohort was read: {len(card['skipped'])}.",
        f"Weights: sha256 {result.predictor_sha256}.",
    ]
    sections = [
        f"{title} (SIMULATED data)" if result.simulated else title,
        SIMULATED_DATA_WARNING if result.simulated else REAL_DATA_CAVEAT,
        "## Data",
        "\n".join(f"- {line}" for line in lines),
        "## Error on the test split",
        _model_card_error_lines(result),
        "## Not for",
        MISUSE_WARNINGS,
    ]
    return "\n\n".join(sections) + "\n"


def _model_card_error_lines(result: AgeResult) -> str:
    rows = [_error_row("as predicted", result.raw)]
    if result.pooled is not None:
        rows.append(_error_row("corrected, one line", result.pooled))
    if result.sex_specific is not None:
        rows.append(_error_row("corrected, a line per sex", result.sex_specific))
    low, high = result.age_range
    about = (
        f"{result.n_test} test volumes, ages {low:.1f} to {high:.1f}; in brackets 95 % intervals "
        "over participants. Always predicting the median age of the training split has an MAE of "
        f"{result.median_mae:.2f} {result.unit}."
    )
    if (ridge := result.tissue_ridge) is not None:
        title = "baseline: ridge on tissue volumes"
        if ridge.harmonise != "none":
            title += f", {ridge.harmonise}"
        if ridge.reference:
            title += f", {ridge.n_test} volumes outside the reference parts"
        rows.append(_error_row(title, ridge.errors))
    correction = f"No correction was fitted: {result.refused}."
    if not result.refused:
        split = result.fit_on.replace("_", " ")
        correction = f"The correction was fitted on {result.n_fit} predictions ({split})."
    if result.uses_age:
        correction += f" {USES_AGE_NOTE}"
    lines = ["\n".join([ERRORS_HEAD, *rows]), about, correction, _interval_line(result.interval)]
    if result.diagnosis_gaps:
        lines.append("\n".join([GAPS_HEAD, *map(_diagnosis_row, result.diagnosis_gaps)]))
    return "\n\n".join(lines)


def _diagnosis_row(gap: age_errors.DiagnosisGap) -> str:
    kind = "corrected" if gap.corrected else "raw"
    cells = " | ".join(map(_format_estimate, (gap.difference, gap.adjusted, gap.auc)))
    title = f"{gap.diagnosis} (n {gap.n}) against {gap.reference} (n {gap.n_reference}), {kind}"
    return f"| {title} | {cells} |"


def _error_row(title: str, errors: age_errors.AgeErrors) -> str:
    cells = (errors.mae, errors.corr, errors.slope, errors.intercept)
    return f"| {title} | {' | '.join(map(_format_estimate, cells))} |"


def _interval_line(interval: age_predictions.ConformalInterval) -> str:
    if interval.radius is None or interval.coverage is None:
        return f"No interval for one prediction: {interval.n} validation participants are too few."
    return (
        f"Interval of a single prediction ({interval.level:.0%}, split conformal, {interval.n} "
        f"validation participants): ± {interval.radius:.1f} years; it contains "
        f"{interval.coverage.value:.0%} of the test volumes."
    )


def _format_estimate(estimate: Estimate | None) -> str:
    if estimate is None:
        return "–"
    if estimate.low is None:
        return f"{estimate.value:.3f}"
    return f"{estimate.value:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"
