"""Whether trainings can be: their length and images, and what a teacher guides.

A teacher must have the patches, the depth and the size for it.
"""

from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import Any

from moecore.core.files import UserError
from moecore.core.records import Layout
from moecore.data.preview import Preview
from moecore.data.views.views import UNEVEN_REFUSAL
from moecore.nn.backbones.image import ImageSpec
from moecore.nn.backbones.model import BackboneModel
from moecore.study.checking.label_rules import list_trainings
from moecore.study.checking.refusals import REFUSED, split_key_and_message
from moecore.study.reading.study import Study
from moecore.training.guide import aligned_blocks
from moecore.training.method import Method
from moecore.training.upcycle import upcycle_model

Misfits = Iterator[tuple[tuple, str]]  # (keys, what is wrong)

TEACHER_SECTIONS = ("teacher", "model")


def upcycling_rules(study: Study, name: str, method: Method, model: BackboneModel) -> Misfits:
    """Yield why the teacher's weights do not fit into the experts of a method of them."""
    teacher = _build_teacher(study, model.image)[0] if method.upcycle else None
    if teacher is None:
        return
    try:
        upcycle_model(model, teacher)
    except UserError as error:
        yield ("methods", name, "upcycle"), str(error).removeprefix("upcycle: ")


def building_rules(study: Study, phase: str, image: ImageSpec) -> Misfits:
    """Yield why the dense teacher cannot be built for the images of a phase."""
    yield from _refusal_problems(_build_teacher(study, image)[1], phase)
    teacher = study.teacher
    if teacher is not None and teacher.kind == "timm" and len(image.shape) == 2:
        try:
            teacher.check_name(image)
        except UserError as error:
            yield split_key_and_message(error)


def _refusal_problems(refused: Exception | None, phase: str) -> Misfits:
    if refused is not None:
        key, text = split_key_and_message(refused)
        yield (*TEACHER_SECTIONS, *key[1:]), f"{text} (data.{phase})"


def guiding_rules(
    study: Study, name: str, method: Method, phase: str, model: BackboneModel
) -> Misfits:
    """Yield where the teacher sees other tokens than a model that it guides, or is too flat."""
    if not (study.methods[name].guided or study.methods[name].upcycle):
        return
    teacher, refused = _build_teacher(study, model.image)
    yield from _refusal_problems(refused, phase)
    if teacher is None or not method.guided_routing or model.moe is None:
        return
    blocks = model.moe.indices(model.depth)
    stages = model.config.stages, teacher.config.stages
    aligned = aligned_blocks(blocks, *stages)
    for block, place in zip(blocks, aligned, strict=True):
        if place < 0:
            yield _missing_block(name, block, *stages)
            return
        read = teacher.depth - 1 if method.teacher_router.features == "final" else place
        ours, theirs = _token_count(model.layout_of(block)), _token_count(teacher.layout_of(read))
        if ours not in (theirs, theirs + 1):
            text = f"it sees {theirs} tokens of data.{phase}, and methods.{name}, which it guides, "
            yield TEACHER_SECTIONS, f"{text}{ours}; allowed: the model's patch and pooling"
            return


def _missing_block(
    name: str, block: int, ours: tuple[int, ...], theirs: tuple[int, ...]
) -> tuple[tuple, str]:
    """A teacher that is too flat for what it guides, or of other stages."""
    if len(ours) != len(theirs):
        text = f"found a model of {len(theirs)} stages; methods.{name}, which it guides, has "
        return (*TEACHER_SECTIONS, "kind"), f"{text}{len(ours)}; allowed: as many"
    text = f"found {list(theirs) if len(theirs) > 1 else theirs[0]}, which has no block beside"
    near = list(ours) if len(ours) > 1 else ours[0]
    key = "depths" if len(ours) > 1 else "depth"
    return (
        *TEACHER_SECTIONS,
        key,
    ), f"{text} block {block} of methods.{name}; allowed: {near}, or near it"


def unneeded_teachers(study: Study) -> str | None:
    """Return a line where each of several seeds trains a teacher from which no method learns."""
    asked = [study.methods[name] for name in study.run.methods]
    needed = any(method.guided or method.upcycle for method in asked)
    number = len(study.run.seeds)
    if needed or number == 1 or getattr(study.teacher, "training", None) is None:
        return None
    return (
        f"teacher: {number} are trained, one per seed, but no method of run.methods needs one; "
        "teacher: {kind: no_teacher} trains none"
    )


def untrained_routers(study: Study) -> str | None:
    """Return a line where routers get almost no gradient of the task.

    Behind the experts of Swin V2 a norm takes away the length that a single expert's weight gave to
    its output.
    """
    names = []
    for name in study.run.methods:
        method = study.methods[name]
        one = getattr(method.router, "k", None) == 1
        if (
            study.model is not None
            and one
            and method.merge_model_settings(study.model).kind == "swin_v2"
        ):
            names.append(name)
    if not names:
        return None
    why = (
        "one expert per token in a swin_v2, whose norm behind it leaves routers almost no gradient"
    )
    return f"methods {', '.join(names)}: {why} of the task; model.kind: swin_moe gives them one"


def _build_teacher(study: Study, image: ImageSpec) -> tuple[BackboneModel | None, Exception | None]:
    """The dense teacher for such images, or why it refuses them; one from timm is not fetched."""
    settings = study.teacher
    if settings is None or settings.kind != "dense":
        return None, None
    try:
        return settings.build(image), None
    except REFUSED as error:
        return None, error


def _token_count(layout: Layout) -> int:
    return layout.special + prod(layout.grid)


def schedule_rules(study: Study) -> Misfits:
    """Yield warm-ups that are longer than the training; no data are needed to see it."""
    for keys, _, training in list_trainings(study):
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
            changed = (
                method.merge_pretrain_settings(study.pretrain)
                if method.pretrain
                else study.pretrain
            )
        except UserError:
            continue  # ``method_rules`` says it
        for keys, text in rule((), changed):
            if (keys, text) not in of_all:
                yield ("methods", name, "pretrain", *keys), text


def size_rules(study: Study, previews: Mapping[str, Preview]) -> Misfits:
    """Yield batches and shots that the training images of a phase do not give."""
    for keys, phase, training in list_trainings(study):
        if preview := previews.get(phase):
            yield from _sizes(keys, phase, training, preview)
    preview = previews.get("pretrain")
    if preview is not None:
        yield from _problems_of_methods(
            study, lambda keys, own: _sizes(keys, "pretrain", own, preview)
        )
    if preview is not None and preview.counts and _has_fitted_routers(study):
        yield from _batch(
            ("teacher_router", "batch"), study.teacher_router, preview.images["train"], "pretrain"
        )


def _sizes(keys: tuple, phase: str, training: Any, preview: Preview) -> Misfits:
    if preview.counts:
        yield from _training(keys, phase, training, preview)
    if preview.short_side is None:
        yield from _shift((*keys, "views", "shift"), phase, training.views, preview)
    else:
        yield from _whole_images((*keys, "views"), phase, training.views, preview.short_side)


def _training(keys: tuple, phase: str, training: Any, preview: Preview) -> Misfits:
    numbers = [number for number in preview.counts["train"] if number]
    images = sum(numbers)
    shots = getattr(training, "shots", None)
    why = f"data.{phase}"
    if shots is not None and len(preview.counts["train"]) > 1:
        least = min(numbers)
        if shots > least:
            rare = (preview.classes or ())[preview.counts["train"].index(least)]
            text = f"found {shots}, but class {rare} of data.{phase} has {least} training images"
            yield (*keys, "shots"), f"{text}; allowed: 1 to {least}, or null"
            return
        images = shots * len(numbers)
        why = f"{shots} shots of {len(numbers)} classes"
    yield from _batch((*keys, "batch"), training, images, why)


def _shift(keys: tuple, phase: str, views: Any, preview: Preview) -> Misfits:
    """Views that may be moved out of the image."""
    sides = preview.size if isinstance(preview.size, tuple) else (preview.size,)
    if views.shift >= min(sides):
        text = f"found {views.shift}, but data.{phase} has images of {preview.size} pixels"
        yield keys, f"{text}; allowed: less than that"


def _whole_images(keys: tuple, phase: str, views: Any, short_side: int) -> Misfits:
    """What views of images that are kept whole must have, and have no more of."""
    if views.crop is None:
        yield (*keys, "crop"), f"found null, but in data.{phase} {UNEVEN_REFUSAL}"
    if views.size is not None and views.size > short_side:
        text = f"found {views.size}, but data.{phase} keeps images with a short side of "
        yield (*keys, "size"), f"{text}{short_side}; allowed: at most that, or null"


def _batch(keys: tuple, settings: Any, images: int, why: str) -> Misfits:
    if settings.batch > images:
        text = f"found {settings.batch}, but there are {images} training images ({why})"
        yield keys, f"{text}; allowed: 1 to {images}"


def _has_fitted_routers(study: Study) -> bool:
    """Return whether a method that is run has routers of the teacher fitted beforehand."""
    asked = [study.methods[name] for name in study.run.methods if name in study.methods]
    fitted = any(method.guided_routing and not method.joint for method in asked)
    return study.teacher_router is not None and fitted
