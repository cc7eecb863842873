"""The subjects of a cohort's split: one row per volume, in the order of the volumes."""

import csv
import re
from glob import escape
from pathlib import Path
from typing import NamedTuple

from moecore.core.files import UserError, join_below_root

ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,99}")  # becomes part of a path and of a pattern


class VolumeSubject(NamedTuple):
    """One volume of one participant; ``age`` in years, ``sex`` F, M or "" (unknown)."""

    participant_id: str
    session_id: str
    age: float
    sex: str
    site: str = ""
    qc_flags: str = ""  # short texts, separated by "; "
    diagnosis: str = ""  # in the cohort's words; "": unknown


def read_subject_rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a subjects table, column → text. Raises UserError for a missing file."""
    if not path.is_file():
        raise UserError(f"{path}: no such file; run the stage `prepare` again")
    with open(path, newline="", encoding="utf-8") as handle:
        return list(csv.DictReader(handle))


def id_problem(name: str, value: str) -> str | None:
    """Return why the id ``value`` is not valid, or None; name: its column."""
    if ID.fullmatch(value):
        return None
    shown = repr(value[:60]) + ("…" if len(value) > 60 else "")
    return f"{name} is {shown}; allowed: up to 100 letters a to z, digits, and . _ + - after one"


def find_only_file(root: Path, pattern: str, subject: VolumeSubject) -> Path:
    """Return the one file of ``subject`` that fits ``pattern``; UserError for none or several."""
    parts = [escape(subject.participant_id)]
    if session := subject.session_id:
        parts.append(escape(f"ses-{session.removeprefix('ses-')}"))
    filled = pattern.replace("{folder}", "/".join(parts)).replace("{prefix}", "_".join(parts))
    try:
        files = [join_below_root(root, path) for path in sorted(root.glob(filled))]
    except (ValueError, NotImplementedError) as error:
        raise UserError(f"{root}: {pattern!r} is no pattern below this folder: {error}") from None
    if not files:
        raise UserError(f"{root / filled}: no such file")
    if len(files) > 1:
        names = ", ".join(path.name for path in files[:3])
        raise UserError(
            f"{root / filled}: found {len(files)} files ({names}); make the pattern stricter"
        )
    if not files[0].is_file():  # reading a pipe would never end
        raise UserError(f"{files[0]}: no file, or a link to nothing")
    return files[0]
