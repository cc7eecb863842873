"""What has no meaning for the labels of a phase: ages, or several labels for each image.

Every source says which task its labels are of; the task says why it cannot do without classes.
"""

from collections.abc import Iterator
from typing import Any

from moecore.data.views.views import ViewSettings
from moecore.study.study import Study

Found = Iterator[tuple[tuple, str]]  # (keys, what is wrong)

# Of Training, with the value that switches each off.
NEED_CLASSES = {"label_smoothing": 0, "shots": "null", "mix": "null"}
CALIBRATORS = {  # by the kind of task
    "classification": "temperature",
    "next_token": "temperature",
    "regression": "linear",
}
WORDS = {"classification": "classes", "next_token": "words", "regression": "real numbers"}
FLAT_WITH_CLASSES = ("invariance", "corruptions", "stability", "few_shot", "lipschitz")


def label_rules(study: Study) -> Found:
    """Settings that the labels of a phase do not allow."""
    numbers: set[str] = {
        phase for phase, task in _tasks(study).items() if task.needs_classes("share")
    }
    volumes: set[str] = {phase for phase, source in study.data.items() if _volumes(source)}
    yield from _one_sort(study, numbers)
    yield from _training(study)
    yield from _distillation(study)
    if numbers:
        yield from _attacks(study)
    yield from _calibrator(study)
    yield from _measurements(study, numbers, volumes)
    yield from _text(study)
    yield from _captions(study)


def _captions(study: Study) -> Found:
    """Captions need two towers, and views that leave left and right as they are."""
    tasks = _tasks(study)
    captioned = [phase for phase in tasks if _kind(tasks[phase]) == "image_text"]
    sided = [phase for phase, source in study.data.items() if getattr(source, "sided", False)]
    for keys, phase, training in trainings(study):
        if phase in sided and training.views.flip:
            text = f"found true, but captions of data.{phase} say left and right"
            yield (*keys, "views", "flip"), f"{text}; allowed: false"
    if "pretrain" in captioned:
        teacher = getattr(study.teacher, "model", None)
        both = ((("model", "kind"), study.model), (("teacher", "model", "kind"), teacher))
        for where, model in both:
            if model is not None and model.kind != "two_towers":
                found = f"found {model.kind}, but data.pretrain has captions"
                yield where, f"{found}; allowed: two_towers"
    for index, phase in enumerate(study.run.phases):
        if "retrieval" in study.run.measurements and phase in tasks and phase not in captioned:
            text = f"data.{phase} has no captions, and retrieval looks for them"
            yield ("run", "phases", index), f"{text}; allowed: kind: captioned_mosaic"


def _text(study: Study) -> Found:
    """What text does not have: views, pixels that an attack could change, a teacher."""
    tasks = _tasks(study)
    for keys, phase, training in trainings(study):
        if phase not in tasks or _kind(tasks[phase]) != "next_token":
            continue
        for key, usual in (("views", ViewSettings()), ("adversarial", None)):
            found = getattr(training, key)
            if found != usual:
                yield (*keys, key), f"found {short(found)}, but data.{phase} is text; leave it out"
    if "pretrain" not in tasks or _kind(tasks["pretrain"]) != "next_token":
        return
    for section in ("robustness", "transfer", "finetune"):
        if getattr(study, section) is not None:
            yield (section,), "data.pretrain is text, which this stage does not take; leave it out"
    for name in study.run.methods:
        method = study.methods.get(name)
        if method is None:
            continue  # ``selection_rules`` says so
        for needs, what in (
            (method.views == 2, "two views"),
            (method.guided, "a teacher"),
            (method.upcycle, "a dense teacher to begin as"),
        ):
            if needs:
                text = f"the method needs {what}, and data.pretrain is text; take another method"
                yield ("methods", name), text


def trainings(study: Study) -> Iterator[tuple[tuple, str, Any]]:
    """Where training settings stand, on which phase's data, and the settings."""
    for phase in ("pretrain", "finetune", "adversarial"):
        if (training := getattr(study, phase)) is not None:
            yield (phase,), phase, training
    if (training := getattr(study.teacher, "training", None)) is not None:
        yield ("teacher", "training"), "pretrain", training


def short(value: Any) -> str:
    """Settings as what was set of them."""
    if hasattr(value, "model_dump"):
        return str(value.model_dump(exclude_defaults=True) or "it")
    return str(value)


def _tasks(study: Study) -> dict[str, Any]:
    """The class of the task of each phase."""
    return {phase: source.task for phase, source in study.data.items()}


def _kind(task: Any) -> str:
    return task.model_fields["kind"].default


def _volumes(source: Any) -> bool:
    return getattr(source, "volumes", False)


def _one_sort(study: Study, numbers: set[str]) -> Found:
    """A model that answers with a number cannot be fine-tuned on classes with the same head."""
    phases = study.run.phases
    other = [phase for phase in phases if (phase in numbers) != (phases[0] in numbers)]
    if numbers and other:
        both = f"data.{phases[0]} and data.{other[0]} are of two sorts, real numbers and classes"
        yield ("run", "phases", phases.index(other[0])), f"{both}; allowed: phases of one sort"


def _training(study: Study) -> Found:
    tasks = _tasks(study)
    for keys, phase, training in trainings(study):
        if phase not in tasks:
            continue
        for key, allowed in NEED_CLASSES.items():
            found = getattr(training, key, None)
            if found and (reason := tasks[phase].needs_classes(key)):
                text = f"found {short(found)}, but {reason} (data.{phase}); allowed: {allowed}"
                yield (*keys, key), text


def _distillation(study: Study) -> Found:
    task = _tasks(study).get("pretrain")
    reason = task.needs_classes("distillation") if task is not None else None
    for name, method in study.methods.items():
        if reason and method.distillation and name in study.run.methods:
            text = f"a teacher's decision cannot be learned: {reason} (data.pretrain); allowed: 0"
            yield ("methods", name, "distillation"), text


def _attacks(study: Study) -> Found:
    """Attacks that need classes, where labels are real numbers."""
    settings = study.robustness
    if settings is None:
        return
    for number, attack in enumerate(settings.attacks):
        yield from _attack(("robustness", "attacks", number), attack)
    if settings.survivors:
        text = "found true, but a prediction of a real number is never simply right"
        yield ("robustness", "survivors"), f"{text}; allowed: false"
    if study.transfer is not None:
        yield from _attack(("transfer", "attack"), study.transfer.attack)


def _attack(keys: tuple, attack: Any) -> Found:
    if not hasattr(attack, "objective"):
        text = f"{attack.kind} needs classes, and the labels are real numbers"
        yield (*keys, "kind"), f"{text}; allowed: fgsm, pgd, apgd"
    elif attack.objective in ("cross_entropy", "dlr"):
        allowed = "task (the absolute error), balance, routing_change"
        text = f"found {attack.objective}, which needs classes; allowed: {allowed}"
        yield (*keys, "objective"), text


def _calibrator(study: Study) -> Found:
    if study.calibrate is None:
        return
    found = study.calibrate.calibrator.kind
    tasks = _tasks(study)
    kinds = {phase: _kind(tasks[phase]) for phase in study.run.phases if phase in tasks}
    for phase, kind in kinds.items():
        if kind not in CALIBRATORS:
            several = "captions" if kind == "image_text" else "several labels for each image"
            reason = f"data.{phase} has {several}, which calibrate does not take"
            where = ("run", "phases", study.run.phases.index(phase))
            yield where, f"{reason}; leave out the phase or the stage"
    misfits = [kind for kind in kinds.values() if CALIBRATORS.get(kind, found) != found]
    if misfits:
        text = f"found {found}, but the labels are {WORDS[misfits[0]]}"
        yield ("calibrate", "calibrator", "kind"), f"{text}; allowed: {CALIBRATORS[misfits[0]]}"


def _measurements(study: Study, numbers: set[str], volumes: set[str]) -> Found:
    """What measures flat images with classes, and what measures ages."""
    asked = study.run.measurements
    flat = [what for what in FLAT_WITH_CLASSES if what in asked]
    for index, phase in enumerate(study.run.phases):
        if not any(study.run.covers(what, phase) for what in asked):
            continue
        where = ("run", "phases", index) if study.run.thorough is None else ("run", "thorough")
        if flat and phase in numbers | volumes:
            text = f"measure flat images with classes, which data.{phase} has not"
            yield where, f"{', '.join(flat)} {text}; allowed: phases without {phase}"
        if (
            "word_swaps" in asked
            and phase in study.data
            and _kind(study.data[phase].task) != "next_token"
        ):
            text = f"data.{phase} is no text, and word_swaps swaps words"
            yield where, f"{text}; allowed: kind: docstrings or wikitext"
        if "cohort_checks" in asked and phase in study.data and phase not in numbers:
            text = f"data.{phase} has classes, and cohort_checks needs ages"
            yield where, f"{text}; allowed: kind: phantom or bids"
