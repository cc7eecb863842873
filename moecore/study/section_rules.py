"""Rules that compare two sections of params.yaml, such as methods and teacher, or run and data."""

from typing import Any

from moecore.core.config import list_own_names, part_classes_by_kind
from moecore.core.files import UserError
from moecore.data.views.views import ViewSettings
from moecore.measure.base import builtin_measurements
from moecore.measure.calibrators.base import Calibrator
from moecore.study.part_rules import find_section
from moecore.study.study import Misfits, Study
from moecore.training.method import Method
from moecore.training.teachers.base import Teacher

NO_TEACHER = "no_teacher"


def section_misfits(study: Study) -> Misfits:
    """Yield misfits between sections, without reading data."""
    for name, method in study.methods.items():
        yield from _sizes(study, name, method)
        if name in study.run.methods:
            yield from _needs_of_teacher(study, name, method)
            yield from _equal_views(study, name, method)
    yield from _mixed_labels(study)
    yield from _calibrator(study)
    yield from _measurements(study)


def _sizes(study: Study, name: str, method: Method) -> Misfits:
    """Yield a method's changes to ``model`` and ``pretrain`` that are invalid."""
    changes = {"model": method.merge_model_settings, "pretrain": method.merge_pretrain_settings}
    for key, change in changes.items():
        try:
            if (section := getattr(study, key)) is not None:
                change(section)
        except UserError as error:
            yield ("methods", name, key), str(error)


def _needs_of_teacher(study: Study, name: str, method: Method) -> Misfits:
    """Yield settings of a method that need a teacher, if the study has none."""
    teacher = study.teacher
    if teacher is not None and teacher.kind != NO_TEACHER:
        return
    lack = "there is no section teacher" if teacher is None else f"teacher.kind is {NO_TEACHER}"
    allowed = ", ".join(kind for kind in list_own_names(Teacher) if kind != NO_TEACHER)
    asking: dict[tuple, Any] = {
        ("distillation",): method.distillation > 0 and "distillation",
        ("upcycle",): bool(method.upcycle) and "upcycling",
        ("router",): method.routed_by_teacher and "a router",
    }
    for index, loss in enumerate(method.regularizers):
        asking["regularizers", index] = "guidance" in loss.needs and loss.kind
    for keys, need in asking.items():
        if need:
            text = f"found {need}, which needs a teacher, but {lack}"
            yield ("methods", name, *keys), f"{text}; allowed: {allowed}"


def _equal_views(study: Study, name: str, method: Method) -> Misfits:
    """Yield losses that compare two views, if the views never differ."""
    training = study.pretrain
    if method.views == 2 and training is not None and training.views == ViewSettings():
        kind = next(loss.kind for loss in method.regularizers if "two_views" in loss.needs)
        text = f"found {kind}, which compares two views, but pretrain.views changes nothing"
        yield ("methods", name, "regularizers"), f"{text}; allowed: with a crop, shift or flip"


def _mixed_labels(study: Study) -> Misfits:
    """Yield phases whose labels differ in kind from the first's: a head predicts one kind."""
    phases = [phase for phase in study.run.phases if phase in study.data]
    tasks = {phase: study.data[phase].labels_task.needs_classes("classes") for phase in phases}
    other = [phase for phase in phases if bool(tasks[phase]) != bool(tasks[phases[0]])]
    if other:
        both = f"data.{phases[0]} and data.{other[0]} are of two sorts, real numbers and classes"
        place = ("run", "phases", study.run.phases.index(other[0]))
        yield place, f"found phases whose {both}; allowed: phases of one sort"


def _calibrator(study: Study) -> Misfits:
    if study.calibrate is None:
        return
    calibrator = study.calibrate.calibrator
    for index, phase in enumerate(study.run.phases):
        kind = study.data[phase].labels_task.class_kind() if phase in study.data else None
        calibrators = part_classes_by_kind(Calibrator).items()
        fitting = [name for name, part in calibrators if kind in part.tasks]
        if fitting and kind not in calibrator.tasks:
            text = f"found {calibrator.kind}, but the labels of data.{phase} are of another sort"
            yield ("calibrate", "calibrator", "kind"), f"{text}; allowed: {', '.join(fitting)}"
        if kind is not None and not fitting:
            text = f"found {phase}, whose labels calibrate does not take ({kind})"
            yield ("run", "phases", index), f"{text}; allowed: other phases, or no calibrate"


def _measurements(study: Study) -> Misfits:
    """Yield phases whose data a measurement does not measure."""
    for index, phase in enumerate(study.run.phases):
        keys = ("run", "phases", index) if study.run.thorough is None else ("run", "thorough")
        reasons = []
        for name in study.run.measurements if phase in study.data else ():
            part = builtin_measurements().get(name) or find_section(study, name)
            if part is not None and study.run.covers(name, phase):
                refusal = part.data_refusal(study.data[phase])
                reasons += [f"{name} {refusal}"] if refusal else []
        if reasons:
            text = f"found {phase}, but {', '.join(reasons)} (data.{phase})"
            yield keys, f"{text}; allowed: other phases or measurements"


def unused_teacher_note(study: Study) -> str | None:
    """Return a note if each of several seeds trains a teacher that no method uses."""
    methods = [study.methods[name] for name in study.run.methods]
    needed = any(method.guided or method.upcycle for method in methods)
    number = len(study.run.seeds)
    if needed or number == 1 or study.teacher is None or study.teacher.training is None:
        return None
    return (
        f"teacher: {number} are trained, one per seed, but no method of run.methods needs one; "
        "teacher: {kind: no_teacher} trains none"
    )


def gradientless_router_note(study: Study) -> str | None:
    """Return a note if routers get almost no gradient of the task.

    A norm after the experts removes the scale that the weight of a single expert gives.
    """
    if study.model is None:
        return None
    models = {
        name: study.methods[name].merge_model_settings(study.model)
        for name in study.run.methods
        if getattr(study.methods[name].router, "k", None) == 1
    }
    names = [name for name, model in models.items() if model.normalises_experts]
    if not names:
        return None
    why = f"one expert per token in a {models[names[0]].kind}, whose norm leaves routers almost no"
    return f"methods {', '.join(names)}: {why} gradient of the task; model.kind: swin_moe gives one"
