"""``moecore.stages.calibrate PHASE METHOD SEED``: fits a calibrator, and evaluates it."""

from pathlib import Path

from moecore.brain.age_calibration import AgeCalibration
from moecore.core.config import Config
from moecore.data.prepared import Prepared
from moecore.measure import calibration
from moecore.measure.base import MeasuredModel
from moecore.run.run_record import record_run
from moecore.run.stage_entry import run_stage
from moecore.run.stage_inputs import read_stage_inputs
from moecore.study.params_reader import read_params
from moecore.study.run_and_claims import PhaseName
from moecore.training.artifacts import load_model
from moecore.training.runtime import tune_runtime

CALIBRATED: dict[str, type[calibration.ModelCalibration]] = {  # by what the calibrator predicts
    "classes": calibration.ClassCalibration,
    "numbers": AgeCalibration,
}


class Params(Config):
    calibrate: calibration.Calibrate


def calibrate(phase: PhaseName, method: str, seed: int) -> None:
    params = read_params(Params)
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
    used = read_stage_inputs("calibrate", params, artifacts, phase, method)
    with record_run("calibrate", params, phase=phase, method=method, seed=seed, inputs=used) as run:
        model = load_model(files.model).to(tune_runtime().device)
        fit = CALIBRATED[settings.calibrator.predicts](settings=settings, files=files)
        subject = MeasuredModel(model, data)
        run.result(fit.collect_result(subject, lambda name, compute: compute()))


if __name__ == "__main__":
    run_stage(calibrate)
