"""Stages ``finetune`` and ``adversarial``: train a pretrained model on other or attacked data."""

from pathlib import Path
from typing import Annotated, Literal

from moecore.core import config, files
from moecore.data.prepared import Prepared
from moecore.measure.routing_metrics.epoch_routing import finetuning_agreement
from moecore.nn.predict import predict_in_batches
from moecore.run.stage_entry import run_stage
from moecore.run.training import training_run
from moecore.study.params_reader import ParamsKeyTemplate, read_stage_params
from moecore.training import artifacts, outcome
from moecore.training.method import Method
from moecore.training.phase_trainings import build_finetuning
from moecore.training.settings import AdversarialFinetuning, Finetuning


class Params(config.Config):
    finetune: Finetuning
    method: Annotated[Method, ParamsKeyTemplate("methods.{method}")]


class AdversarialFinetuneParams(config.Config):
    adversarial: AdversarialFinetuning
    method: Annotated[Method, ParamsKeyTemplate("methods.{method}")]


def finetune(phase: Literal["finetune", "adversarial"], method: str, seed: int) -> None:
    """Fine-tune artifacts/pretrain/``method``/``seed`` on artifacts/data/``phase``."""
    kind = Params if phase == "finetune" else AdversarialFinetuneParams
    params = read_stage_params(kind, method=method)
    settings = getattr(params, phase)
    start = Path("artifacts/pretrain", method, str(seed))
    guide = artifacts.guide_folder(method, seed)
    target = Path("artifacts", phase, method, str(seed))
    data = Prepared.open(Path("artifacts/data", phase))
    with training_run(phase, params, data, [guide, start], method, seed) as training:
        device = training.runtime.device
        job = build_finetuning(params.method, settings, data, start, guide, seed, device)
        model = job.complete_model
        _, before = predict_in_batches(model, data.test.images, batch=250)
        training.train(job, settings, seed)
        _, after = predict_in_batches(model, data.test.images, batch=250)
        with files.atomic_folder(target) as folder:
            artifacts.save_model(folder, model)
            artifacts.save_vocab(folder, data)
            result = outcome.build_outcome(model, data, settings, training.read_log())
            outcome.save_model_score(folder, result, data)
        settling = finetuning_agreement(before, after, data.test.people)
        training.record.write_result(result.with_routing(settling))
        training.record.log_model_folder(target)


if __name__ == "__main__":
    run_stage(finetune)
