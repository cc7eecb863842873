"""The data of each phase before they are prepared, and whether the phases fit together.

Rules yield (keys, message): the keys to a setting in params.yaml, and what is wrong.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from moecore.core.files import UserError, read_json
from moecore.data.card import Card, card_of_written_data
from moecore.data.prepared import SPLITS
from moecore.data.sources.base import Source
from moecore.study.study import Misfits, Study

PREPARED_DATA = Path("artifacts/data")
DVC_VARIABLE = "DVC_ROOT"  # the folder of the DVC project; DVC sets it for its stages


@contextmanager
def chdir_to_stages(home: Path) -> Iterator[None]:
    """Work in the folder ``home`` within the block, with DVC_ROOT set to its DVC project."""
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


def load_previews(study: Study) -> dict[str, Card]:
    """Return phase or "teacher" → Card: of data prepared with these settings, else of raw data."""
    sources: dict[str, Source] = {**study.data}
    if study.teacher is not None and study.teacher.data is not None:
        sources["teacher"] = study.teacher.data
    return {
        phase: read_matching_data_card(PREPARED_DATA / phase / "card.json", source)
        or source.describe()
        for phase, source in sources.items()
    }


def data_source_key_path(phase: str) -> tuple[str, str]:
    """Return the key in params.yaml of a phase's or the teacher's data: ("data", "pretrain")."""
    return ("teacher", "data") if phase == "teacher" else ("data", phase)


def data_problems(previews: Mapping[str, Card], written: Any) -> Misfits:
    """Yield (keys, message) for each card with a problem; written: the content of params.yaml."""
    for phase, preview in previews.items():
        if preview.problem is not None:
            section, key = data_source_key_path(phase)
            source = (written.get(section) or {}).get(key)
            named = isinstance(source, dict) and "root" in source
            yield (section, key, *(["root"] if named else [])), preview.problem


def misfits_with_pretrain_images(study: Study, previews: Mapping[str, Card]) -> Misfits:
    """Yield (keys, message) for phases and teachers whose data do not fit those of pretraining."""
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
        numbers = [f"{preview.images[split]:,} {split}" for split in SPLITS]
        phrases.append(", ".join(numbers))
    if preview.classes:
        phrases.append(f"{len(preview.classes)} classes")
    if preview.note:
        phrases.append(preview.note)
    return "; ".join(phrases)


def read_matching_data_card(card: Path, source: Any) -> Card | None:
    """Return the Card in file ``card`` if it was written with the settings ``source``, or None."""
    if not card.is_file():
        return None
    try:
        content = read_json(card)
        # Settings that are newer than the card get their defaults.
        if type(source).model_validate(content["settings"]) == source:
            return card_of_written_data(content)
    except (UserError, KeyError, TypeError, ValidationError):
        return None  # damaged, or written by other code: `prepare` writes it again
    return None
