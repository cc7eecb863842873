"""How long trainings are, and how many images they have."""

from collections.abc import Iterator, Mapping
from typing import Any

from moecore.data.preview import Preview
from moecore.study.label_rules import trainings
from moecore.study.study import Study

Found = Iterator[tuple[tuple, str]]  # (keys, what is wrong)


def schedule_rules(study: Study) -> Found:
    """Warm-ups that are longer than the training; no data are needed to see it."""
    for keys, _, training in trainings(study):
        if training.warmup_epochs > training.epochs:
            found = f"found {training.warmup_epochs:g}, but epochs is {training.epochs}"
            yield (*keys, "warmup_epochs"), f"{found}; allowed: 0 to {training.epochs}"


def size_rules(study: Study, previews: Mapping[str, Preview]) -> Found:
    """Batches and shots that the training images of a phase do not give."""
    for keys, phase, training in trainings(study):
        if (preview := previews.get(phase)) and preview.counts:
            yield from _training(keys, phase, training, preview)
    preview = previews.get("pretrain")
    if preview is not None and preview.counts and _fits_routers(study):
        yield from _batch(
            ("teacher_router", "batch"), study.teacher_router, preview.images["train"], "pretrain"
        )


def _training(keys: tuple, phase: str, training: Any, preview: Preview) -> Found:
    numbers = [number for number in preview.counts["train"] if number]
    images = sum(numbers)
    shots = getattr(training, "shots", None)
    why = f"data.{phase}"
    if shots is not None and len(preview.counts["train"]) > 1:
        least = min(numbers)
        if shots > least:
            rare = (preview.classes or ())[preview.counts["train"].index(least)]
            found = f"found {shots}, but class {rare} of data.{phase} has {least} training images"
            yield (*keys, "shots"), f"{found}; allowed: 1 to {least}, or null"
            return
        images = shots * len(numbers)
        why = f"{shots} shots of {len(numbers)} classes"
    yield from _batch((*keys, "batch"), training, images, why)


def _batch(keys: tuple, settings: Any, images: int, why: str) -> Found:
    if settings.batch > images:
        found = f"found {settings.batch}, but there are {images} training images ({why})"
        yield keys, f"{found}; allowed: 1 to {images}"


def _fits_routers(study: Study) -> bool:
    """Whether a method that is run has routers of the teacher fitted beforehand."""
    asked = [study.methods[name] for name in study.run.methods if name in study.methods]
    fitted = any(method.guided_routing and not method.joint for method in asked)
    return study.teacher_router is not None and fitted
