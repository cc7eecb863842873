"""What has no meaning for the labels of a phase: ages, or several labels for each image.

Every source says which task its labels are of; the task says why it cannot do without classes.
"""

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from moecore.attacks.gradient import DLR_CLASSES, objective_refusal
from moecore.core.config import part_classes_by_kind
from moecore.data.sources.base import PlannedData
from moecore.data.views.views import ViewSettings
from moecore.measure.calibrators.base import Calibrator
from moecore.study.study import TRAINING_PHASES, Misfits, Study

# of Training, with the value that switches each off
NEED_CLASSES = {"label_smoothing": 0, "shots": "null", "mix": "null"}
MEASURED_KINDS = {  # the kind of task that a measurement is of, why not others, and its sources
    "word_swaps": (
        "next_token",
        "is no text, and word_swaps swaps words",
        "docstrings or wikitext",
    ),
    "cohort_checks": ("regression", "has classes, and cohort_checks needs ages", "phantom or bids"),
    "retrieval": (
        "image_text",
        "has no captions, and retrieval looks for them",
        "captioned_mosaic",
    ),
}
FLAT_WITH_CLASSES = ("invariance", "corruptions", "stability", "few_shot", "lipschitz")


def label_misfits(study: Study) -> Misfits:
    """Yield settings that the labels of a phase do not allow."""
    tasks: dict[str, Any] = {phase: source.labels_task for phase, source in study.data.items()}
    kinds = {phase: task.model_fields["kind"].default for phase, task in tasks.items()}
    numbers: set[str] = {phase for phase, task in tasks.items() if task.needs_classes("classes")}
    yield from _mixed_label_problems(study, numbers)
    yield from _training(study, tasks)
    yield from _distillation(study, tasks)
    yield from _attacks(study, tasks)
    yield from _survivors(study, tasks)
    yield from _calibrator(study, kinds)
    yield from _measurements(study, kinds, numbers)
    yield from _views_of_text(study, kinds)
    if kinds.get("pretrain") == "next_token":
        yield from _models_of_text(study)
    yield from _captions(study, kinds)


def list_training_settings(study: Study) -> Iterator[tuple[tuple, str, Any]]:
    """Yield where training settings stand, on which data of ``load_previews``, and the settings."""
    for phase in TRAINING_PHASES:
        if (training := getattr(study, phase)) is not None:
            yield (phase,), phase, training
    if (teacher := study.teacher) is not None and teacher.training is not None:
        learned = "pretrain" if teacher.data is None else "teacher"
        yield ("teacher", "training"), learned, teacher.training


def format_non_default_settings(value: Any) -> str:
    """Return settings as what was set of them."""
    if hasattr(value, "model_dump"):
        return str(value.model_dump(exclude_defaults=True) or "it")
    return str(value)


def _mixed_label_problems(study: Study, numbers: set[str]) -> Misfits:
    """A model that answers with a number cannot be fine-tuned on classes with the same head."""
    phases = study.run.phases
    other = [phase for phase in phases if (phase in numbers) != (phases[0] in numbers)]
    if numbers and other:
        both = f"data.{phases[0]} and data.{other[0]} are of two sorts, real numbers and classes"
        yield ("run", "phases", phases.index(other[0])), f"{both}; allowed: phases of one sort"


def _training(study: Study, tasks: dict[str, Any]) -> Misfits:
    for keys, phase, training in list_training_settings(study):
        for key, allowed in NEED_CLASSES.items() if phase in tasks else ():
            value = getattr(training, key, None)
            if value and (reason := tasks[phase].needs_classes(key)):
                text = f"found {format_non_default_settings(value)}, but {reason} (data.{phase})"
                yield (*keys, key), f"{text}; allowed: {allowed}"


def _distillation(study: Study, tasks: dict[str, Any]) -> Misfits:
    reason = "pretrain" in tasks and tasks["pretrain"].needs_classes("distillation")
    for name, method in study.methods.items():
        if reason and method.distillation and name in study.run.methods:
            text = f"a teacher's decision cannot be learned: {reason} (data.pretrain); allowed: 0"
            yield ("methods", name, "distillation"), text


def few_class_misfits(study: Study, previews: Mapping[str, PlannedData]) -> Misfits:
    """Yield attacks whose objective has no meaning for two classes."""
    for keys, attack in _list_attacks(study):
        for phase in study.run.phases:
            number = len(getattr(previews.get(phase), "classes", None) or ())
            if getattr(attack, "objective", None) == "dlr" and 0 < number < DLR_CLASSES:
                text = f"found dlr, but data.{phase} has {number} classes, fewer than {DLR_CLASSES}"
                yield (*keys, "objective"), f"{text}; allowed: task, cross_entropy"
                break


def _list_attacks(study: Study) -> list[tuple[tuple, Any]]:
    """Return where each attack on trained models stands, and its settings."""
    attacks: list[tuple[tuple, Any]] = []
    if study.robustness is not None:
        chosen = enumerate(study.robustness.attacks)
        attacks += [(("robustness", "attacks", index), attack) for index, attack in chosen]
    if study.transfer is not None:
        attacks.append((("transfer", "attack"), study.transfer.attack))
    explorer: Any = getattr(study, "explorer", None)
    if explorer and "explorer" in study.run.measurements:
        attacks.append((("explorer", "attack"), explorer.attack))
    return attacks


def _attacks(study: Study, tasks: dict[str, Any]) -> Misfits:
    """Yield attacks that need classes, or one each, where the labels are none."""
    asked = [tasks[phase] for phase in study.run.phases if phase in tasks]
    for keys, attack in _list_attacks(study):
        objective = getattr(attack, "objective", None)
        if objective is None and any(task.needs_classes("classes") for task in asked):
            text = f"{attack.kind} needs classes, and the labels are real numbers"
            yield (*keys, "kind"), f"{text}; allowed: fgsm, pgd, apgd"
        elif objective and any(objective_refusal(objective, task) for task in asked):
            needed = "classes"
            if not any(task.needs_classes("classes") for task in asked):
                needed = "one label per image"
            allowed = "task (the loss that is learned), balance, routing_change"
            text = f"found {objective}, which needs {needed}; allowed: {allowed}"
            yield (*keys, "objective"), text


def _survivors(study: Study, tasks: dict[str, Any]) -> Misfits:
    reasons = filter(None, (task.needs_classes("share") for task in tasks.values()))
    if study.robustness is not None and study.robustness.survivors:
        for reason in islice(reasons, 1):
            yield ("robustness", "survivors"), f"found true, but {reason}; allowed: false"


def _calibrator(study: Study, kinds: dict[str, str]) -> Misfits:
    if study.calibrate is None:
        return
    calibrator = study.calibrate.calibrator
    every = part_classes_by_kind(Calibrator)
    for index, phase in enumerate(study.run.phases):
        kind = kinds.get(phase)
        fitting = [name for name, part in every.items() if kind in part.tasks]
        if fitting and kind not in calibrator.tasks:
            text = f"found {calibrator.kind}, but the labels of data.{phase} are of another sort"
            yield ("calibrate", "calibrator", "kind"), f"{text}; allowed: {', '.join(fitting)}"
        if kind is not None and not fitting:
            reason = f"data.{phase} has labels that calibrate does not take ({kind})"
            yield ("run", "phases", index), f"{reason}; leave out the phase or the stage"


def _measurements(study: Study, kinds: dict[str, str], numbers: set[str]) -> Misfits:
    """Yield what measures flat images with classes, or measures ages, words or captions."""
    asked = study.run.measurements
    flat = [what for what in FLAT_WITH_CLASSES if what in asked]
    for index, phase in enumerate(study.run.phases):
        source = study.data.get(phase)
        if source is None or not any(study.run.covers(what, phase) for what in asked):
            continue
        where = ("run", "phases", index) if study.run.thorough is None else ("run", "thorough")
        if flat and (phase in numbers or source.volumes):
            text = f"measure flat images with classes, which data.{phase} has not"
            yield where, f"{', '.join(flat)} {text}; allowed: phases without {phase}"
        for what, (kind, reason, sources) in MEASURED_KINDS.items():
            if what in asked and kinds[phase] != kind:
                yield where, f"data.{phase} {reason}; allowed: kind: {sources}"


def _views_of_text(study: Study, kinds: dict[str, str]) -> Misfits:
    """Text has no views, and no pixels that an attack could change."""
    for keys, phase, training in list_training_settings(study):
        for key, usual in (("views", ViewSettings()), ("adversarial", None)):
            value = getattr(training, key)
            if kinds.get(phase) == "next_token" and value != usual:
                changed = format_non_default_settings(value)
                yield (*keys, key), f"found {changed}, but data.{phase} is text; leave it out"


def _models_of_text(study: Study) -> Misfits:
    """Stages and methods that text does not have."""
    for section in ("robustness", "transfer", "finetune"):
        if getattr(study, section) is not None:
            yield (section,), "data.pretrain is text, which this stage does not take; leave it out"
    if study.routing is not None:
        for key in ("views", "augmentations", "augmentation_images"):
            if key in study.routing.model_fields_set:
                text = "data.pretrain is text, which has no views; leave it out"
                yield ("routing", key), text
    for name, method in study.methods.items():
        if name not in study.run.methods:
            continue
        if method.views == 2 or method.guided or method.upcycle:
            text = "the method needs two views or a teacher, and data.pretrain is text"
            yield ("methods", name), f"{text}; take another method"
        if method.permuted:
            text = "found true, but the label of a word is the next one (data.pretrain is text)"
            yield ("methods", name, "permuted"), f"{text}; allowed: false"


def _captions(study: Study, kinds: dict[str, str]) -> Misfits:
    """Captions need two towers; where left and right matter no view may flip."""
    sided: set[str] = {phase for phase, source in study.data.items() if source.sided}
    for keys, phase, training in list_training_settings(study):
        if phase in sided and training.views.flip:
            text = f"found true, but in data.{phase} left and right matter"
            yield (*keys, "views", "flip"), f"{text}; allowed: false"
    if kinds.get("pretrain") == "image_text":
        teacher = getattr(study.teacher, "model", None)
        for where, model in ((("model",), study.model), (("teacher", "model"), teacher)):
            if model is not None and model.kind != "two_towers":
                text = f"found {model.kind}, but data.pretrain has captions; allowed: two_towers"
                yield (*where, "kind"), text
