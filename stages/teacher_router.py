"""Stage ``teacher_router``: the routers on the frozen teacher that guide one method (TGR-MoE, §3.2).

``python -m stages.teacher_router tgr`` writes artifacts/teacher_router/tgr/: teacher and routers. For a method that needs
no teacher it writes a file that never changes, so a new teacher leaves such methods up to date.
"""

from pathlib import Path
from typing import Annotated

import torch

from moecore.artifacts import load_model, save_guide, save_no_guide
from moecore.backbones import Backbone
from moecore.config import Config
from moecore.data.loader import to_device
from moecore.data.prepared import Prepared
from moecore.files import whole_folder
from moecore.history import record
from moecore.params import Key, read
from moecore.progress import progress
from moecore.stage import run_stage
from moecore.teachers.fit_router import fit_routers
from moecore.training.guide import build_guide
from moecore.training.method import Method
from moecore.training.runtime import tune
from moecore.training.settings import TeacherRouterFit

DATA, TEACHER = Path("artifacts/data/pretrain"), Path("artifacts/teacher")


class Params(Config):
    """What this stage reads of params.yaml."""

    model: Backbone
    teacher_router: TeacherRouterFit
    method: Annotated[Method, Key("methods.{method}")]


def teacher_router(method: str) -> None:
    """Fit one router per MoE layer of ``method`` on the teacher's features; those that learn jointly are left as drawn."""
    params = read(Params, method=method)
    target = Path("artifacts/teacher_router") / method
    with record("teacher_router", params, method=method) as run:
        if not (params.method.guided or params.method.upcycle):
            with whole_folder(target) as folder:
                save_no_guide(folder)
            run.summary({})
            return
        device, settings = tune().device, params.teacher_router
        torch.manual_seed(settings.seed)
        guide = build_guide(load_model(TEACHER), params.method, params.method.sized(params.model).depth).to(device)
        values: dict[str, float] = {}
        if len(guide.routers) and not guide.learns:
            with progress(f"teacher router {method}", settings.steps) as bar:
                for step, values in fit_routers(guide, to_device(Prepared.open(DATA).train, device), params.method.teacher_router, settings):
                    run.log(step, values)
                    bar.update(step, **values)
        with whole_folder(target) as folder:
            save_guide(folder, guide)
        run.summary(values)


if __name__ == "__main__":
    run_stage(teacher_router)
