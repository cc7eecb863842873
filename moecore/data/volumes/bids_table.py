"""participants.tsv and sessions.tsv of a cohort: who there is, with everything that is wrong about
the rows.
"""

import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from moecore.core.files import UserError
from moecore.core.inside import path_inside
from moecore.data.prepared import SPLITS
from moecore.data.volumes.subjects import VolumeSubject, id_problem

NEEDED_COLUMNS = ("participant_id", "age", "sex")
SEX = {"f": "F", "female": "F", "m": "M", "male": "M", "": "", "n/a": ""}
MISSING = ("", "n/a")


class SubjectProblem(NamedTuple):
    """Reason why one subject, or one of his sessions, cannot be used; ``reason`` names the file."""

    participant_id: str
    session_id: str
    reason: str


class CohortTable(NamedTuple):
    """The usable rows, the splits that the user chose (participant → split), and the problems of
    the others.
    """

    subjects: list[VolumeSubject]
    splits: dict[str, str]
    problems: list[SubjectProblem]


def read_table(
    root: Path, ages: tuple[float, float], diagnoses: tuple[str, ...] | None = None
) -> CohortTable:
    """Read root/participants.tsv, and each participant's sessions.tsv where there is one.

    A sessions table gives session_id and, where it has the columns, age and diagnosis; else
    participants.tsv does. Ages must lie within ``ages``; rows of another diagnosis than
    ``diagnoses`` are passed over, they are no problems.
    Raises UserError where participants.tsv is missing or lacks a column, and where nobody has one
    of the diagnoses.
    """
    path = root / "participants.tsv"
    rows = _read_rows(root, path, NEEDED_COLUMNS)
    problems = []
    subjects = []
    seen: Counter[str] = Counter()
    for participant in {row["participant_id"]: row for row in rows}:
        if odd := id_problem("participant_id", participant):  # before it becomes a path
            problems.append(SubjectProblem(participant, "*", f"{path}: {odd}"))
            continue
        mine = [row for row in rows if row["participant_id"] == participant]
        for file, row in _visit_rows(root, path, participant, mine):
            subject, wrong = _parse_subject(row, ages)
            seen[subject.diagnosis] += 1
            if diagnoses is not None and subject.diagnosis not in diagnoses:
                continue
            problems += [
                SubjectProblem(participant, subject.session_id, f"{file}: {participant}: {why}")
                for why in wrong
            ]
            subjects.append(subject)
    if not subjects and not problems:
        raise UserError(_nobody_words(path, diagnoses or (), seen))
    splits, split_problems = _chosen_splits(path, rows)
    problems += _duplicate_problems(path, subjects) + split_problems
    problems += _folders_without_rows(root, {row["participant_id"] for row in rows})
    bad = {problem[:2] for problem in problems}
    usable = [
        subject
        for subject in subjects
        if subject[:2] not in bad and (subject.participant_id, "*") not in bad
    ]
    return CohortTable(usable, splits, problems)


def _nobody_words(path: Path, diagnoses: tuple[str, ...], seen: Counter[str]) -> str:
    counted = [f"{name or 'none given'} ({number})" for name, number in sorted(seen.items())]
    return (
        f"{path}: nobody's diagnosis is one of {', '.join(diagnoses)} (`diagnoses`); "
        f"found: {', '.join(counted)}"
    )


def _read_rows(root: Path, path: Path, needed: Iterable[str]) -> list[dict[str, str]]:
    if not path_inside(root, path).is_file():
        raise UserError(
            f"{path}: no such file; a cohort needs it, with the columns "
            f"{', '.join(NEEDED_COLUMNS)} (set `root` to its folder)"
        )
    columns, rows = read_tsv(path)
    if lacking := [name for name in needed if name not in columns]:
        listed = " ".join(", ".join(columns).split()) or "nothing"
        raise UserError(
            f"{path}: lacks the columns {', '.join(lacking)}; found: {listed[:200]} (columns are "
            "separated by tabs)"
        )
    if not rows:
        raise UserError(f"{path}: has no rows")
    return rows


def read_tsv(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Return the columns of a table with a head line, and its rows, without blanks around values.

    Raises UserError where it is no text in UTF-8, or no table.
    """
    import pandas  # a second of import, for those who use it

    try:
        table = pandas.read_csv(
            path, sep="\t", dtype=str, keep_default_na=False, encoding="utf-8-sig", index_col=False
        )
    except (OSError, ValueError) as error:  # pandas' own errors and UnicodeDecodeError are these
        why = " ".join(str(error).split())
        raise UserError(f"{path}: no table of values between tabs: {why}") from None
    table = table.fillna("").apply(lambda column: column.str.strip())
    return list(table.columns), table.to_dict("records")


def _visit_rows(
    root: Path, path: Path, participant: str, rows: list[dict[str, str]]
) -> list[tuple[Path, dict[str, str]]]:
    """The rows of a participant's visits, with the file that says so; a sessions table goes over
    the participant's single row.
    """
    sessions = root / participant / f"{participant}_sessions.tsv"
    if len(rows) > 1 or not sessions.is_file():
        return [(path, row) for row in rows]
    return [
        (sessions, rows[0] | {name: value for name, value in row.items() if value not in MISSING})
        for row in _read_rows(root, sessions, ("session_id",))
    ]


def _parse_subject(
    row: dict[str, str], ages: tuple[float, float]
) -> tuple[VolumeSubject, list[str]]:
    wrong = []
    age = _parse_number(row["age"])
    sex = row["sex"].lower()
    session = _optional_value(row, "session_id")
    if session and (odd := id_problem("session_id", session)):
        wrong.append(odd)
    if age is None:
        wrong.append(f"age is {row['age']!r}, not a number")
    elif not ages[0] <= age <= ages[1]:
        wrong.append(f"age is {age:g}; allowed: {ages[0]:g} to {ages[1]:g} years (`ages`)")
    if sex not in SEX:
        wrong.append(f"sex is {row['sex']!r}; allowed: F, M, n/a")
    subject = VolumeSubject(
        row["participant_id"],
        session,
        math.nan if age is None else age,
        SEX.get(sex, ""),
        _optional_value(row, "site"),
        diagnosis=_optional_value(row, "diagnosis"),
    )
    return subject, wrong


def _optional_value(row: dict[str, str], name: str) -> str:
    value = row.get(name, "")
    if value in MISSING:
        return ""
    return value


def _parse_number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _duplicate_problems(path: Path, subjects: list[VolumeSubject]) -> list[SubjectProblem]:
    counts = Counter(subject[:2] for subject in subjects)
    allowed = "allowed: once for each participant and session"
    problems = []
    for who, number in counts.items():
        if number > 1:
            name = " ".join(filter(None, who))
            problems.append(
                SubjectProblem(*who, f"{path}: {name} stands there {number} times; {allowed}")
            )
    return problems


def _chosen_splits(
    path: Path, rows: list[dict[str, str]]
) -> tuple[dict[str, str], list[SubjectProblem]]:
    given: dict[str, set[str]] = {}
    for row in rows:
        if (split := row.get("split", "")) not in MISSING:
            given.setdefault(row["participant_id"], set()).add(split)
    wrong = {
        who: names for who, names in given.items() if len(names) > 1 or not names <= set(SPLITS)
    }
    allowed = f"allowed: one of {', '.join(SPLITS)}"
    lines = [
        SubjectProblem(who, "*", f"{path}: {who}: split is {', '.join(sorted(names))}; {allowed}")
        for who, names in wrong.items()
    ]
    return {who: next(iter(names)) for who, names in given.items() if who not in wrong}, lines


def _folders_without_rows(root: Path, known: set[str]) -> list[SubjectProblem]:
    folders = sorted(
        path.name for path in root.glob("sub-*") if path.is_dir() and path.name not in known
    )
    return [
        SubjectProblem(name, "", f"{root / name}: a folder without a row in participants.tsv")
        for name in folders
    ]
