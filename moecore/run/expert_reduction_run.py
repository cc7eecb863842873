"""Run the stages ``prune`` and ``merge``: reduce the experts of a pretrained model."""

import time
from pathlib import Path

from moecore.core.config import Config
from moecore.core.files import whole_folder
from moecore.data.prepared import Prepared
from moecore.run.inputs import read_stage_inputs
from moecore.run.run_record import record_run
from moecore.training.artifacts import load_model, save_model, save_words
from moecore.training.outcome import evaluate_model_outcome, save_model_score
from moecore.training.runtime import tune_runtime
from moecore.training.surgery.expert_reduction import ExpertReduction


def record_expert_reduction(
    params: Config, reduction: ExpertReduction, method: str, seed: int
) -> None:
    """Reduce the experts of artifacts/pretrain/<method>/<seed>, and evaluate the model.

    The new model is artifacts/<stage>/<method>/<seed>; a dense model is copied unchanged.
    """
    stage = reduction.section
    start = Path("artifacts/pretrain", method, str(seed))
    target = Path("artifacts", stage, method, str(seed))
    data = Prepared.open(Path("artifacts/data", stage))
    inputs = read_stage_inputs(stage, params, [data.folder, start], method=method)
    with record_run(stage, params, method=method, seed=seed, inputs=inputs) as run:
        begun = time.monotonic()
        pretrained = load_model(start).to(tune_runtime().device)
        model = reduction.reduce_model(pretrained, data.train)
        seconds = time.monotonic() - begun
        with whole_folder(target) as folder:
            save_model(folder, model)
            save_words(folder, data)
            outcome = evaluate_model_outcome(model, data, seconds)
            save_model_score(folder, outcome, data)
        run.dataset(data.card)
        run.result(outcome)
        run.model(target)
