"""``moecore.stages.teacher SEED``: trains a dense teacher, or loads its weights through timm."""

from pathlib import Path

import torch

from moecore.core import config, files, streams
from moecore.data import loader, prepared
from moecore.measure.base import SkipReason
from moecore.nn.backbones.base_model import ImageSpec
from moecore.run.stage_entry import run_stage
from moecore.run.training import training_run
from moecore.study.params_reader import read_stage_params
from moecore.training.artifacts import save_model
from moecore.training.job import Objective, build_training_job
from moecore.training.outcome import build_outcome
from moecore.training.teachers import base, no_teacher


class Params(config.Config):
    teacher: base.Teacher


def teacher(seed: int) -> None:
    """Write the teacher: loaded, or trained on images drawn by ``seed``, as for its students."""
    params = read_stage_params(Params)
    settings = params.teacher
    target = Path("artifacts/teacher", str(seed))
    teacher_seed = streams.derived_seed("teacher", seed)
    first = prepared.Prepared.open("artifacts/data/pretrain")
    trains = settings.training is not None
    with training_run("teacher", params, first, [], None, seed, trains) as training:
        if isinstance(settings, no_teacher.NoTeacher):
            with files.atomic_folder(target) as folder:
                files.write_json(folder / "absent.json", {"teacher": settings.kind})
            training.record.write_result(SkipReason(skipped=f"teacher.kind is {settings.kind}"))
            return
        data = settings.open_data(first, training.work)
        torch.manual_seed(teacher_seed)
        model = settings.build(ImageSpec.from_card(data.card))
        result: config.Config = SkipReason(skipped=f"{settings.kind}: it was trained elsewhere")
        if settings.training is not None:
            objective = Objective((), settings.training.label_smoothing)
            subset = loader.draw_few_shot_train_indices(data, settings.training.shots, seed)
            device = training.runtime.device
            job = build_training_job(model, data, objective, device, subset=subset)
            training.train(job, settings.training, teacher_seed)
            result = build_outcome(model, data, settings.training, training.read_log())
        with files.atomic_folder(target) as folder:
            save_model(folder, model)
        training.record.write_result(result)
        training.record.log_model_folder(target)


if __name__ == "__main__":
    run_stage(teacher)
