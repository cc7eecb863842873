"""Stage ``pretrain``: one method trained from scratch with one seed.

``python -m stages.pretrain vmoe 0`` writes artifacts/pretrain/vmoe/0/. Killed at any moment, it goes on where it was.
"""

from pathlib import Path
from typing import Annotated

import torch

from moecore.artifacts import GUIDE, load_guide, save_guide, save_model
from moecore.backbones import Backbone
from moecore.backbones.image import ImageSpec
from moecore.config import Config
from moecore.data.prepared import Prepared
from moecore.epochs import routing_over_epochs
from moecore.files import whole_folder
from moecore.history import record
from moecore.params import Key, read
from moecore.region_probe import region_probe, region_routing_over_epochs
from moecore.resume import work_folder
from moecore.stage import run_stage
from moecore.supervise import task_for, train, trained
from moecore.training.checkpoint import Checkpoint
from moecore.training.guide import standing_alone
from moecore.training.isolation import isolation
from moecore.training.method import Method
from moecore.training.objective import Objective
from moecore.training.runtime import tune
from moecore.training.settings import Training
from moecore.training.upcycle import upcycle

DATA = Path("artifacts/data/pretrain")


class Params(Config):
    """What this stage reads of params.yaml."""

    model: Backbone
    pretrain: Training
    method: Annotated[Method, Key("methods.{method}")]


def pretrain(method: str, seed: int) -> None:
    """Train ``method`` with ``seed`` on artifacts/data/pretrain, guided by its teacher where it has one."""
    params = read(Params, method=method)
    learned = params.method
    fitted, target = Path("artifacts/teacher_router") / method, Path("artifacts/pretrain") / method / str(seed)
    data, runtime, settings = Prepared.open(DATA), tune(), params.pretrain
    item = f"pretrain/{method}/{seed}"
    with work_folder(item, params, [DATA, fitted], __file__) as work, record("pretrain", params, method=method, seed=seed, work=work) as run:
        run.dataset(data.card)
        torch.manual_seed(seed)
        model, guide = learned.sized(params.model).build(ImageSpec.from_card(data.card), learned.moe), load_guide(fitted)
        if learned.upcycle:
            upcycle(model, guide.teacher)
        objective = Objective(learned.losses, settings.label_smoothing, learned.distillation)
        permuted = seed if learned.permuted else None
        task = task_for(model, data, objective, runtime, guide if learned.guided else None, None, learned.views, isolation(learned, data), permuted)
        alone = standing_alone(model, task.guide)
        probe = region_probe(work, alone, data, learned.expert_names, settings.epochs, seed)
        train(task, settings, seed, runtime, run, Checkpoint(work), f"pretrain {method} seed {seed}", probe)
        with whole_folder(target) as folder:
            save_model(folder, alone)
            if learned.joint and alone is model:
                save_guide(folder / GUIDE, task.guide)
        moved = routing_over_epochs(work, settings.epochs) if learned.moe else {}
        if probe is not None:
            moved |= {"region_routing": region_routing_over_epochs(work, settings.epochs)}
        run.summary(trained(alone, data, settings, run) | moved)
        run.model(target)


if __name__ == "__main__":
    run_stage(pretrain)
