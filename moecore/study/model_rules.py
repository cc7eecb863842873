"""Rules for check: do the data of all phases fit together, and can every model be built for them?

Every model of ``run.methods`` is built without memory, as each phase will build it. Rules report,
before anything runs, data of phases that do not fit together, what a constructor refuses, a teacher
that does not fit the model that it guides, and a model that cannot have fewer experts.
"""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import chdir, contextmanager
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from moecore.core.config import Surroundings
from moecore.core.files import UserError, read_json
from moecore.core.source_layout import format_error_with_line
from moecore.data.card import Card, build_card_from_dict
from moecore.data.prepared import SPLITS
from moecore.data.sources.base import Source
from moecore.nn.backbones.base_model import BackboneModel, ImageSpec
from moecore.nn.predict import meta_device_context
from moecore.study.part_rules import first_misfit_per_key, list_settings_misfits
from moecore.study.run_and_claims import PhaseName
from moecore.study.stages import REDUCING_PHASES, TRAINING_PHASES
from moecore.study.study import Misfits, Study
from moecore.tasks.classification import Classification
from moecore.training.method import Method, aligned_teacher_blocks
from moecore.training.upcycle import copy_dense_into_moe

PREPARED_DATA = Path("artifacts/data")
DVC_VARIABLE = "DVC_ROOT"  # the folder of the DVC project; DVC sets it for its stages
UNKNOWN_CLASSES_TASK = Classification(classes=("one", "other"))  # if the classes are not known yet
TEACHER_MODEL_KEYS = ("teacher", "model")
# Errors of building a model with unusual numbers, also torch's and Python's
BUILD_ERRORS = (UserError, ValueError, TypeError, RuntimeError, LookupError, AssertionError)
BUILD_ERRORS += (ArithmeticError,)
KEY_PREFIX = re.compile(
    rf"((?:model|teacher|router|text|experts|blocks|finetune|regions|{'|'.join(REDUCING_PHASES)})"
    r"(?:\.\w+)*)(: | is )"
)
ROUTER_K_KEYS = (("finetune", "k"), ("router", "k"), ("router", "router", "k"))


@contextmanager
def chdir_to_study(home: Path) -> Iterator[None]:
    """Change to the folder ``home`` within the block, and set DVC_ROOT to its DVC project."""
    before = os.environ.get(DVC_VARIABLE)
    with chdir(home):
        working = Path.cwd()
        projects = [path for path in (working, *working.parents) if (path / ".dvc").is_dir()]
        if before is None and projects:
            os.environ[DVC_VARIABLE] = str(projects[0])
        try:
            yield
        finally:
            if before is None:
                os.environ.pop(DVC_VARIABLE, None)


def load_data_previews(study: Study) -> dict[str, Card]:
    """Return phase → card of its data: of prepared data if current, else from the raw data."""
    sources: dict[str, Source] = {**study.data}
    if study.teacher is not None and study.teacher.data is not None:
        sources["teacher"] = study.teacher.data
    return {
        phase: read_matching_data_card(PREPARED_DATA / phase / "card.json", source)
        or source.describe()
        for phase, source in sources.items()
    }


def data_source_key_path(phase: str) -> tuple[str, str]:
    return ("teacher", "data") if phase == "teacher" else ("data", phase)


def unusable_data(previews: Mapping[str, Card], written: Any) -> Misfits:
    for phase, preview in previews.items():
        if preview.problem is not None:
            section, key = data_source_key_path(phase)
            source = (written.get(section) or {}).get(key)
            named = isinstance(source, dict) and "root" in source
            yield (section, key, *(["root"] if named else [])), preview.problem


def misfits_with_pretrain_images(study: Study, previews: Mapping[str, Card]) -> Misfits:
    """Yield (keys, message) for data that differ in form from those of pretraining."""
    first = previews.get("pretrain")
    if first is None:
        return
    for phase, preview in previews.items():
        if phase == "pretrain" or getattr(study, phase) is None:
            continue
        keys = data_source_key_path(phase)
        axes = len(preview.shape)
        first_axes = len(first.shape)
        if axes != first_axes:
            text = f"found images of {axes} axes, in data.pretrain of {first_axes}"
            yield keys, f"{text}; allowed: as many"
        elif preview.channels != first.channels:
            text = f"found {preview.channels} channels, in data.pretrain {first.channels}"
            yield keys, f"{text}; allowed: as many, choose other data for one of them"
        elif phase == "teacher" and preview.shape != first.shape:
            sides, first_sides = ("×".join(map(str, card.shape)) for card in (preview, first))
            text = f"found images of {sides} pixels, in data.pretrain of {first_sides}"
            yield keys, f"{text}; allowed: the same size"
    teacher = previews.get("teacher", first)
    for name in study.run.methods if teacher.classes != first.classes else ():
        if study.methods[name].distillation:
            text = "found a teacher of other classes (teacher.data) than data.pretrain has"
            yield ("methods", name, "distillation"), f"{text}; allowed: 0"


def describe_planned_data(preview: Card) -> str:
    size = "×".join(map(str, (preview.channels, *preview.shape)))
    phrases = [preview.name, f"images of {size}"]
    if len(preview.shape) == 1:
        before = preview.channels - 1
        phrases[1] = f"blocks of {preview.shape[0]} tokens, each read after {before} others"
    if preview.counts:
        phrases.append(", ".join(f"{preview.image_counts[split]:,} {split}" for split in SPLITS))
    if preview.classes:
        phrases.append(f"{len(preview.classes)} classes")
    if preview.note:
        phrases.append(preview.note)
    return "; ".join(phrases)


def read_matching_data_card(card: Path, source: Any) -> Card | None:
    """Return the data card in the file ``card`` if its settings equal ``source``; else None."""
    if not card.is_file():
        return None
    try:
        content = read_json(card)
        # Settings that are newer than the card get their defaults.
        if type(source).model_validate(content["settings"]) == source:
            return build_card_from_dict(content)
    except (UserError, KeyError, TypeError, ValidationError):
        return None  # damaged, or written by other code: `prepare` writes it again
    return None


class TrainingPhase(NamedTuple):
    name: str
    settings: Any
    image: ImageSpec


def model_misfits(study: Study, previews: Mapping[str, Card]) -> list[tuple[tuple, str]]:
    """Return (keys, message) for every model that cannot be built, guided or fine-tuned."""
    phases = [
        TrainingPhase(name, getattr(study, name), planned_image_spec(previews[name]))
        for name in TRAINING_PHASES
        if name in previews and getattr(study, name) is not None
    ]
    misfits: list[tuple[tuple, str]] = []
    with meta_device_context():
        if phases and phases[0].name == "pretrain":
            image = phases[0].image
            teacher = study.teacher
            misfits += _teacher_refusal_problems(_build_teacher(study, image)[1], "pretrain")
            if teacher is not None and len(image.shape) == 2:
                try:
                    teacher.check_name(image)
                except BUILD_ERRORS as error:
                    key, text = split_key_and_message(error)
                    misfits.append((key or ("teacher",), text))
        for name in study.run.methods:
            misfits += _check_method(study, name, study.methods[name], phases)
    return [*first_misfit_per_key(misfits), *_reduction_problems(study, previews)]


def planned_image_spec(preview: Card) -> ImageSpec:
    """Return the ImageSpec of data that are not prepared yet, with dummy normalisation."""
    middle = (0.5,) * preview.channels
    fields: dict[str, Any] = {"size": preview.size, "mean": middle, "std": middle}
    fields |= {"task": preview.task or UNKNOWN_CLASSES_TASK, "truth": preview.truth}
    return ImageSpec(channels=preview.channels, **fields)


def build_phase_model(
    study: Study, name: str, phase: PhaseName, image: ImageSpec
) -> BackboneModel | None:
    """Build the model that a method has after a phase, on the meta device (no memory)."""
    if study.model is None:
        return None
    method = study.methods[name]
    settings = getattr(study, phase)
    moe = method.moe
    if phase in REDUCING_PHASES and moe is not None:
        moe = settings.reduced_settings(moe)
    elif phase in TRAINING_PHASES and phase != "pretrain":
        moe = method.for_finetuning(settings.k, settings.guided).moe
    with meta_device_context():
        return method.merge_model_settings(study.model).build(image, moe)


def _check_method(study: Study, name: str, method: Method, phases: list[TrainingPhase]) -> Misfits:
    if study.model is None:
        return
    backbone = method.merge_model_settings(study.model)
    for phase in phases:
        learned = method
        try:
            if phase.name != "pretrain":
                learned = method.for_finetuning(phase.settings.k, phase.settings.guided)
            model = backbone.build(phase.image, learned.moe)
        except BUILD_ERRORS as error:
            yield _locate_refusal(error, name, method, phase)
            continue
        if learned.moe is not None:
            yield from _part_misfits_in_built_model(name, method, learned, phase, model)
        if phase.name == "pretrain":
            teacher = _build_teacher(study, model.image)[0] if method.upcycle else None
            if teacher is not None:
                try:
                    copy_dense_into_moe(model, teacher, method.upcycle)
                except UserError as error:
                    yield ("methods", name, "upcycle"), str(error).removeprefix("upcycle: ")
        else:
            yield from _fixed_image_size_problems(("model",), phase.name, model)
        if method.guided or method.upcycle:
            yield from _guiding_problems(study, name, learned, phase.name, model)
            if phase.image.size != phases[0].image.size:
                teacher = _build_teacher(study, phase.image)[0]
                yield from _fixed_image_size_problems(TEACHER_MODEL_KEYS, phase.name, teacher)


def _part_misfits_in_built_model(
    name: str, method: Method, learned: Method, phase: TrainingPhase, model: BackboneModel
) -> Misfits:
    # learned: the method as it is trained in this phase.
    routed = method.model_copy(update={"router": learned.router})
    training = phase.settings
    if phase.name == "pretrain":
        training = method.merge_pretrain_settings(training)
    images = training.batch * method.views
    bare = Surroundings(phase=phase.name)
    sized = bare._replace(
        layers=len(model.layouts),
        tokens=images * min(layout.special + prod(layout.grid) for layout in model.layouts),
        special=any(layout.special for layout in model.layouts),
        truth=bool(phase.image.truth),
    )
    same = learned.router == method.router  # then the file alone has no misfits
    reported = set() if same else set(list_settings_misfits(("methods", name), routed, bare))
    for misfit in list_settings_misfits(("methods", name), routed, sized):
        if misfit not in reported:
            yield misfit


def _locate_refusal(
    error: Exception, name: str, method: Method, phase: TrainingPhase
) -> tuple[tuple, str]:
    """Return (keys, message) for an error raised while building the model of a method."""
    key, text = split_key_and_message(error)
    if key[:1] == ("model",):
        is_changed = key[1:] and key[1] in method.model
        keys = ("methods", name, *key) if is_changed else key
        return keys, f"{text} (data.{phase.name})" if "image" in text else text
    if key in ROUTER_K_KEYS and getattr(phase.settings, "k", None) is not None:
        return (phase.name, "k"), f"{text} (methods.{name})"
    return ("methods", name, *key), text


def split_key_and_message(error: Exception) -> tuple[tuple[str, ...], str]:
    """Split an error's text into the words of the dotted key at its start, and its message."""
    text = str(error)
    if not isinstance(error, (UserError, ValueError)):
        return (), f"cannot be built: {format_error_with_line(error)}"
    match = KEY_PREFIX.match(text)
    if match is None:
        return (), text
    rest = text[match.end() :].removeprefix("found ")
    return tuple(match[1].split(".")), f"found {rest}"


def _fixed_image_size_problems(keys: tuple, phase: str, model: BackboneModel | None) -> Misfits:
    if model is not None and not model.moves:
        text = f"found {model.config.kind}, whose models work at one image size only"
        allowed = "a model whose weights fit images of any size, as vit"
        yield (*keys, "kind"), f"{text}; allowed with {phase}: {allowed}"


def _build_teacher(study: Study, image: ImageSpec) -> tuple[BackboneModel | None, Exception | None]:
    """Return (teacher, None) or (None, error); (None, None) if its weights come from elsewhere."""
    settings = study.teacher
    if settings is None or settings.training is None:
        return None, None
    try:
        return settings.build(image), None
    except BUILD_ERRORS as error:
        return None, error


def _teacher_refusal_problems(refused: Exception | None, phase: str) -> Misfits:
    if refused is not None:
        key, text = split_key_and_message(refused)
        yield (*TEACHER_MODEL_KEYS, *key[1:]), f"{text} (data.{phase})"


def _guiding_problems(
    study: Study, name: str, method: Method, phase: str, model: BackboneModel
) -> Misfits:
    teacher, refused = _build_teacher(study, model.image)
    yield from _teacher_refusal_problems(refused, phase)
    if teacher is None or not method.guided_routing or model.moe is None:
        return
    blocks = model.moe.indices(model.depth)
    stages = model.config.stages, teacher.config.stages
    for block, place in zip(blocks, aligned_teacher_blocks(blocks, *stages), strict=True):
        if place < 0:
            yield _missing_teacher_block_misfit(name, block, *stages)
            return
        read = teacher.depth - 1 if method.teacher_router.features == "final" else place
        layouts = model.layout_of(block), teacher.layout_of(read)
        ours, theirs = (layout.special + prod(layout.grid) for layout in layouts)
        if ours not in (theirs, theirs + 1):
            text = f"found {theirs} tokens of data.{phase}; methods.{name}, which it guides, has "
            yield TEACHER_MODEL_KEYS, f"{text}{ours}; allowed: the model's patch and pooling"
            return


def _missing_teacher_block_misfit(
    name: str, block: int, ours: tuple[int, ...], theirs: tuple[int, ...]
) -> tuple[tuple, str]:
    if len(ours) != len(theirs):
        text = f"found a model of {len(theirs)} stages; methods.{name}, which it guides, has "
        return (*TEACHER_MODEL_KEYS, "kind"), f"{text}{len(ours)}; allowed: as many"
    if len(ours) == 1:
        key = "depth"
        allowed = str(ours[0])
        depth = str(theirs[0])
    else:
        key = "depths"
        allowed = str(list(ours))
        depth = str(list(theirs))
    text = f"found {depth}, which has no block for block {block} of methods.{name}"
    return (*TEACHER_MODEL_KEYS, key), f"{text}; allowed: {allowed}, or near it"


def _reduction_problems(study: Study, previews: Mapping[str, Card]) -> Misfits:
    for phase in REDUCING_PHASES:
        reduction = getattr(study, phase)
        if reduction is None:
            continue
        if phase in study.data and study.data[phase] != study.data.get("pretrain"):
            text = "found other data than data.pretrain, on which the models are trained"
            yield ("data", phase), f"{text}; allowed: the same"
            continue
        for name in study.run.methods if "pretrain" in previews else ():
            if study.methods[name].moe is None:
                continue
            try:
                build_phase_model(study, name, phase, planned_image_spec(previews["pretrain"]))
            except UserError as error:
                key, text = split_key_and_message(error)
                if key[:1] == (phase,):
                    yield key, f"{text} (methods.{name})"
                else:
                    yield ("methods", name, *key), f"{text} ({phase})"
