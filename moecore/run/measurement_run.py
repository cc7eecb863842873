"""Measure a trained model, for the stages ``measure``, ``routing`` and ``robustness``."""

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

from moecore.core.config import Config
from moecore.data.prepared import Prepared
from moecore.measure.base import MeasuredModel, Measurement, Skipped, find_measurement
from moecore.run.progress import report_progress
from moecore.run.run_record import record_measurement
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
    """Additional settings of measurements of region experts."""

    method: Annotated[Method, ParamsKeyTemplate("methods.{method}")]


def measure_model(what: str, phase: Phase, method: str, seed: int) -> Any:
    """Measure a trained model; write and return its values, or the reason to skip it."""
    measurement = find_measurement(what)
    params = read_section_as_params(what, measurement)
    with record_measurement(what, params, phase, method, seed) as (run, parts):
        subject = open_subject(phase, method, seed, measurement.guided, parts.folder)
        if measurement.regions and phase == "pretrain":  # fine-tuning has no region experts
            named = read_params(MethodParams, method=method).method.regions
            subject = subject._replace(regions=named.experts if named else ())
        settings: Measurement = getattr(params, what)
        reason = measurement.applies(subject)
        if reason is None:
            title = f"{what} {phase} {method} seed {seed}"
            with (
                report_progress(title, settings.pieces) if settings.pieces else nullcontext() as bar
            ):
                if bar is not None:
                    parts.show_progress(bar)
                result = settings.collect_result(subject, parts.part)
        else:
            result = Skipped(skipped=reason)
        run.result(result)
    return result


def open_subject(phase: Phase, method: str, seed: int, guided: bool, work: Path) -> MeasuredModel:
    """Load the trained model and its data, and its teacher for a guided measurement."""
    device = tune_runtime(work=work).device
    model = load_model(Path("artifacts") / phase / method / str(seed)).to(device)
    data = Prepared.open(Path("artifacts/data") / phase)
    # The teacher was fitted on the images of the pretraining.
    guide = load_guide(guide_folder(method, seed)) if guided and phase == "pretrain" else None
    return MeasuredModel(model, data, guide, device)
