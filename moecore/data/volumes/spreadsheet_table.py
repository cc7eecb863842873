"""A cohort's table in columns of any name: a spreadsheet saved as .csv or .tsv."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from pydantic import Field

from moecore.core.config import Config
from moecore.core.files import UserError, join_below_root
from moecore.data.volumes.cohorts import (
    MISSING,
    CohortTable,
    SubjectProblem,
    chosen_splits,
    describe_absent_diagnoses,
    duplicate_problems,
    parse_subject_with_problems,
    read_delimited_table,
)

SEPARATORS = {".csv": ",", ".tsv": "\t"}


class ColumnNames(Config):
    """How a table calls what a cohort needs; null: it has no such column."""

    participant_id: str = "participant_id"
    age: str = Field("age", description="At the scan, years")
    sex: str = "sex"
    session_id: str | None = None
    site: str | None = None
    diagnosis: str | None = None
    split: str | None = Field(None, description="train, validation or test; empty: drawn")


class SpreadsheetReading(NamedTuple):
    """How the rows of a table are read."""

    columns: ColumnNames
    sexes: Mapping[str, str]  # the table's code → F or M
    digits: int  # of a participant's id, with zeros in front
    diagnoses: tuple[str, ...] | None  # others are passed over


def read_spreadsheet(root: Path, name: str, reading: SpreadsheetReading) -> CohortTable:
    """Return the subjects of the table root/name; each problem has file and line.

    Raises UserError where the file is missing, no .csv or .tsv, or lacks a column, and where nobody
    has one of the diagnoses.
    """
    path = root / name
    rows = _rename_columns(path, _read_rows(root, path), reading)
    problems, subjects = [], []
    seen: Counter[str] = Counter()
    people = defaultdict(list)
    places: dict[str, str] = {}
    for line, row in enumerate(rows, 2):
        seen[row.get("diagnosis") or "none given"] += 1
        if reading.diagnoses is not None and row.get("diagnosis") not in reading.diagnoses:
            continue
        people[row["participant_id"]].append(row)
        places.setdefault(row["participant_id"], f"{path}:{line}")
        subject, wrong = parse_subject_with_problems(row)
        who = subject[:2]
        problems += [SubjectProblem(*who, f"{path}:{line}: {who[0]}: {why}") for why in wrong]
        subjects.append(subject)
    if not subjects:
        raise UserError(f"{path}: {describe_absent_diagnoses(reading.diagnoses, seen)}")
    splits, split_problems = chosen_splits(path, people)
    problems += duplicate_problems(path, subjects) + split_problems
    bad = {problem[:2] for problem in problems}
    usable = [one for one in subjects if not bad & {one[:2], (one.participant_id, "*")}]
    return CohortTable(usable, splits, problems, places)


def _read_rows(root: Path, path: Path) -> list[dict[str, str]]:
    if path.suffix not in SEPARATORS:
        allowed = "a table saved as .csv (between commas) or .tsv (between tabs)"
        raise UserError(f"{path}: found a file that ends in {path.suffix!r}; allowed: {allowed}")
    if not join_below_root(root, path).is_file():
        raise UserError(f"{path}: no such file; `table` names the cohort's table below `root`")
    _, rows = read_delimited_table(path, SEPARATORS[path.suffix])
    if not rows:
        raise UserError(f"{path}: has no rows")
    return rows


def _rename_columns(
    path: Path, rows: list[dict[str, str]], reading: SpreadsheetReading
) -> list[dict[str, str]]:
    """Return the rows under the names of ``ColumnNames``, with sexes F and M and whole ids."""
    names = {name: theirs for name, theirs in reading.columns.model_dump().items() if theirs}
    if lacking := [theirs for theirs in names.values() if theirs not in rows[0]]:
        listed = ", ".join(rows[0])[:200]
        given = f"lacks the columns {', '.join(lacking)}; found: {listed}"
        raise UserError(f"{path}: {given} (`columns` says what they are called)")
    renamed = []
    for row in rows:
        ours = {name: row[theirs] for name, theirs in names.items()}
        ours = {name: "" if value == MISSING else value for name, value in ours.items()}
        ours["sex"] = reading.sexes.get(ours["sex"], ours["sex"])
        ours["participant_id"] = ours["participant_id"].zfill(reading.digits)
        renamed.append(ours)
    return renamed
