"""The trainings of the stages: teacher routers, pretrain and finetune.

First weights are drawn from the global generator, set by ``seed``, a teacher's routers from their
own stream. All later draws are functions of (seed, step).
"""

from pathlib import Path
from typing import NamedTuple

import torch

from moecore.core.files import UserError
from moecore.core.streams import derived_seed
from moecore.data.loader import few_shot_indices
from moecore.data.prepared import Prepared
from moecore.nn.backbones.base_model import Backbone, BackboneModel, ImageSpec, Model
from moecore.training.artifacts import load_adapted_model, load_guide
from moecore.training.guide import Guide, attach_required_guide, build_guide
from moecore.training.job import Objective, TrainingJob, build_training_job
from moecore.training.method import Method
from moecore.training.settings import Finetuning, Training
from moecore.training.single_tissue_volumes import build_tissue_isolation
from moecore.training.upcycle import inherit_pretrained_windows, upcycle_model
from moecore.training.upcycling_kinds import Drop


class JobAndModel(NamedTuple):
    """A training that is ready to start, and the model as used: alone, or with its teacher."""

    job: TrainingJob
    model: Model


def build_unfitted_guide(
    method: Method, backbone: Backbone, teacher: BackboneModel, seed: int, device: str
) -> Guide:
    """Return the teacher of ``seed`` with routers for ``method`` that are not fitted yet."""
    torch.manual_seed(derived_seed("teacher_router", seed))
    return build_guide(teacher, method, method.merge_model_settings(backbone).stages).to(device)


def text_stream_length(data: Prepared, batch: int) -> int | None:
    """Return the words in each of ``batch`` streams of a training text; None without text."""
    if not data.task.long:
        return None
    test_words, block = len(data.tokens("test")), data.card["size"][0]
    if test_words // batch <= block:
        raise UserError(
            f"batch is {batch}, and the text has {test_words:,} test tokens; allowed: 1 to "
            f"{test_words // (block + 1)} streams of a block of {block}"
        )
    return len(data.tokens("train")) // batch


def build_pretraining(
    method: Method,
    backbone: Backbone,
    settings: Training,
    data: Prepared,
    guide: Path,
    seed: int,
    device: str,
) -> JobAndModel:
    """Return the training of ``method`` from scratch, with the teacher in the folder ``guide``."""
    image = ImageSpec.from_card(data.card)
    sized = method.merge_model_settings(backbone)
    teacher = load_guide(guide, image)
    if method.upcycle:
        if teacher is None:
            raise UserError(f"{guide}: holds no teacher; run `dvc repro teacher_router`")
        sized = inherit_pretrained_windows(sized, image, teacher.teacher)
    torch.manual_seed(seed)  # only now: loading a teacher draws numbers
    model = sized.build(image, method.moe)
    model.remember(settings.batch, text_stream_length(data, settings.batch))
    if method.upcycle and teacher is not None:
        upcycle_model(model, teacher.teacher, method.upcycle)
    if isinstance(method.upcycle, Drop):
        method.upcycle.redraw_experts(model, seed)
    job = build_training_job(
        model,
        data,
        Objective(method.losses, settings.label_smoothing, method.distillation, method.text_losses),
        device,
        guide=teacher if method.guided else None,
        views=method.views,
        isolation=build_tissue_isolation(method, data),
        permuted=seed if method.permuted else None,
    )
    return JobAndModel(job, attach_required_guide(model, job.guide))


def build_finetuning(
    method: Method,
    settings: Finetuning,
    data: Prepared,
    start: Path,
    guide: Path,
    seed: int,
    device: str,
) -> JobAndModel:
    """Return the fine-tuning of the model in ``start``; UserError if the data do not fit."""
    torch.manual_seed(seed)
    image = ImageSpec.from_card(data.card)
    teacher = load_guide(guide, image)
    same_answers = teacher is not None and teacher.teacher.image.answers == image.answers
    learned = method.for_finetuning(settings.k, settings.guided, same_answers)
    model = load_adapted_model(start, image, learned.moe).to(device)
    subset = None
    if settings.shots is not None:
        subset = few_shot_indices(data.task, data.train.labels, settings.shots, seed).numpy()
    model.begin_finetuning()
    objective = Objective(
        learned.losses, settings.label_smoothing, learned.distillation, learned.text_losses
    )
    job = build_training_job(
        model,
        data,
        objective,
        device,
        guide=teacher if learned.guided else None,
        subset=subset,
        views=learned.views,
    )
    return JobAndModel(job, attach_required_guide(model, job.guide).to(device))
