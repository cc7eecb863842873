"""``moecore.stages.teacher_router METHOD SEED``: fits routers on the frozen teacher (TGR, §3.2)."""

from pathlib import Path
from typing import Annotated

from moecore.core import config, files
from moecore.data.loader import load_split_where_it_fits
from moecore.data.prepared import Prepared
from moecore.measure.base import SkipReason
from moecore.nn.backbones.base_model import Backbone, ImageSpec
from moecore.run import stage_entry, stage_inputs
from moecore.run.run_record import record_run
from moecore.run.training import log_points_with_progress
from moecore.study.params_reader import ParamsKeyTemplate, read_stage_params
from moecore.training import runtime, settings
from moecore.training.artifacts import load_teacher, record_no_guide_needed, save_guide
from moecore.training.method import Method
from moecore.training.outcome import FinalRouterLosses
from moecore.training.phase_trainings import build_unfitted_guide, iterate_router_fit


class Params(config.Config):
    model: Backbone
    teacher_router: settings.TeacherRouterFit
    method: Annotated[Method, ParamsKeyTemplate("methods.{method}")]


def teacher_router(method: str, seed: int) -> None:
    """Fit a router on the frozen teacher per MoE layer of ``method``, unless it learns jointly."""
    params = read_stage_params(Params, method=method)
    target = Path("artifacts/teacher_router", method, str(seed))
    paths = [Path("artifacts/data/pretrain"), Path("artifacts/teacher", str(seed))]
    needed = paths if params.method.guided or params.method.upcycle else []
    inputs = stage_inputs.build_stage_inputs("teacher_router", params, needed, method=method)
    with record_run("teacher_router", params, method=method, seed=seed, inputs=inputs) as run:
        guide = None
        result: config.Config = SkipReason(skipped="the method needs no teacher")
        if needed:
            device = runtime.tune_runtime().device
            prepared = Prepared.open(paths[0])
            teacher = load_teacher(paths[1], ImageSpec.from_card(prepared.card))
            guide = build_unfitted_guide(params.method, params.model, teacher, seed, device)
            result = SkipReason(skipped="no router to fit before the method learns")
            if len(guide.routers) and not guide.learns:
                data = load_split_where_it_fits(prepared.train, device)
                fit = params.teacher_router
                name = f"routers {method} {seed}"
                points = iterate_router_fit(guide, data, params.method.teacher_router, fit, seed)
                result = FinalRouterLosses(**log_points_with_progress(points, fit.steps, name, run))
        with files.atomic_folder(target) as folder:
            record_no_guide_needed(folder) if guide is None else save_guide(folder, guide)
        run.write_result(result)


if __name__ == "__main__":
    stage_entry.run_stage(teacher_router)
