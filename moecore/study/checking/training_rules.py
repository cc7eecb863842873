"""Whether trainings can be: their length, and the images that their batches and views need."""

from collections.abc import Callable, Mapping
from itertools import compress
from typing import Any

from moecore.core.files import UserError
from moecore.data.sources.base import PlannedData
from moecore.data.views.views import UNEVEN_REFUSAL
from moecore.study.study import Misfits, Study
from moecore.study.training_rules import FALSIFIED, list_training_settings


def unused_teacher_note(study: Study) -> str | None:
    """Return a line where each of several seeds trains a teacher from which no method learns."""
    asked = [study.methods[name] for name in study.run.methods]
    needed = any(method.guided or method.upcycle for method in asked)
    number = len(study.run.seeds)
    if needed or number == 1 or study.teacher is None or study.teacher.training is None:
        return None
    return (
        f"teacher: {number} are trained, one per seed, but no method of run.methods needs one; "
        "teacher: {kind: no_teacher} trains none"
    )


def gradientless_router_note(study: Study) -> str | None:
    """Return a line where routers get almost no gradient of the task.

    A norm behind Swin V2's experts takes away the length that a single expert's weight gave.
    """
    if study.model is None:
        return None
    methods = {name: study.methods[name] for name in study.run.methods}
    names = [
        name
        for name, method in methods.items()
        if getattr(method.router, "k", None) == 1
        and method.merge_model_settings(study.model).kind == "swin_v2"
    ]
    if not names:
        return None
    why = "one expert per token in a swin_v2, whose norm leaves routers almost no gradient"
    return f"methods {', '.join(names)}: {why} of the task; model.kind: swin_moe gives them one"


def schedule_misfits(study: Study) -> Misfits:
    """Yield warm-ups that are longer than the training; no data are needed to see it."""
    for keys, _, training in list_training_settings(study):
        yield from _schedule(keys, training)
    yield from _problems_of_methods(study, _schedule)


def _schedule(keys: tuple, training: Any) -> Misfits:
    if training.warmup_epochs > training.epochs:
        text = f"found {training.warmup_epochs:g}, but epochs is {training.epochs}"
        yield (*keys, "warmup_epochs"), f"{text}; allowed: 0 to {training.epochs}"


def _problems_of_methods(study: Study, rule: Callable[[tuple, Any], Misfits]) -> Misfits:
    """Yield what a rule says of ``pretrain`` as methods change it, where it is not said of all."""
    if study.pretrain is None:
        return
    of_all = set(rule((), study.pretrain))
    for name, method in study.methods.items():
        try:
            changed = method.merge_pretrain_settings(study.pretrain)
        except UserError:
            continue  # ``method_misfits`` says it
        for keys, text in rule((), changed):
            if (keys, text) not in of_all:
                yield ("methods", name, "pretrain", *keys), text


def training_image_misfits(study: Study, previews: Mapping[str, PlannedData]) -> Misfits:
    """Yield batches and shots that the training images of a phase do not give."""
    for keys, phase, training in list_training_settings(study):
        if preview := previews.get(phase):
            yield from _sizes(keys, phase, training, preview)
    preview = previews.get("pretrain")
    if preview is None:
        return
    yield from _problems_of_methods(study, lambda keys, own: _sizes(keys, "pretrain", own, preview))
    asked = [study.methods[name] for name in study.run.methods if name in study.methods]
    fitted = any(method.guided_routing and not method.joint for method in asked)
    if preview.counts and fitted and study.teacher_router is not None:
        images = preview.images["train"]
        yield from _batch(("teacher_router", "batch"), study.teacher_router, images, "pretrain")


def _sizes(keys: tuple, phase: str, training: Any, preview: PlannedData) -> Misfits:
    if preview.counts:
        yield from _training(keys, phase, training, preview)
    views, place = training.views, (*keys, "views")
    if preview.truth:
        changes = [(*place, "randaugment"), (*place, "jitter"), (*place, "erasing"), (*keys, "mix")]
        settings = (views.randaugment, views.jitter, views.erasing, training.mix)
        for changed in compress(changes, settings):
            yield changed, f"found a change of pixels, {FALSIFIED.format(phase)}"
    if preview.short_side is None:
        sides = preview.size if isinstance(preview.size, tuple) else (preview.size,)
        if views.shift >= min(sides):
            text = f"found {views.shift}, but data.{phase} has images of {preview.size} pixels"
            yield (*place, "shift"), f"{text}; allowed: less than that"
        return
    if views.crop is None:
        yield (*place, "crop"), f"found null, but in data.{phase} {UNEVEN_REFUSAL}"


def _training(keys: tuple, phase: str, training: Any, preview: PlannedData) -> Misfits:
    counts = preview.counts["train"]
    images, why = sum(counts), f"data.{phase}"
    shots = getattr(training, "shots", None)
    if shots is not None and preview.classes:
        numbers, named = [number for number in counts if number], "a class"
        least = min(numbers)
        if len(counts) > 1:
            named = f"class {preview.classes[counts.index(least)]}"
        else:  # of drawn data the number of each class is not known yet
            numbers = [images // len(preview.classes)] * len(preview.classes)
            least = numbers[0]
        if shots > least:
            text = f"found {shots}, but {named} of data.{phase} has {least} training images"
            yield (*keys, "shots"), f"{text}; allowed: 1 to {least}, or null"
            return
        images = shots * len(numbers)
        why = f"{shots} shots of {len(numbers)} classes"
    yield from _batch((*keys, "batch"), training, images, why)


def _batch(keys: tuple, settings: Any, images: int, why: str) -> Misfits:
    if settings.batch > images:
        text = f"found {settings.batch}, but there are {images} training images ({why})"
        yield keys, f"{text}; allowed: 1 to {images}"
