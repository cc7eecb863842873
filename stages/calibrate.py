"""``moecore.stages.calibrate PHASE METHOD SEED``: fits a calibrator, and evaluates it."""

from pathlib import Path

from moecore.brain.age_calibration import AgeCalibrationMeasurement
from moecore.core.config import Config
from moecore.data.prepared import Prepared
from moecore.measure import base, calibration
from moecore.run import stage_entry, stage_inputs
from moecore.run.run_record import record_run
from moecore.study import params_reader, run_and_claims
from moecore.training.artifacts import load_model
from moecore.training.runtime import tune_runtime

CALIBRATION_CLASSES: dict[str, type[calibration.CalibrationMeasurementBase]] = {  # by prediction
    "classes": calibration.ClassCalibration,
    "numbers": AgeCalibrationMeasurement,
}


class Params(Config):
    calibrate: calibration.Calibrate


def calibrate(phase: run_and_claims.PhaseName, method: str, seed: int) -> None:
    params = params_reader.read_stage_params(Params)
    settings = params.calibrate
    data = Prepared.open(Path("artifacts/data") / phase)
    calibration.check_calibrator_fits_task(settings, data.task, phase)
    item = f"{phase}/{method}/{seed}"
    files = calibration.CalibrationPaths(
        item=item,
        model=Path("artifacts") / item,
        out_of_fold=Path("artifacts/out_of_fold") / item / "predictions.csv",
        out=Path("artifacts/calibrate") / item,
    )
    artifacts = [data.folder, files.model]
    used = stage_inputs.build_stage_inputs("calibrate", params, artifacts, phase, method)
    with record_run("calibrate", params, phase=phase, method=method, seed=seed, inputs=used) as run:
        model = load_model(files.model).to(tune_runtime().device)
        fit = CALIBRATION_CLASSES[settings.calibrator.predicts](settings=settings, files=files)
        subject = base.MeasuredModel(model, data)
        run.write_result(fit.collect_result(subject, lambda name, compute: compute()))


if __name__ == "__main__":
    stage_entry.run_stage(calibrate)
