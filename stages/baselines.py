"""``moecore.stages.baselines PHASE``: fits simple classifiers on the pixels of a phase's images."""

from pathlib import Path
from typing import Annotated, Any

from threadpoolctl import threadpool_limits

from moecore.core import config, files
from moecore.data.prepared import Prepared
from moecore.measure.pixel_baselines import Baselines, measure_baselines
from moecore.run import run_record, stage_entry
from moecore.study.params_reader import ParamsKeyTemplate, read_stage_params
from moecore.study.run_and_claims import PhaseName


class Params(config.Config):
    seeds: Annotated[tuple[int, ...], ParamsKeyTemplate("run.seeds")]
    training: Annotated[dict[str, Any], ParamsKeyTemplate("{data}")]  # may have ``shots``
    baselines: Baselines


def baselines(phase: PhaseName) -> None:
    """Fit pixel classifiers to the training images of the first seed of ``phase``; write scores."""
    params = read_stage_params(Params, data=phase)
    folder = Path("artifacts/data", phase)
    with run_record.record_resumable_run("baselines", params, [folder], phase=phase) as (run, work):
        parts = files.ResumableParts(work, run.inputs)
        data = Prepared.open(folder)
        shots = params.training.get("shots")
        with threadpool_limits(1):  # the last digits do not depend on the machine's cores
            result = measure_baselines(data, params.baselines, shots, params.seeds[0], parts.part)
        run.write_result(result)


if __name__ == "__main__":
    stage_entry.run_stage(baselines)
