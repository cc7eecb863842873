"""``moecore.stages.out_of_fold METHOD SEED``: predicts training volumes by cross-validation."""

from pathlib import Path
from typing import Annotated, Any

from moecore.brain.age_predictions import FoldRecipe, OutOfFoldSettings, train_folds_and_write_ages
from moecore.core.config import Config
from moecore.core.files import atomic_folder, write_json
from moecore.data.prepared import Prepared
from moecore.measure.base import SkipReason
from moecore.measure.calibrators.base import Calibrator
from moecore.nn.backbones.base_model import Backbone
from moecore.run.run_record import printing_progress, record_resumable_run
from moecore.run.stage_entry import run_stage
from moecore.study.params_reader import ParamsKeyTemplate, read_stage_params
from moecore.training.method import Method
from moecore.training.runtime import tune_runtime
from moecore.training.settings import Training


class Params(Config):
    model: Backbone
    pretrain: Training
    method: Annotated[Method, ParamsKeyTemplate("methods.{method}")]
    calibrator: Annotated[Calibrator, ParamsKeyTemplate("calibrate.calibrator")]
    out_of_fold: OutOfFoldSettings = OutOfFoldSettings()


def out_of_fold(method: str, seed: int) -> None:
    params = read_stage_params(Params, method=method)
    named = {"phase": "pretrain", "method": method, "seed": seed}
    inputs = [Path("artifacts/data/pretrain")]
    out = Path("artifacts/out_of_fold/pretrain", method, str(seed))
    with record_resumable_run("out_of_fold", params, inputs, **named) as (run, work):
        if params.calibrator.split != "out_of_fold":
            with atomic_folder(out) as folder:
                write_json(folder / "absent.json", {"calibrator": params.calibrator.model_dump()})
            run.write_result(SkipReason(skipped="the calibration is fitted on other predictions"))
            return
        data = Prepared.open(inputs[0])

        def follow(fold: int, steps: int, learning: Any) -> None:
            with printing_progress(f"out_of_fold {method} seed {seed} fold {fold}", steps) as bar:
                for metrics in learning:
                    bar.update(metrics.step)

        folds = params.out_of_fold.folds
        recipe = FoldRecipe(params.model, params.pretrain, params.method, folds, seed)
        runtime = tune_runtime(work=work)
        result = train_folds_and_write_ages(
            recipe, data, runtime, work, out, follow, run.log, run.inputs
        )
        run.write_result(result)


if __name__ == "__main__":
    run_stage(out_of_fold)
