"""``moecore.stages.measure WHAT PHASE METHOD SEED``: measured, or why it does not apply."""

from pathlib import Path
from typing import Annotated

from moecore.core.config import Config
from moecore.data.prepared import Prepared
from moecore.measure.base import MeasuredModel, Skipped, find_measurement
from moecore.run.resume import record_measurement
from moecore.run.stage_entry import run_stage
from moecore.study.sections import Phase
from moecore.study.settings import (
    ParamsKeyTemplate,
    read_params,
    read_section_as_params,
)
from moecore.training.artifacts import guide_folder, load_guide, load_model
from moecore.training.method import Method
from moecore.training.runtime import tune_runtime


class MethodParams(Config):
    """Settings that a measurement of region experts reads beside its own section."""

    method: Annotated[Method, ParamsKeyTemplate("methods.{method}")]


def measure(what: str, phase: Phase, method: str, seed: int) -> None:
    measurement = find_measurement(what)
    params = read_section_as_params(what, measurement)
    with record_measurement(what, params, phase, method, seed) as (run, parts):
        subject = open_subject(phase, method, seed, measurement.guided, parts.folder)
        if measurement.regions and phase == "pretrain":  # fine-tuning has no region experts
            named = read_params(MethodParams, method=method).method.regions
            subject = subject._replace(regions=named.experts if named else ())
        reason = measurement.applies(subject)
        if reason is None:
            run.result(getattr(params, what).collect_result(subject, parts.part))
        else:
            run.result(Skipped(skipped=reason))


def open_subject(phase: Phase, method: str, seed: int, guided: bool, work: Path) -> MeasuredModel:
    """Return the trained model and its data; its teacher only where a measurement looks at it."""
    device = tune_runtime(work=work).device
    model = load_model(Path("artifacts") / phase / method / str(seed)).to(device)
    data = Prepared.open(Path("artifacts/data") / phase)
    # The teacher was fitted on the images of the pretraining.
    guide = load_guide(guide_folder(method, seed)) if guided and phase == "pretrain" else None
    return MeasuredModel(model, data, guide, device)


if __name__ == "__main__":
    run_stage(measure)
