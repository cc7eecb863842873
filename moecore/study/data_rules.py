"""The data of each phase before any of it is prepared, and whether the phases fit each other."""

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
DVC_VARIABLE = "DVC_ROOT"  # the folder of the DVC project, which DVC tells its stages


@contextmanager
def chdir_to_stages(home: Path) -> Iterator[None]:
    """Work where the stages of the project in ``home`` will: paths count from there."""
    before = os.environ.get(DVC_VARIABLE)
    with chdir(home):
        here = Path.cwd()
        projects = [folder for folder in (here, *here.parents) if (folder / ".dvc").is_dir()]
        if before is None and projects:
            os.environ[DVC_VARIABLE] = str(projects[0])
        try:
            yield
        finally:
            if before is None:
                os.environ.pop(DVC_VARIABLE, None)


def load_previews(study: Study) -> dict[str, Card]:
    """Return what each data set will be, by phase, and that of a teacher which has its own.

    What is prepared already, with the same settings, counts before the raw data.
    """
    sources: dict[str, Source] = {**study.data}
    if study.teacher is not None and study.teacher.data is not None:
        sources["teacher"] = study.teacher.data
    return {
        phase: read_matching_data_card(PREPARED_DATA / phase / "card.json", source)
        or source.describe()
        for phase, source in sources.items()
    }


def data_source_key_path(phase: str) -> tuple[str, str]:
    """Return where the source of ``load_previews`` stands in params.yaml."""
    return ("teacher", "data") if phase == "teacher" else ("data", phase)


def data_problems(previews: Mapping[str, Card], written: Any) -> Misfits:
    """Yield what is missing or wrong with the data; written: the file as plain data."""
    for phase, preview in previews.items():
        if preview.problem is not None:
            section, key = data_source_key_path(phase)
            source = (written.get(section) or {}).get(key)
            named = isinstance(source, dict) and "root" in source
            yield (section, key, *(["root"] if named else [])), preview.problem


def misfits_with_pretrain_images(study: Study, previews: Mapping[str, Card]) -> Misfits:
    """Yield where what was pretrained cannot go on with the images of another phase."""
    first = previews.get("pretrain")
    if first is None:
        return
    for phase, preview in previews.items():
        if phase == "pretrain" or getattr(study, phase) is None:
            continue
        axes, others = len(preview.shape), len(first.shape)
        if axes != others:
            text = f"found images of {axes} axes, in data.pretrain of {others}"
            yield data_source_key_path(phase), f"{text}; allowed: as many"
        elif preview.channels != first.channels:
            text = f"found {preview.channels} channels, in data.pretrain {first.channels}"
            yield (
                data_source_key_path(phase),
                f"{text}; allowed: as many, choose other data for one of them",
            )
        elif phase == "teacher" and preview.shape != first.shape:
            sides, others = ("×".join(map(str, one.shape)) for one in (preview, first))
            text = f"found images of {sides} pixels, in data.pretrain of {others}"
            yield data_source_key_path(phase), f"{text}; allowed: the same size"
    yield from _unknown_answers(study, previews)


def _unknown_answers(study: Study, previews: Mapping[str, Card]) -> Misfits:
    """Yield methods that learn a teacher's decisions for other classes than their own."""
    teacher = previews.get("teacher")
    if teacher is None or teacher.classes == previews["pretrain"].classes:
        return
    for name in study.run.methods:
        if study.methods[name].distillation:
            text = "found a teacher of other classes (teacher.data) than data.pretrain has"
            yield ("methods", name, "distillation"), f"{text}; allowed: 0"


def describe_planned_data(preview: Card) -> str:
    """Return a data set in a line."""
    size = "×".join(map(str, (preview.channels, *preview.shape)))
    words = [preview.name, f"images of {size}"]
    if len(preview.shape) == 1:
        before = preview.channels - 1
        words[1] = f"blocks of {preview.shape[0]} tokens, each read after {before} others"
    if preview.counts:
        numbers = [f"{preview.images[split]:,} {split}" for split in SPLITS]
        words.append(", ".join(numbers))
    if preview.classes:
        words.append(f"{len(preview.classes)} classes")
    if preview.note:
        words.append(preview.note)
    return "; ".join(words)


def read_matching_data_card(card: Path, source: Any) -> Card | None:
    """Return what the data card says where it is of the same settings."""
    if not card.is_file():
        return None
    try:
        content = read_json(card)
        # Settings that are younger than the card have their defaults in it.
        if type(source).model_validate(content["settings"]) == source:
            return card_of_written_data(content)
    except (UserError, KeyError, TypeError, ValidationError):
        return None  # damaged, or of other code: `prepare` writes it anew
    return None
