"""Floor 4: what of params.yaml has no meaning for volumes, or for labels that are real numbers (ages). Yields (keys, what is wrong)."""

from collections.abc import Iterator
from typing import Any

from moecore.augmentations import OF_VOLUMES
from moecore.selection import THOROUGH

Found = Iterator[tuple[tuple, str]]

VOLUME_VIEWS = "shift, flip, affine, intensity and fill"
FLAT_VIEWS = ("crop", "randaugment", "erasing", "size")  # of ViewSettings: made for flat images only
NEED_CLASSES = {"label_smoothing": 0, "shots": "null", "mix": "null"}  # of Training, with the value that switches each off
FLAT_ONLY = tuple(stage for stage in THOROUGH if stage != "cost")


def cohort_checks(study: Any) -> Found:
    """Sources say ``real`` where labels are real numbers and ``volumes`` where images are volumes; only those phases are looked at."""
    data = getattr(study, "data", {})
    real = {phase for phase, source in data.items() if getattr(source, "real", False)}
    volumes = {phase for phase, source in data.items() if getattr(source, "volumes", False)}
    yield from _phases(study, real)
    if real:
        yield from _training(study, real)
        yield from _methods(study, real)
        yield from _attacks(study)
        yield from _thorough(study, real | volumes)
    if volumes:
        yield from _views(study, volumes)
    yield from _calibrator(study, real)
    yield from _model(study, "pretrain" in volumes)


def _phases(study: Any, real: set[str]) -> Found:
    """A model that answers with a number cannot be fine-tuned on classes with the same head, nor measured beside classifiers."""
    phases = study.run.phases
    if real and (other := [phase for phase in phases if (phase in real) != (phases[0] in real)]):
        text = f"data.{phases[0]} and data.{other[0]} are of two sorts, real numbers and classes; allowed: phases of one sort"
        yield ("run", "phases", phases.index(other[0])), text
    if hasattr(study, "cohort_checks"):
        for index, phase in enumerate(phases):
            if phase in study.data and phase not in real:
                yield ("run", "phases", index), f"data.{phase} has classes, and cohort_checks needs ages; allowed: kind: phantom or bids"


def _training(study: Any, real: set[str]) -> Found:
    for keys, phase, training in _trainings(study):
        for key, allowed in NEED_CLASSES.items() if phase in real else ():
            if found := getattr(training, key, None):
                yield (*keys, key), f"found {_short(found)}, but the labels of data.{phase} are real numbers; allowed: {allowed}"


def _methods(study: Any, real: set[str]) -> Found:
    source = study.data.get("pretrain")
    mapless = hasattr(source, "maps") and source.maps is None and source.dseg is None
    for name, method in getattr(study, "methods", {}).items() if "pretrain" in real else ():
        if name not in study.run.methods:
            continue
        if mapless and method.regions is not None:
            yield ("methods", name, "regions"), "needs tissue maps, but maps and dseg of data.pretrain are null; allowed: null, or such maps"
        if method.distillation:
            yield ("methods", name, "distillation"), "a teacher's decision for a class cannot be learned where labels are real numbers; allowed: 0"


def _attacks(study: Any) -> Found:
    settings = getattr(study, "robustness", None)
    if settings is None:
        return
    for number, attack in enumerate(settings.attacks):
        if not hasattr(attack, "objective"):
            allowed = "fgsm, pgd, apgd"
            yield ("robustness", "attacks", number, "kind"), f"{attack.kind} needs classes, and the labels are real numbers; allowed: {allowed}"
        elif attack.objective in ("cross_entropy", "dlr"):
            allowed = "task (the absolute error), balance, routing_change"
            yield ("robustness", "attacks", number, "objective"), f"found {attack.objective}, which needs classes; allowed: {allowed}"
    if settings.survivors:
        yield ("robustness", "survivors"), "found true, but a prediction of a real number is never simply right; allowed: false"


def _thorough(study: Any, phases: set[str]) -> Found:
    flat = [stage for stage in FLAT_ONLY if hasattr(study, stage)]
    for index, phase in enumerate(study.run.phases if flat else ()):
        if phase in phases and any(study.run.covers(stage, phase) for stage in flat):
            text = f"{', '.join(flat)} measure flat images with classes, which data.{phase} has not; allowed: phases without {phase}"
            yield (("run", "phases", index) if study.run.thorough is None else ("run", "thorough")), text


def _views(study: Any, volumes: set[str]) -> Found:
    for keys, phase, training in _trainings(study):
        if phase in volumes and training is not None:
            yield from _flat_views((*keys, "views"), training.views)
    settings = getattr(study, "routing", None)
    if settings is None or not volumes & set(study.run.phases):
        return
    yield from _flat_views(("routing", "views"), settings.views)
    for index, asked in enumerate(settings.augmentations):
        keys = ("routing", "augmentations", index)
        if not isinstance(asked, str):
            yield from _flat_views((*keys, "views"), asked.views)
        elif asked not in OF_VOLUMES:
            yield keys, f"found {asked}, which is for flat images; allowed for volumes: {', '.join(OF_VOLUMES)}"


def _flat_views(keys: tuple, views: Any) -> Found:
    for name in FLAT_VIEWS:
        if getattr(views, name, None):
            yield (*keys, name), f"found {_short(getattr(views, name))}, which is for flat images; volumes have {VOLUME_VIEWS}"
    if views.affine is not None and views.affine.shear:
        yield (*keys, "affine", "shear"), f"found {views.affine.shear:g}, which is for flat images; allowed for volumes: 0"


def _calibrator(study: Any, real: set[str]) -> Found:
    settings = getattr(study, "calibrate", None)
    if settings is None:
        return
    wanted, other = ("linear", "temperature") if real & set(study.run.phases) else ("temperature", "linear")
    if settings.calibrator.kind == other:
        what = "real numbers" if wanted == "linear" else "classes"
        yield ("calibrate", "calibrator", "kind"), f"found {other}, but the labels are {what}; allowed: {wanted}"


def _model(study: Any, volumes: bool) -> Found:
    teacher = getattr(study, "teacher", None)
    if volumes and getattr(teacher, "kind", "") == "timm":
        yield ("teacher", "kind"), "found timm, whose models are of flat images; allowed for volumes: dense, no_teacher"
    teacher = getattr(teacher, "model", None) if getattr(teacher, "kind", "") == "dense" else None
    for keys, model in ((("model", "kind"), getattr(study, "model", None)), (("teacher", "model", "kind"), teacher)):
        if model is not None and (model.kind == "vit3d") != volumes:
            what, allowed = ("volumes", "vit3d") if volumes else ("flat images", "vit")
            yield keys, f"found {model.kind}, but the images of data.pretrain are {what}; allowed: {allowed}"


def _trainings(study: Any) -> Iterator[tuple[tuple, str, Any]]:
    """Where training settings stand, on which phase's data, and the settings."""
    for phase in ("pretrain", "finetune", "adversarial"):
        if (training := getattr(study, phase, None)) is not None:
            yield (phase,), phase, training
    if (training := getattr(getattr(study, "teacher", None), "training", None)) is not None:
        yield ("teacher", "training"), "pretrain", training


def _short(value: Any) -> str:
    return str(value.model_dump(exclude_defaults=True) or "it") if hasattr(value, "model_dump") else str(value)
