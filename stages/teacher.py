"""Stage ``teacher``: a dense model trained here, pretrained weights through timm, or none."""

from pathlib import Path

import torch

from moecore.core.config import Config
from moecore.core.files import whole_folder, write_json
from moecore.data.prepared import Prepared
from moecore.measure.base import Skipped
from moecore.nn.backbones.image import ImageSpec
from moecore.run.stage import run_stage
from moecore.run.training import training_run
from moecore.study.params import read
from moecore.training.artifacts import save_model
from moecore.training.job import job_for
from moecore.training.objective import Objective
from moecore.training.outcome import Outcome, outcome
from moecore.training.teachers import Teacher
from moecore.training.teachers.no_teacher import NoTeacher

TARGET = Path("artifacts/teacher")


class Params(Config):
    """What this stage reads of params.yaml."""

    teacher: Teacher


def teacher() -> None:
    """Obtain the teacher that ``teacher`` describes."""
    params = read(Params)
    settings = params.teacher
    data = Prepared.open("artifacts/data/pretrain")
    with training_run("teacher", params, data, [], __file__) as training:
        if isinstance(settings, NoTeacher):
            with whole_folder(TARGET) as folder:
                write_json(folder / "absent.json", {"teacher": settings.kind})
            training.run.result(Skipped(skipped=f"teacher.kind is {settings.kind}"))
            return
        torch.manual_seed(settings.seed)
        model = settings.build(ImageSpec.from_card(data.card))
        schedule = settings.training
        found: Skipped | Outcome = Skipped(
            skipped=f"a teacher of kind {settings.kind} is trained elsewhere"
        )
        if schedule is not None:
            objective = Objective((), schedule.label_smoothing)
            job = job_for(model, data, objective, training.runtime.device)
            training.train(job, schedule, settings.seed)
            found = outcome(model, data, schedule, training.log())
        with whole_folder(TARGET) as folder:
            save_model(folder, model)
        training.run.result(found)
        training.run.model(TARGET)


if __name__ == "__main__":
    run_stage(teacher)
