"""Run a measurement of a trained model, a calculation, or a reduction of experts, and record it."""

import time
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

from pydantic import create_model

from moecore.core.config import Config
from moecore.core.files import ResumableParts, atomic_folder
from moecore.data.prepared import Prepared
from moecore.measure import base
from moecore.measure.robustness import TRANSFERS
from moecore.measure.values import Found
from moecore.run import run_record, stage_inputs
from moecore.study import params_reader, run_and_claims
from moecore.training.artifacts import guide_folder, load_guide, load_model, save_model, save_vocab
from moecore.training.method import Method
from moecore.training.outcome import evaluate_to_outcome, save_model_score
from moecore.training.runtime import tune_runtime
from moecore.training.surgery.expert_reduction import ExpertReduction


class MethodSection(Config):
    """The settings of a method, of which measurements read ``regions``: one expert per tissue."""

    method: Annotated[Method, params_reader.ParamsKeyTemplate("methods.{method}")]


def measure_model(what: str, phase: run_and_claims.PhaseName, method: str, seed: int) -> Any:
    """Measure a trained model by ``what``; write and return the result, or why it was skipped."""
    measurement = base.find_measurement(what)
    section: dict[str, Any] = {what: (measurement, ...)}
    params = params_reader.read_stage_params(create_model("Params", __base__=Config, **section))
    inputs = [Path("artifacts/data", phase), Path("artifacts", phase, method, str(seed))]
    transferred = {}
    if what == "robustness":
        transferred = find_transferred_images(Path("artifacts/transferred", phase), method, seed)
        inputs += transferred.values()
    item = {"phase": phase, "method": method, "seed": seed}
    with run_record.record_resumable_run(what, params, inputs, **item) as (run, work):
        parts = ResumableParts(work, run.inputs)  # survive a kill
        device = tune_runtime(work=work).device
        data = Prepared.open(inputs[0])
        model = load_model(inputs[1]).to(device)
        # The teacher was fitted on the images of the pretraining.
        is_guided = measurement.guided and phase == "pretrain"
        guide = load_guide(guide_folder(method, seed)) if is_guided else None
        subject = base.MeasuredModel(model, data, guide, device, transferred=transferred)
        if measurement.regions and phase == "pretrain":  # fine-tuning has no region experts
            named = params_reader.read_stage_params(MethodSection, method=method).method.regions
            subject = subject._replace(regions=named.experts if named else ())
        settings: base.Measurement = getattr(params, what)
        reason = measurement.applies(subject)
        if reason is None:
            title = f"{what} {phase} {method} seed {seed}"
            pieces = settings.pieces
            with run_record.printing_progress(title, pieces) if pieces else nullcontext() as bar:
                if bar is not None:
                    parts.attach_progress_bar(bar)
                result = settings.collect_result(subject, parts.part)
        else:
            result = base.SkipReason(skipped=reason)
        run.write_result(result)
    return result


def find_transferred_images(root: Path, method: str, seed: int) -> dict[str, Path]:
    seeds = sorted(int(path.name) for path in root.glob(f"{method}/[0-9]*") if path.is_dir())
    later = [other for other in seeds if other > seed] or seeds
    items = {TRANSFERS[0]: f"dense/{seed}", TRANSFERS[1]: f"{method}/{(later or [seed])[0]}"}
    folders = {name: root / item for name, item in items.items() if item != f"{method}/{seed}"}
    return {name: folder for name, folder in folders.items() if folder.is_dir()}


def run_calculation(what: str) -> Found:
    section: dict[str, Any] = {what: (base.find_measurement(what), ...)}
    params = params_reader.read_stage_params(create_model("Params", __base__=Config, **section))
    with run_record.record_resumable_run(what, params, ()) as (run, work):
        calculation: base.Calculation = getattr(params, what)
        result = calculation.collect_values(ResumableParts(work, run.inputs).part)
        run.write_result(result)
    return result


def run_expert_reduction(
    params: Config, reduction: ExpertReduction, method: str, seed: int
) -> None:
    # The new model is artifacts/<stage>/<method>/<seed>; a dense model is copied unchanged.
    stage = reduction.section
    start = Path("artifacts/pretrain", method, str(seed))
    target = Path("artifacts", stage, method, str(seed))
    data = Prepared.open(Path("artifacts/data", stage))
    inputs = stage_inputs.build_stage_inputs(stage, params, [data.folder, start], method=method)
    with run_record.record_run(stage, params, method=method, seed=seed, inputs=inputs) as run:
        begun = time.monotonic()
        model = reduction.reduce_model(load_model(start).to(tune_runtime().device), data.train)
        seconds = time.monotonic() - begun
        with atomic_folder(target) as folder:
            save_model(folder, model)
            save_vocab(folder, data)
            outcome = evaluate_to_outcome(model, data, seconds)
            save_model_score(folder, outcome, data)
        run.log_dataset(data.card)
        run.write_result(outcome)
        run.log_model_folder(target)
