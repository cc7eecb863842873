"""Stage ``pretrain``: trains one method from scratch with one seed.

``moecore.stages.pretrain vmoe 0`` writes artifacts/pretrain/vmoe/0/. After a kill it resumes.
"""

from pathlib import Path
from typing import Annotated

from moecore.core import config, files
from moecore.data.prepared import Prepared
from moecore.measure.routing_metrics.epoch_routing import EpochRecorder
from moecore.nn.backbones.base_model import Backbone
from moecore.run.stage_entry import run_stage
from moecore.run.training import training_run
from moecore.study.params_reader import ParamsKeyTemplate, read_stage_params
from moecore.training.artifacts import GUIDE_FOLDER, save_guide, save_model, save_vocab
from moecore.training.method import Method
from moecore.training.outcome import build_outcome, save_model_score
from moecore.training.phase_trainings import build_pretraining
from moecore.training.settings import Training


class Params(config.Config):
    model: Backbone
    pretrain: Training
    method: Annotated[Method, ParamsKeyTemplate("methods.{method}")]


def pretrain(method: str, seed: int) -> None:
    """Train ``method`` on artifacts/data/pretrain, with its teacher if it has one."""
    params = read_stage_params(Params, method=method)
    settings = params.method.merge_pretrain_settings(params.pretrain)
    names = params.method.expert_names
    guide = Path("artifacts/teacher_router", method, str(seed))
    target = Path("artifacts/pretrain", method, str(seed))
    data = Prepared.open("artifacts/data/pretrain")
    with training_run("pretrain", params, data, [guide], method, seed) as training:
        device = training.runtime.device
        job = build_pretraining(params.method, params.model, settings, data, guide, seed, device)
        model = job.complete_model
        watch = EpochRecorder(training.work, model, data, names, settings.epochs, seed)
        training.train(job, settings, seed, watch.record)
        with files.atomic_folder(target) as folder:
            save_model(folder, model)
            save_vocab(folder, data)
            # A model that routes by its teacher already contains it.
            if params.method.joint and job.guide is not None and model is job.model:
                save_guide(folder / GUIDE_FOLDER, job.guide)
            result = build_outcome(model, data, settings, training.read_log())
            save_model_score(folder, result, data)
        training.record.write_result(result.with_routing(watch.collect_routing()))
        training.record.log_model_folder(target)


if __name__ == "__main__":
    run_stage(pretrain)
