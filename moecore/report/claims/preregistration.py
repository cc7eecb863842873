"""Whether what a study answers was asked in a commit before that of the answer, by git's history.

A claim or question is asked where the study's params.yaml has it with its direction and margin, and
answered where reports/compare.json has its difference.
"""

import json
import subprocess
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from moecore.report.claims.kept_items import NUMBERS
from moecore.study.reading.claims_section import (
    Comparison,
    compared_quantity_key,
    has_changed_settings,
)
from moecore.study.reading.document import parse_yaml_document

PARAMS = Path("params.yaml")
SINCE = "2026-11-26T12:00+00:00"  # what was asked before is said to be late, and not refused
DEFAULTS = {name: field.default for name, field in Comparison.model_fields.items()}
KEY = ("metric", "method", "against", "against_metric", "phase", "better", "margin")
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
Contents = Mapping[tuple[Any, ...], Any]  # what a version of a file says: of what → what


class DatedQuestion(NamedTuple):
    """A claim or question, with the commits since which it is asked and has its answer."""

    words: str
    asked: str  # short hash; "" for no commit
    answered: str
    is_late: bool  # in no commit before that of the answer
    is_refused: bool  # late, asked after SINCE, and answered under the settings as they are

    @property
    def line(self) -> str:
        """Return what it asks, and when."""
        asked, answered = (commit or "no commit" for commit in (self.asked, self.answered))
        late = ", not before" if self.is_late else ""
        return f"{self.words}: asked in {asked}, answered in {answered}{late}"


def has_whole_history(folder: Path) -> bool:
    """Return whether ``folder`` lies in a git repository that was not cloned in part."""
    try:
        return _git(folder, "rev-parse", "--is-shallow-repository") == "false"
    except FileNotFoundError:
        return False


def date_questions(study: Path, since: str = SINCE) -> list[DatedQuestion]:
    """Return the claims and questions that a study's numbers answer, in the order of the file.

    study: its folder, in a repository that ``has_whole_history``.
    """
    if not (study / NUMBERS).is_file():
        return []
    answered = _first_commits(study, NUMBERS, _read_differences)
    asked = _first_commits(study, PARAMS, _read_questions)
    asked_at = lru_cache(lambda commit: _read_version(study, commit, PARAMS, _read_questions))
    dated = []
    for key, commit in asked.items():
        answer = answered.get(key[:-2])
        if answer is None:
            continue
        question = Comparison.model_validate(dict(zip(KEY, key, strict=True)))
        is_late = key not in asked_at(f"{answer}^" if answer else "HEAD")
        is_new = is_late and not _is_committed_before(study, commit, since)
        is_refused = is_new and not _is_of_other_settings(study, question)
        words = f"{question.phase}: {question.words}"
        dated.append(DatedQuestion(words, commit, answer, is_late, is_refused))
    return dated


def _first_commits(
    study: Path, file: Path, read: Callable[[str], Contents]
) -> dict[tuple[Any, ...], str]:
    """Return of what a file says now → since which commit it says so without a break; "" for none.

    read: a version's text → what it says.
    """
    now = read((study / file).read_text(encoding="utf-8"))
    commits = dict.fromkeys(now, "")
    same = set(now)
    for commit in _git(study, "log", "--format=%h", "--", str(file)).split():
        then = _read_version(study, commit, file, read)
        same = {key for key in same if key in then and then[key] == now[key]}
        commits |= dict.fromkeys(same, commit)
        if not same:
            break
    return commits


def _read_version(
    study: Path, commit: str, file: Path, read: Callable[[str], Contents]
) -> Contents:
    text = _git(study, "show", f"{commit}:./{file}")
    return read(text) if text else {}


def _read_questions(text: str) -> Contents:
    """Return what a params.yaml asks: what decides its verdict → True."""
    data = yaml.load(text, Loader=LOADER)
    asked = [DEFAULTS | one for name in ("claims", "questions") for one in data.get(name) or ()]
    return {(*compared_quantity_key(one), one["better"], one["margin"]): True for one in asked}


def _read_differences(text: str) -> Contents:
    """Return what a compare.json found: what decides a difference → its mean."""
    return {
        compared_quantity_key(DEFAULTS | entry["asked"]): entry["difference"]["mean"]
        for entry in _read_entries(text)
    }


def _read_entries(text: str) -> list[dict[str, Any]]:
    numbers = json.loads(text)
    entries = [*numbers.get("claims", {}).values(), *numbers.get("questions", {}).values()]
    return [one for one in entries if "asked" in one]  # others are of older versions


def _is_committed_before(study: Path, commit: str, since: str) -> bool:
    day = _git(study, "show", "-s", "--format=%cI", commit) if commit else ""
    return bool(day) and datetime.fromisoformat(day) < datetime.fromisoformat(since)


def _is_of_other_settings(study: Path, question: Comparison) -> bool:
    """Return whether the answer waits for another run, as the study's settings are others since."""
    data = parse_yaml_document((study / PARAMS).read_text(encoding="utf-8")).data
    quantity = compared_quantity_key(question.model_dump())
    stored = [
        entry.get("settings")
        for entry in _read_entries((study / NUMBERS).read_text(encoding="utf-8"))
        if compared_quantity_key(DEFAULTS | entry["asked"]) == quantity
    ]
    return any(has_changed_settings(one, data, question) for one in stored)


def _git(folder: Path, *words: str) -> str:
    """Return what git prints; "" where it has nothing to say."""
    done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""
