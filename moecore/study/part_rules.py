"""Collect the misfits of every settings object of a study (``Config.misfits``).

Each part has its rules in its file. This module gives them the part's surroundings: its method, the
data that it works on, the phases that use it.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

from moecore.core.config import Config, Surroundings
from moecore.core.files import UserError
from moecore.data.card import Card
from moecore.study.stages import ROWS, SECTIONS, TRAINING_PHASES
from moecore.study.study import Misfits, Study
from moecore.training.method import Method

Previews = Mapping[str, Card]
Placed = Iterator[tuple[tuple, Any, Surroundings]]  # keys, settings, what surrounds them
HOLDERS = (Config, dict, list, tuple)  # of settings objects
MEASURING_SECTIONS = tuple(  # of stages that look at the models of run.phases
    key
    for row in ROWS
    if "phase" in row.item
    for key in SECTIONS[row.name]
    if key not in ("run", "methods")
)


def part_misfits(study: Study, previews: Previews) -> Misfits:
    """Yield the misfits of all settings; previews: phase → card of known data."""
    misfits = (ask_settings(*root) for root in list_sections(study, previews))
    yield from first_by_place(*misfits, _changed_trainings(study, previews))


def first_by_place(*several: Iterable[tuple[tuple, str]]) -> list[tuple[tuple, str]]:
    """Return the first misfit of each place."""
    first: dict[tuple, str] = {}
    for keys, text in chain(*several):
        first.setdefault(keys, text)
    return list(first.items())


def ask_settings(keys: tuple, settings: Any, around: Surroundings) -> Misfits:
    """Yield the misfits of settings and of all settings inside them."""
    for place, part, near in walk_settings(keys, settings, around):
        for inner, text in part.misfits(near):
            yield (*place, *inner), text


def list_remarks(study: Study) -> Misfits:
    """Yield the remarks of all settings, which are not errors."""
    for keys, settings, _ in walk_settings((), study, Surroundings()):
        for inner, text in settings.remarks():
            yield (*keys, *inner), text


def walk_settings(keys: tuple, value: Any, around: Surroundings) -> Placed:
    """Yield every settings object in ``value``, outer objects first."""
    if isinstance(value, Config):
        yield keys, value, around
        around, value = value.surround(around), vars(value)
    elif isinstance(value, list | tuple):
        value = dict(enumerate(value))
    if isinstance(value, dict):
        for name, inner in value.items():
            if isinstance(inner, HOLDERS):
                yield from walk_settings((*keys, name), inner, around)


def data_surroundings(study: Study, previews: Previews, phase: str) -> Surroundings:
    """Return the surroundings of settings that work on the data of a phase or of the teacher."""
    source = study.data.get(phase)
    if phase == "teacher":
        source = None if study.teacher is None else study.teacher.data
    return Surroundings(phase=phase, source=source, preview=previews.get(phase))


def list_sections(study: Study, previews: Previews) -> Placed:
    """Yield the sections to check, sections of measurements once per phase."""
    pretraining = data_surroundings(study, previews, "pretrain")
    for name, method in study.methods.items():
        around = pretraining if name in study.run.methods else Surroundings()
        yield ("methods", name), method, around._replace(images=_images_by_phase(study, method))
    yield ("model",), study.model, pretraining
    if (teacher := study.teacher) is not None:
        yield ("teacher",), teacher.model_copy(update={"training": None}), pretraining
        learned = data_surroundings(study, previews, "teacher") if teacher.data else pretraining
        yield ("teacher", "training"), teacher.training, learned
    for phase in TRAINING_PHASES:
        yield (phase,), getattr(study, phase), data_surroundings(study, previews, phase)
    chosen = [study.methods[name] for name in study.run.methods if name in study.methods]
    if any(method.guided_routing and not method.joint for method in chosen):
        yield ("teacher_router",), study.teacher_router, pretraining
    for section in (*MEASURING_SECTIONS, *study.run.measurements):
        settings = find_section(study, section)
        for phase in study.run.phases:
            if study.run.covers(section, phase):
                around = data_surroundings(study, previews, phase)
                yield tuple(section.split(".")), settings, around


def find_section(study: Study, name: str) -> Any:
    """Return the settings of a section or of a measurement ``package.module``, or None."""
    settings: Any = study
    for key in name.split("."):
        settings = getattr(settings, key, None)
    return settings


def _images_by_phase(study: Study, method: Method) -> dict[str, int]:
    """Return phase → images per step of a method, each view counted."""
    trainings = {phase: getattr(study, phase) for phase in TRAINING_PHASES}
    try:
        if trainings["pretrain"] is not None:
            trainings["pretrain"] = method.merge_pretrain_settings(trainings["pretrain"])
    except UserError:
        del trainings["pretrain"]  # ``section_misfits`` reports it
    return {
        phase: training.batch * method.views
        for phase, training in trainings.items()
        if training is not None
    }


def _changed_trainings(study: Study, previews: Previews) -> Misfits:
    """Yield the misfits of ``pretrain`` that only a method's changes cause."""
    if study.pretrain is None:
        return
    around = data_surroundings(study, previews, "pretrain")
    common = set(ask_settings((), study.pretrain, around))
    for name, method in study.methods.items():
        try:
            changed = method.merge_pretrain_settings(study.pretrain)
        except UserError:
            continue  # ``section_misfits`` reports it
        for keys, text in ask_settings((), changed, around) if method.pretrain else ():
            if (keys, text) not in common:
                yield ("methods", name, "pretrain", *keys), text
