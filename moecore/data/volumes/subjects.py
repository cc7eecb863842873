"""Who is in a split of a cohort: one row a volume, in the order of the volumes."""

import csv
import re
from collections.abc import Sequence
from glob import escape
from pathlib import Path
from typing import NamedTuple

from moecore.core.files import UserError, whole_text
from moecore.core.inside import path_inside

ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,99}")  # becomes part of a path and of a pattern
SEXES = {"F": "F", "M": "M", "": "unknown"}  # as in the files, and as counts name them


class VolumeSubject(NamedTuple):
    """One volume of one participant; ``age`` in years, ``sex`` F, M or "" (unknown)."""

    participant_id: str
    session_id: str
    age: float
    sex: str
    site: str = ""
    qc_flags: str = ""  # short texts, separated by "; "
    diagnosis: str = ""  # in the cohort's own words; "" where it is not known


def write_subjects(path: Path, subjects: Sequence[VolumeSubject]) -> None:
    """Write one row a subject, with a head line; ages as short as they can be read back exactly."""
    with whole_text(path) as handle:
        rows = csv.writer(handle, lineterminator="\n")
        rows.writerow(VolumeSubject._fields)
        rows.writerows(subjects)


def read_subjects(path: Path) -> list[dict[str, str]]:
    """The rows as they were written, all values text; UserError where the file is missing or lacks
    a column.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file; run the stage `prepare` again")
    with open(path, newline="", encoding="utf-8") as handle:
        rows = csv.DictReader(handle)
        if lacking := [
            name for name in VolumeSubject._fields if name not in (rows.fieldnames or ())
        ]:
            raise UserError(
                f"{path}: lacks the columns {', '.join(lacking)}; run the stage `prepare` again"
            )
        return list(rows)


def sex_counts(sexes: Sequence[str]) -> dict[str, int]:
    """Count the volumes of women, men and people of unknown sex; a name only where there is one,
    F and M always.
    """
    counts = {name: sum(sex == code for sex in sexes) for code, name in SEXES.items()}
    return {name: number for name, number in counts.items() if number or name != "unknown"}


def id_problem(name: str, value: str) -> str | None:
    """Return why an id of a table (``name``: its column) is none, or None where it is one."""
    if ID.fullmatch(value):
        return None
    shown = f"{value[:60]!r}" + "…" * (len(value) > 60)
    return f"{name} is {shown}; allowed: up to 100 letters a to z, digits, and . _ + - after one"


def find_only_file(
    root: Path, pattern: str, subject: VolumeSubject
) -> tuple[Path | None, str | None]:
    """The only file of ``subject`` that fits ``pattern``, or None and why there is not one."""
    words = [escape(subject.participant_id)]
    if session := subject.session_id:
        words.append(escape(session if session.startswith("ses-") else f"ses-{session}"))
    place = pattern.replace("{folder}", "/".join(words)).replace("{prefix}", "_".join(words))
    try:
        files = [path_inside(root, path) for path in sorted(root.glob(place))]
    except UserError as error:
        return None, str(error)
    except (ValueError, NotImplementedError) as error:
        return None, f"{root}: the pattern {pattern!r} is none below this folder: {error}"
    if len(files) == 1 and not files[0].is_file():  # reading a pipe would wait for ever
        return None, f"{files[0]}: no file, or a link to nothing"
    if len(files) == 1:
        return files[0], None
    if not files:
        return None, f"{root / place}: no such file"
    names = ", ".join(path.name for path in files[:3])
    return None, f"{root / place}: found {len(files)} files ({names}); make the pattern stricter"
