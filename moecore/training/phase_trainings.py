"""Who learns what from which images: the trainings of teacher routers, pretrain and finetune.

Each draws its first weights from the global generator, as ``seed`` sets it, a teacher's routers
from a stream of their own; all later draws are functions of (seed, step).
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
    """A training that may begin, and the model as it is used: alone, or with its teacher."""

    job: TrainingJob
    model: Model


def build_unfitted_guide(
    method: Method, backbone: Backbone, teacher: BackboneModel, seed: int, device: str
) -> Guide:
    """The teacher of ``seed`` with routers, not fitted yet, for ``method``."""
    torch.manual_seed(derived_seed("teacher_router", seed))
    return build_guide(teacher, method, method.merge_model_settings(backbone).stages).to(device)


def text_stream_length(data: Prepared, batch: int) -> int | None:
    """Words of each of ``batch`` streams of a training text; None where the data are no text.

    Raises UserError where the test text, read in as many streams, leaves them no block.
    """
    if not data.task.long:
        return None
    words, block = len(data.tokens("test")), data.card["size"][0]
    if words // batch <= block:
        problem = f"batch is {batch}, and the text has {words:,} test tokens"
        most = words // (block + 1)
        raise UserError(f"{problem}; allowed: 1 to {most} streams of a block of {block}")
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
    """``method`` from scratch, guided by the teacher in the folder ``guide`` where it has one."""
    image = ImageSpec.from_card(data.card)
    sized = method.merge_model_settings(backbone)
    teacher = load_guide(guide, image)
    if method.upcycle:
        if teacher is None:
            raise UserError(f"{guide}: holds no teacher; run `dvc repro teacher_router`")
        sized = inherit_pretrained_windows(sized, image, teacher.teacher)
    torch.manual_seed(seed)  # only now: to load a teacher draws numbers
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
    """The model in ``start`` goes on with other data; UserError where they do not fit."""
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
    kept = teacher if learned.guided else None
    job = build_training_job(
        model, data, objective, device, guide=kept, subset=subset, views=learned.views
    )
    return JobAndModel(job, attach_required_guide(model, job.guide).to(device))
