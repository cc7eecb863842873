"""What the stages ``finetune`` and ``adversarial`` share: a pretrained model goes on with other data, under settings of its own."""

from pathlib import Path

import torch

from moecore.artifacts import guide_folder, load_guide, save_model, transferred
from moecore.backbones.image import ImageSpec
from moecore.config import Config
from moecore.data.loader import few_shot
from moecore.data.prepared import Prepared
from moecore.evaluation.predict import predictions
from moecore.evaluation.routing import agreement
from moecore.files import whole_folder
from moecore.history import record
from moecore.resume import work_folder
from moecore.selection import Phase
from moecore.supervise import task_for, train, trained
from moecore.training.checkpoint import Checkpoint
from moecore.training.guide import standing_alone
from moecore.training.method import Method
from moecore.training.objective import Objective
from moecore.training.runtime import tune
from moecore.training.settings import Finetuning


def finetuned(phase: Phase, method: str, seed: int, params: Config, settings: Finetuning, chosen: Method, script: str) -> None:
    """Fine-tune artifacts/pretrain/``method``/``seed`` on artifacts/data/``phase`` and write artifacts/``phase``/``method``/``seed``.

    params: all that the stage has read; settings and chosen: its training and its method. script: the stage's file, whose imports
    name the code that the result depends on. Killed at any moment, it goes on where it was. Raises StageError where data and model do not fit.
    """
    item, source = f"{phase}/{method}/{seed}", Path("artifacts/data") / phase
    start, guided, target = Path("artifacts/pretrain") / method / str(seed), guide_folder(method, seed), Path("artifacts") / item
    data, runtime = Prepared.open(source), tune()
    with work_folder(item, params, [source, guided, start], script) as work, record(phase, params, method=method, seed=seed, work=work) as run:
        run.dataset(data.card)
        torch.manual_seed(seed)
        image = ImageSpec.from_card(data.card)
        guide = load_guide(guided, image.size)
        same_classes = guide is not None and guide.teacher.image.classes == image.classes
        learned = chosen.for_finetuning(settings.k, settings.guided, same_classes)
        guide = guide if learned.guided else None
        model = transferred(start, image, learned.moe, settings.interpolation).to(runtime.device)
        alone = standing_alone(model, guide).to(runtime.device)
        _, before = predictions(alone, data.test.images, batch=250)
        subset = None if settings.shots is None else few_shot(data.train.labels, settings.shots, seed).numpy()
        objective = Objective(learned.losses, settings.label_smoothing, learned.distillation)
        task = task_for(model, data, objective, runtime, guide, subset, learned.views)
        train(task, settings, seed, runtime, run, Checkpoint(work), f"{phase} {method} seed {seed}")
        _, after = predictions(alone, data.test.images, batch=250)
        kept = [agreement(first.probs, last.probs) for first, last in zip(before, after, strict=True)]
        with whole_folder(target) as folder:
            save_model(folder, alone)
        run.summary(trained(alone, data, settings, run) | {"routing_agreement_before_after": kept})
        run.model(target)
