"""``moecore upgrade``: a project's files as the installed version writes them, the diff first."""

import difflib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from moecore.core.files import write_whole
from moecore.pipeline.plan import print_plan
from moecore.pipeline.project import (
    ProjectAnswers,
    hash_text,
    moecore_requirement,
    version_numbers,
    write_answers,
)
from moecore.pipeline.project_files import upgradable_project_texts
from moecore.study.layers import OVERLAY
from moecore.study.params_file import RENAMED_KEYS, rename_keys_in_text
from moecore.study.questions import PIPELINES

HERE = Path()
REQUIREMENT = re.compile(r"(?<=[\"'])moecore *[<>=~!@][^\"']*")


class UpgradeChanges(NamedTuple):
    """What an upgrade writes, and what it would write had the user not edited it.

    Both: path → text, or None for a file that is no more.
    """

    written: dict[str, str | None]
    edited: dict[str, str | None]


def upgrade_project(answers: ProjectAnswers, is_written: bool) -> None:
    """Print how the project here changes and what runs again; write it where that is wanted."""
    renamed = _renamed_texts(answers)
    with _files_as(renamed):  # an overlay has to be in order to be read
        texts = upgradable_project_texts(HERE, answers.name, answers.study)
        ours = _changed_texts(answers, texts)
    changes = renamed | _required_moecore() | ours.written
    print(f"moecore {answers.moecore} → {version('moecore')}")
    for path, text in {**changes, **ours.edited}.items():
        print(_diff(path, text), end="")
    for path in ours.edited:
        print(f"{path}: edited in this project and stays so; the diff above is for you to take")
    with _files_as(changes):
        print_plan()
    if is_written:
        for path, text in changes.items():
            _write(path, text)
        write_answers(HERE, answers.name, answers.study, texts)
        print("written")
    else:
        print("nothing is written yet; to write it: moecore upgrade --yes")


def _renamed_texts(answers: ProjectAnswers) -> dict[str, str | None]:
    """The files of settings with the names of keys that are new since the project's version."""
    since = version_numbers(answers.moecore)
    steps = [step for step in RENAMED_KEYS if version_numbers(step.version) > since]
    texts: dict[str, str | None] = {}
    questions = sorted(PIPELINES.glob("*/*.yaml"))
    for path in (Path(OVERLAY), Path("params.yaml"), *questions):
        if path.is_file():
            before = path.read_text(encoding="utf-8")
            after = rename_keys_in_text(before, steps, str(path))
            if after != before:
                texts[path.as_posix()] = after
    return texts


def _required_moecore() -> dict[str, str | None]:
    """pyproject.toml with the installed moecore, where it names one."""
    path = Path("pyproject.toml")
    if not path.is_file():
        return {}
    before = path.read_text(encoding="utf-8")
    requirement = moecore_requirement()
    after = REQUIREMENT.sub(lambda _: requirement, before)
    return {str(path): after} if after != before else {}


def _changed_texts(answers: ProjectAnswers, texts: Mapping[str, str]) -> UpgradeChanges:
    """The files of the template that differ from what the project's version wrote."""
    upgrade = UpgradeChanges({}, {})
    for path in {**answers.files, **texts}:
        text = texts.get(path)
        file = HERE / path
        before = file.read_text(encoding="utf-8") if file.is_file() else None
        if text == before:
            continue
        written = answers.files.get(path)
        if _is_from_overlay(path) or written == (before and hash_text(before)):
            upgrade.written[path] = text
        elif text is None or hash_text(text) != written:
            upgrade.edited[path] = text
    return upgrade


def _is_from_overlay(path: str) -> bool:
    """Return whether ``moecore study write`` writes this file here, whatever was in it."""
    return Path(OVERLAY).is_file() and Path(path).name in ("params.yaml", "dvc.yaml")


@contextmanager
def _files_as(texts: Mapping[str, str | None]) -> Iterator[None]:
    """Have these texts in the files while the block runs, then what was there before."""
    files = {path: Path(path) for path in texts}
    before = {
        path: file.read_text(encoding="utf-8") if file.is_file() else None
        for path, file in files.items()
    }
    try:
        for path, text in texts.items():
            _write(path, text)
        yield
    finally:
        for path, text in before.items():
            _write(path, text)


def _write(path: str, text: str | None) -> None:
    if text is None:
        Path(path).unlink(missing_ok=True)
    else:
        write_whole(path, text)


def _diff(path: str, text: str | None) -> str:
    file = Path(path)
    before = file.read_text(encoding="utf-8").splitlines(True) if file.is_file() else []
    after = [] if text is None else text.splitlines(True)
    return "".join(difflib.unified_diff(before, after, f"{path} (here)", f"{path} (new)"))
