"""Whether what a result answers was asked in a commit before that of the answer.

A result says under ``asked`` which commit and file asked: the question's file as it was committed
when the run's folder was written, or null where it was not. Results of moecore 0.2 also say in
which commit they were answered, and which of their entries were asked elsewhere, or late.
"""

import os
import subprocess
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from moecore.core.files import read_json
from moecore.study.questions import Round
from moecore.study.sections import (
    Comparison,
    compared_quantity_key,
    has_changed_settings,
)

ASKED = "asked"  # in a result: the commit and the file that asked
DEFAULTS = {name: field.default for name, field in Comparison.model_fields.items()}
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
SHORT = 8  # letters of a commit that are printed


class DatedQuestion(NamedTuple):
    """A claim or question, with the commits that asked it and that have its answer."""

    words: str
    asked: str  # "" for no commit
    answered: str
    is_late: bool  # in no commit before that of the answer
    is_refused: bool  # late, not known to be so, and answered under the settings as they are

    @property
    def line(self) -> str:
        """Return what it asks, and when."""
        asked, answered = (one[:SHORT] or "no commit" for one in (self.asked, self.answered))
        late = ", not before" if self.is_late else ""
        return f"{self.words}: asked in {asked}, answered in {answered}{late}"


def has_whole_history(folder: Path) -> bool:
    """Return whether ``folder`` lies in a git repository that was not cloned in part."""
    return run_git(folder, "rev-parse", "--is-shallow-repository") == "false"


def committed_at(root: Path, path: Path) -> str | None:
    """Return the last commit of a project where it has the file ``path`` as it is, else None."""
    shown = run_git(root, "show", f"HEAD:./{path.as_posix()}")
    if not shown or shown != (root / path).read_text(encoding="utf-8").strip():
        return None
    return run_git(root, "rev-parse", "HEAD")


def date_questions(one: Round) -> list[DatedQuestion]:
    """Return the claims and questions that a round's result answers, in the order of its file.

    The project lies in a repository that ``has_whole_history``.
    """
    if not one.results.is_file():
        return []
    root, numbers = one.question.root, read_json(one.results)
    record = numbers.get(ASKED) or {}
    path = str(one.results.relative_to(root))
    is_committed = not run_git(root, "status", "--porcelain", "--", path)
    answered = run_git(root, "log", "-1", "--format=%H", "--", path) if is_committed else ""
    entries = {
        compared_quantity_key(DEFAULTS | entry["asked"]): (name, entry)
        for section in ("claims", "questions")
        for name, entry in numbers.get(section, {}).items()
        if "asked" in entry  # others are of older versions
    }
    dated = []
    data = one.compose().document.data
    for question in _list_comparisons(data):
        if compared_quantity_key(question) not in entries:
            continue
        name, entry = entries[compared_quantity_key(question)]
        own = {"answered": answered} | record | record.get("entries", {}).get(name, {})
        is_late = not _is_asked_before(root, own, question)
        asked = Comparison.model_validate({key: question[key] for key in DEFAULTS})
        is_new = is_late and own.get("commit") and not own.get("late")
        is_refused = bool(is_new) and not has_changed_settings(entry.get("settings"), data, asked)
        words = f"{asked.phase}: {asked.words}"
        commits = (own.get("commit") or "", own["answered"] or "")
        dated.append(DatedQuestion(words, *commits, is_late, is_refused))
    return dated


def _is_asked_before(root: Path, record: Mapping[str, Any], question: Mapping[str, Any]) -> bool:
    """Return whether the commit of a record has the question, and is older than the answer."""
    commit, answered = record.get("commit"), record["answered"]
    if not commit or commit == answered:
        return False
    if _verdict_key(question) not in _read_questions(root, commit, record["file"]):
        return False
    return _exits_well(root, "merge-base", "--is-ancestor", commit, answered or "HEAD")


@lru_cache
def _read_questions(root: Path, commit: str, file: str) -> frozenset[tuple[Any, ...]]:
    """Return what a file of a commit asks: what decides a verdict."""
    data = yaml.load(run_git(root, "show", f"{commit}:./{file}"), Loader=LOADER) or {}
    parts = [data, *(data.get("rounds") or ())]
    return frozenset(_verdict_key(one) for part in parts for one in _list_comparisons(part))


def _list_comparisons(data: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the claims, then the questions, of a file as plain data, with defaults."""
    for section in ("claims", "questions"):
        yield from (DEFAULTS | one for one in data.get(section) or ())


def _verdict_key(question: Mapping[str, Any]) -> tuple[Any, ...]:
    return (*compared_quantity_key(question), question["better"], question["margin"])


def run_git(folder: Path, *words: str) -> str:
    """Return what git prints; "" where it fails or is not installed."""
    done = _start_git(folder, words)
    return done.stdout.strip() if done is not None and done.returncode == 0 else ""


def _exits_well(folder: Path, *words: str) -> bool:
    done = _start_git(folder, words)
    return done is not None and done.returncode == 0


def _start_git(folder: Path, words: tuple[str, ...]) -> subprocess.CompletedProcess | None:
    """Run git in a folder, whatever repository the environment of a hook names."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        return subprocess.run(["git", *words], cwd=folder, env=env, capture_output=True, text=True)
    except FileNotFoundError:
        return None
