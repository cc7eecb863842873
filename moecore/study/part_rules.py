"""Rules for check: what each part says about its settings, and comparisons of two sections.

Each part has its rules in its file (``Config.misfits``). This module gives them the part's
surroundings: its method, the data that it works on, the phases that use it.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import chain
from typing import Any

from moecore.core.config import Config, Surroundings, builtin_kinds, part_classes_by_kind
from moecore.core.files import UserError
from moecore.data.card import Card
from moecore.data.views.random_views import ViewSettings
from moecore.measure.base import builtin_measurements
from moecore.measure.calibrators.base import Calibrator
from moecore.study import stages, yaml_document
from moecore.study.study import Misfits, Study
from moecore.training.method import Method
from moecore.training.settings import Training
from moecore.training.teachers.base import Teacher

Previews = Mapping[str, Card]
NO_TEACHER = "no_teacher"
MIN_STEPS = 100  # per training
Placed = Iterator[tuple[tuple, Any, Surroundings]]  # (keys, settings, their surroundings)
CONTAINER_TYPES = (Config, dict, list, tuple)  # types that can contain settings objects
MEASURING_SECTIONS = tuple(  # of stages that look at the models of run.phases
    key
    for row in stages.STAGE_ROWS
    if "phase" in row.item_names
    for key in stages.STAGE_SECTIONS[row.name]
    if key not in ("run", "methods")
)


def part_misfits(study: Study, previews: Previews) -> Misfits:
    """Yield (keys, message) from the ``misfits`` of every settings object of a study."""
    misfits = (list_settings_misfits(*root) for root in sections_to_check(study, previews))
    yield from first_misfit_per_key(*misfits, _changed_training_misfits(study, previews))


def first_misfit_per_key(*several: Iterable[tuple[tuple, str]]) -> list[tuple[tuple, str]]:
    first: dict[tuple, str] = {}
    for keys, text in chain(*several):
        first.setdefault(keys, text)
    return list(first.items())


def list_settings_misfits(keys: tuple, settings: Any, around: Surroundings) -> Misfits:
    """Yield (keys, message) from ``misfits`` of ``settings`` and of all nested settings."""
    for place, part, near in walk_settings(keys, settings, around):
        for inner, text in part.misfits(near):
            yield (*place, *inner), text


def walk_settings(keys: tuple, value: Any, around: Surroundings) -> Placed:
    """Yield (keys, settings, their method, model and data) of each settings object, outer first."""
    if isinstance(value, Config):
        yield keys, value, around
        around = value.surround(around)
        value = vars(value)
    elif isinstance(value, list | tuple):
        value = dict(enumerate(value))
    if isinstance(value, dict):
        for name, inner in value.items():
            if isinstance(inner, CONTAINER_TYPES):
                yield from walk_settings((*keys, name), inner, around)


def data_surroundings(study: Study, previews: Previews, phase: str) -> Surroundings:
    source = study.data.get(phase)
    if phase == "teacher":
        source = None if study.teacher is None else study.teacher.data
    return Surroundings(phase=phase, source=source, preview=previews.get(phase))


def sections_to_check(study: Study, previews: Previews) -> Placed:
    """Yield (keys, settings, their method, model and data) of each method and section to check."""
    pretraining = data_surroundings(study, previews, "pretrain")
    for name, method in study.methods.items():
        around = pretraining if name in study.run.methods else Surroundings()
        yield (("methods", name), method, around._replace(images=_batch_by_phase(study, method)))
    yield ("model",), study.model, pretraining
    if (teacher := study.teacher) is not None:
        yield ("teacher",), teacher.model_copy(update={"training": None}), pretraining
        learned = data_surroundings(study, previews, "teacher") if teacher.data else pretraining
        yield ("teacher", "training"), teacher.training, learned
    for phase in stages.TRAINING_PHASES:
        yield (phase,), getattr(study, phase), data_surroundings(study, previews, phase)
    chosen = [study.methods[name] for name in study.run.methods if name in study.methods]
    if any(method.guided_routing and not method.joint for method in chosen):
        yield ("teacher_router",), study.teacher_router, pretraining
    for section in (*MEASURING_SECTIONS, *study.run.measurements):
        settings = find_section_settings(study, section)
        for phase in study.run.phases:
            if study.run.covers(section, phase):
                around = data_surroundings(study, previews, phase)
                yield tuple(section.split(".")), settings, around
    for name in study.run.calculations:
        yield tuple(name.split(".")), find_section_settings(study, name), Surroundings()


def find_section_settings(study: Study, name: str) -> Any:
    settings: Any = study
    for key in name.split("."):
        settings = getattr(settings, key, None)
    return settings


def _batch_by_phase(study: Study, method: Method) -> dict[str, int]:
    images = {}
    for phase in stages.TRAINING_PHASES:
        training = getattr(study, phase)
        with suppress(UserError):  # ``list_section_conflicts`` reports it
            if phase == "pretrain" and training is not None:
                training = method.merge_pretrain_settings(training)
            if training is not None:
                images[phase] = training.batch * method.views
    return images


def _changed_training_misfits(study: Study, previews: Previews) -> Misfits:
    """Yield (keys, message) for conflicts in ``pretrain`` that a method's changes cause."""
    if study.pretrain is None:
        return
    around = data_surroundings(study, previews, "pretrain")
    common = set(list_settings_misfits((), study.pretrain, around))
    for name, method in study.methods.items():
        try:
            changed = method.merge_pretrain_settings(study.pretrain)
        except UserError:
            continue  # ``list_section_conflicts`` reports it
        for keys, text in list_settings_misfits((), changed, around) if method.pretrain else ():
            if (keys, text) not in common:
                yield ("methods", name, "pretrain", *keys), text


def list_section_conflicts(study: Study) -> Misfits:
    for name, method in study.methods.items():
        changes = {"model": method.merge_model_settings, "pretrain": method.merge_pretrain_settings}
        for key, change in changes.items():
            try:
                if (section := getattr(study, key)) is not None:
                    change(section)
            except UserError as error:
                yield ("methods", name, key), str(error)
        if name in study.run.methods:
            yield from _missing_teacher_misfits(study, name, method)
            training = study.pretrain
            if method.views == 2 and training is not None and training.views == ViewSettings():
                kind = next(loss.kind for loss in method.regularizers if "two_views" in loss.needs)
                text = f"found {kind}, which compares two views, but pretrain.views changes nothing"
                text += "; allowed: with a crop, shift or flip"
                yield ("methods", name, "regularizers"), text
    # A head predicts one kind of labels
    phases = [phase for phase in study.run.phases if phase in study.data]
    tasks = {phase: study.data[phase].labels_task.needs_classes("classes") for phase in phases}
    other = [phase for phase in phases if bool(tasks[phase]) != bool(tasks[phases[0]])]
    if other:
        both = f"data.{phases[0]} and data.{other[0]} are of two sorts, real numbers and classes"
        place = ("run", "phases", study.run.phases.index(other[0]))
        yield place, f"found phases whose {both}; allowed: phases of one sort"
    yield from _calibrator_misfits(study)
    yield from _measurement_misfits(study)


def _missing_teacher_misfits(study: Study, name: str, method: Method) -> Misfits:
    teacher = study.teacher
    if teacher is not None and teacher.kind != NO_TEACHER:
        return
    lack = "there is no section teacher" if teacher is None else f"teacher.kind is {NO_TEACHER}"
    allowed = ", ".join(kind for kind in builtin_kinds(Teacher) if kind != NO_TEACHER)
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


def _calibrator_misfits(study: Study) -> Misfits:
    if study.calibrate is None:
        return
    calibrator = study.calibrate.calibrator
    for index, phase in enumerate(study.run.phases):
        kind = study.data[phase].labels_task.class_kind() if phase in study.data else None
        calibrators = part_classes_by_kind(Calibrator).items()
        fitting = [name for name, part in calibrators if kind in part.tasks]
        if fitting and kind not in calibrator.tasks:
            text = f"found {calibrator.kind}, but the labels of data.{phase} are of another sort"
            allowed = ", ".join([*fitting, "package.module of a listed package"])
            yield ("calibrate", "calibrator", "kind"), f"{text}; allowed: {allowed}"
        if kind is not None and not fitting:
            text = f"found {phase}, whose labels calibrate does not take ({kind})"
            yield ("run", "phases", index), f"{text}; allowed: other phases, or no calibrate"


def _measurement_misfits(study: Study) -> Misfits:
    for index, phase in enumerate(study.run.phases):
        keys = ("run", "phases", index) if study.run.thorough is None else ("run", "thorough")
        reasons = []
        for name in study.run.measurements if phase in study.data else ():
            part = builtin_measurements().get(name) or find_section_settings(study, name)
            # What is no measurement, such as finetune, is refused as such.
            refuse = getattr(part, "data_refusal", None)
            if refuse is not None and study.run.covers(name, phase):
                if refusal := refuse(study.data[phase]):
                    reasons.append(f"{name} {refusal}")
        if reasons:
            text = f"found {phase}, but {', '.join(reasons)} (data.{phase})"
            yield keys, f"{text}; allowed: other phases or measurements"


def list_remarks(study: Study, previews: Previews) -> Iterator[str]:
    """Yield one-line remarks on a study that are no errors, such as an unused teacher."""
    methods = {name: study.methods[name] for name in study.run.methods}
    needed = any(method.guided or method.upcycle for method in methods.values())
    teacher = study.teacher
    number = len(study.run.seeds)
    if not needed and number > 1 and teacher is not None and teacher.training is not None:
        text = f"{number} are trained, one per seed, but no method of run.methods needs one"
        yield f"teacher: {text}; teacher: {{kind: no_teacher}} trains none"
    kinds = {}  # of models in which a norm removes the scale that the weight of one expert gives
    for name, method in methods.items():
        if study.model is not None and getattr(method.router, "k", None) == 1:
            model = method.merge_model_settings(study.model)
            kinds |= {name: model.kind} if model.normalises_experts else {}
    if kinds:
        why = f"one expert per token in a {next(iter(kinds.values()))}, whose norm leaves routers"
        yield (
            f"methods {', '.join(kinds)}: {why} almost no gradient of the task; "
            "model.kind: swin_moe gives one"
        )
    for keys, settings, _ in walk_settings((), study, Surroundings()):
        for inner, text in settings.remarks():
            yield f"{yaml_document.spell_keys((*keys, *inner))}: {text}"
    for keys, settings, around in sections_to_check(study, previews):
        steps = _planned_steps(settings, around.preview)
        if steps is not None and steps < MIN_STEPS:
            place = yaml_document.spell_keys(keys)
            text = f"{steps} training steps, and fewer than {MIN_STEPS} rarely teach a model"
            yield f"{place}: {text}; {place}.updates sets their number per epoch"


def _planned_steps(training: Any, card: Card | None) -> int | None:
    """Return the number of steps of a training on images; None if it is unknown."""
    if not isinstance(training, Training):
        return None
    if training.updates is not None:
        return training.epochs * training.updates
    if card is None or not card.counts or len(card.shape) == 1:
        return None
    images = card.image_counts["train"]
    if training.shots is not None and card.classes:
        images = training.shots * len(card.classes)
    return training.epochs * (images // training.batch)
