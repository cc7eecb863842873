"""Stage ``teacher``: a dense model trained here, or pretrained weights through timm; none where no method needs one.

``python -m stages.teacher`` reads ``teacher`` of params.yaml and writes artifacts/teacher/.
"""

from pathlib import Path

import torch

from moecore.artifacts import save_model
from moecore.backbones.image import ImageSpec
from moecore.config import Config
from moecore.data.prepared import Prepared
from moecore.files import whole_folder, write_json
from moecore.history import record
from moecore.params import read
from moecore.resume import work_folder
from moecore.stage import run_stage
from moecore.supervise import train, task_for, trained
from moecore.teachers import Teacher
from moecore.training.checkpoint import Checkpoint
from moecore.training.objective import Objective
from moecore.training.runtime import tune

DATA, TARGET = Path("artifacts/data/pretrain"), Path("artifacts/teacher")


class Params(Config):
    """What this stage reads of params.yaml."""

    teacher: Teacher


def teacher() -> None:
    """Obtain the teacher that ``teacher`` describes."""
    settings = read(Params).teacher
    data, runtime = Prepared.open(DATA), tune()
    with work_folder("teacher", settings, [DATA], __file__) as work, record("teacher", settings, work=work) as run:
        run.dataset(data.card)
        torch.manual_seed(settings.seed)
        model = settings.build(ImageSpec.from_card(data.card))
        if model is None:
            with whole_folder(TARGET) as folder:
                write_json(folder / "absent.json", {"teacher": settings.kind})
            run.summary({})
            return
        if settings.training is not None:
            task = task_for(model, data, Objective((), settings.training.label_smoothing), runtime)
            train(task, settings.training, settings.seed, runtime, run, Checkpoint(work), "teacher")
        with whole_folder(TARGET) as folder:
            save_model(folder, model)
        run.summary({} if settings.training is None else trained(model, data, settings.training, run))
        run.model(TARGET)


if __name__ == "__main__":
    run_stage(teacher)
