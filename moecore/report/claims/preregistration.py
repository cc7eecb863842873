"""Whether what a study answers was asked in a commit before that of the answer, by git's history.

A claim or question is asked where the study's params.yaml has it with its direction and margin.
"""

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moecore.core.files import read_json
from moecore.report.claims.kept_items import NUMBERS
from moecore.study.reading.claims_section import Comparison, compared_quantity_key
from moecore.study.reading.document import parse_yaml_document

PARAMS = "params.yaml"
SINCE = "2026-11-27"  # what was asked before that day is not held to it
DEFAULTS = {name: field.default for name, field in Comparison.model_fields.items()}


def has_whole_history(folder: Path) -> bool:
    """Return whether ``folder`` lies in a git repository that was not cloned in part."""
    try:
        return _git(folder, "rev-parse", "--is-shallow-repository") == "false"
    except FileNotFoundError:
        return False


def find_late_questions(study: Path, since: str = SINCE) -> list[str]:
    """Return the claims and questions of a study that are younger than its numbers, in words.

    study: its folder, in a repository that ``has_whole_history``. Those that were asked before the
    day ``since`` are left out, and those that the numbers do not answer.
    """
    answered = _git(study, "log", "-1", "--format=%H", "--", str(NUMBERS))
    if not answered:
        return []
    base = _git(study, "rev-list", "-1", f"--before={since}", "HEAD")
    now = _asked_in((study / PARAMS).read_text(encoding="utf-8"))
    new = now.keys() - (_asked_at(study, base).keys() if base else set())
    if not new:
        return []
    changed = _git(study, "status", "--porcelain", "--", str(NUMBERS))
    new -= _asked_at(study, "HEAD" if changed else f"{answered}^").keys()
    numbers = read_json(study / NUMBERS)
    entries = [*numbers.get("claims", {}).values(), *numbers.get("questions", {}).values()]
    measured = {compared_quantity_key(DEFAULTS | one["asked"]) for one in entries if "asked" in one}
    return sorted(now[key] for key in new if key[:-2] in measured)


def _asked_at(study: Path, commit: str) -> Mapping[tuple, str]:
    text = _git(study, "show", f"{commit}:./{PARAMS}")
    return _asked_in(text) if text else {}


def _asked_in(text: str) -> dict[tuple, str]:
    """Return what a params.yaml asks: what decides its verdict → in words."""
    data = parse_yaml_document(text).data
    asked = [DEFAULTS | one for name in ("claims", "questions") for one in data.get(name) or ()]
    return {
        (*compared_quantity_key(one), one["better"], one["margin"]): _words(one) for one in asked
    }


def _words(asked: Mapping[str, Any]) -> str:
    return f"{asked['metric']} of {asked['method']} {asked['better']} than of {asked['against']}"


def _git(folder: Path, *words: str) -> str:
    """Return what git prints; "" where it has nothing to say."""
    done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""
