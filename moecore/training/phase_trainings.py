"""Build the trainings of the stages teacher_router, pretrain and finetune.

Initial weights come from torch's global generator, seeded anew for the teacher's routers.
"""

from collections.abc import Iterator
from pathlib import Path

import torch

from moecore.core import files, streams
from moecore.data.loader import LoadedSplit, batch_indices, draw_few_shot_train_indices
from moecore.data.prepared import Prepared
from moecore.data.views.random_views import prepare_evaluation_images
from moecore.nn.backbones.base_model import Backbone, BackboneModel, ImageSpec
from moecore.training import artifacts, single_tissue_volumes, upcycle, upcycling_kinds
from moecore.training.job import Objective, TrainingJob, build_training_job
from moecore.training.method import Guide, Method, TeacherRouterSettings, initialise_guide
from moecore.training.regularizers.teacher_router import balance_and_entropy_terms
from moecore.training.settings import Finetuning, TeacherRouterFit, Training

FIT_LOG_EVERY = 20  # steps


def build_unfitted_guide(
    method: Method, backbone: Backbone, teacher: BackboneModel, seed: int, device: str
) -> Guide:
    """Combine ``teacher`` with random routers, drawn by ``seed``, for the layers of ``method``."""
    torch.manual_seed(streams.derived_seed("teacher_router", seed))
    stages = method.merge_model_settings(backbone).stages
    return initialise_guide(teacher, method, stages).to(device)


def iterate_router_fit(
    guide: Guide,
    train: LoadedSplit,
    weights: TeacherRouterSettings,
    fit: TeacherRouterFit,
    seed: int,
) -> Iterator[tuple[int, dict[str, float]]]:
    """Train the guide's routers in place (TGR-MoE, eq. 8); yield (step, loss values by name)."""
    # Batches are drawn independently of the student's.
    fit_seed = streams.derived_seed("teacher_router", seed)
    guide.routers.requires_grad_(True)
    parameters = guide.routers.parameters()
    optimizer = torch.optim.AdamW(parameters, lr=fit.learning_rate, weight_decay=0.0)
    for step in range(1, fit.steps + 1):
        images, _ = train.take(batch_indices(len(train.labels), fit.batch, fit_seed, step - 1))
        terms = balance_and_entropy_terms(probs=guide(prepare_evaluation_images(images)).probs)
        loss = weights.load * terms["balance"] + weights.entropy * terms["entropy"]
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if step % FIT_LOG_EVERY == 0 or step == fit.steps:
            yield step, {"loss": loss.item()} | {name: term.item() for name, term in terms.items()}
    guide.routers.requires_grad_(guide.learns)


def compute_stream_length(data: Prepared, batch: int) -> int | None:
    """Return training tokens per stream of a text cut into ``batch`` streams; None without text."""
    if not data.task.long:
        return None
    test_words = len(data.tokens("test"))
    block = data.card["size"][0]
    if test_words // batch <= block:
        raise files.UserError(
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
) -> TrainingJob:
    image = ImageSpec.from_card(data.card)
    sized = method.merge_model_settings(backbone)
    teacher = artifacts.load_guide(guide, image)
    if method.upcycle:
        if teacher is None:
            raise files.UserError(f"{guide}: holds no teacher; run `dvc repro teacher_router`")
        sized = upcycle.inherit_learned_windows(sized, image, teacher.teacher)
    torch.manual_seed(seed)  # here, because loading a teacher draws numbers
    model = sized.build(image, method.moe)
    subset = draw_few_shot_train_indices(data, settings.shots, seed)
    model.remember(settings.batch, compute_stream_length(data, settings.batch))
    if method.upcycle and teacher is not None:
        upcycle.copy_dense_into_moe(model, teacher.teacher, method.upcycle)
    if isinstance(method.upcycle, upcycling_kinds.Drop):
        method.upcycle.redraw_experts(model, seed)
    return build_training_job(
        model,
        data,
        Objective(method.losses, settings.label_smoothing, method.distillation, method.text_losses),
        device,
        guide=teacher if method.guided else None,
        subset=subset,
        views=method.views,
        isolation=single_tissue_volumes.build_tissue_isolation(method, data, subset),
        permuted=seed if method.permuted else None,
    )


def build_finetuning(
    method: Method,
    settings: Finetuning,
    data: Prepared,
    start: Path,
    guide: Path,
    seed: int,
    device: str,
) -> TrainingJob:
    torch.manual_seed(seed)
    image = ImageSpec.from_card(data.card)
    teacher = artifacts.load_guide(guide, image)
    same_answers = teacher is not None and teacher.teacher.image.answers == image.answers
    learned = method.for_finetuning(settings.k, settings.guided, same_answers)
    model = artifacts.load_adapted_model(start, image, learned.moe).to(device)
    model.begin_finetuning()
    smoothing = settings.label_smoothing
    objective = Objective(learned.losses, smoothing, learned.distillation, learned.text_losses)
    return build_training_job(
        model,
        data,
        objective,
        device,
        guide=teacher if learned.guided else None,
        subset=draw_few_shot_train_indices(data, settings.shots, seed),
        views=learned.views,
    )
