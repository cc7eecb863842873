"""A cohort's participants.tsv and sessions.tsv, with all that is wrong about their rows."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from moecore.core.files import UserError, join_below_root
from moecore.data.prepared import SPLITS
from moecore.data.volumes.subjects import VolumeSubject, id_problem

NEEDED_COLUMNS = ("participant_id", "age", "sex")
AGES = (0, 120)  # years; another age is a problem
SEX = {"f": "F", "female": "F", "m": "M", "male": "M", "": ""}
MISSING = "n/a"


class SubjectProblem(NamedTuple):
    """Why a subject, or one of his sessions (``*``: all), cannot be used."""

    participant_id: str
    session_id: str
    reason: str


class CohortTable(NamedTuple):
    """The usable rows, splits that the user chose, the problems of the others, and each
    participant's first line, as file:line.
    """

    subjects: list[VolumeSubject]
    splits: dict[str, str]
    problems: list[SubjectProblem]
    places: dict[str, str]


def read_table(root: Path, diagnoses: tuple[str, ...] | None = None) -> CohortTable:
    """Read root/participants.tsv, and each participant's sessions.tsv where there is one.

    A sessions table gives session_id and, where it has the columns, age and diagnosis; else
    participants.tsv does. Rows of another diagnosis than ``diagnoses`` are passed over. Raises
    UserError where participants.tsv is missing or lacks a column, or nobody has one of the
    diagnoses.
    """
    path = root / "participants.tsv"
    people = defaultdict(list)
    places: dict[str, str] = {}
    for line, row in enumerate(_read_rows(root, path, NEEDED_COLUMNS), 2):
        people[row["participant_id"]].append(row)
        places.setdefault(row["participant_id"], f"{path}:{line}")
    problems = []
    subjects = []
    seen: Counter[str] = Counter()
    for participant, rows in people.items():
        if odd := id_problem("participant_id", participant):  # before it becomes a path
            problems.append(SubjectProblem(participant, "*", f"{path}: {odd}"))
            continue
        for file, row in _visit_rows(root, path, rows):
            diagnosis = row.get("diagnosis", "")
            seen[diagnosis or "none given"] += 1
            if diagnoses is None or diagnosis in diagnoses:
                subject, wrong = parse_subject_with_problems(row)
                who = subject[:2]
                problems += [SubjectProblem(*who, f"{file}: {who[0]}: {why}") for why in wrong]
                subjects.append(subject)
    if not subjects and not problems:
        raise UserError(f"{path}: {describe_absent_diagnoses(diagnoses, seen)}")
    splits, split_problems = chosen_splits(path, people)
    problems += duplicate_problems(path, subjects) + split_problems
    for folder in sorted(root.glob("sub-*")):
        if folder.is_dir() and folder.name not in people:
            reason = f"{folder}: a folder without a row in participants.tsv"
            problems.append(SubjectProblem(folder.name, "", reason))
    bad = {problem[:2] for problem in problems}
    usable = [one for one in subjects if not bad & {one[:2], (one.participant_id, "*")}]
    return CohortTable(usable, splits, problems, places)


def describe_absent_diagnoses(diagnoses: tuple[str, ...] | None, seen: Counter[str]) -> str:
    """Return in words that nobody has one of the diagnoses; seen: how often each is there."""
    counted = ", ".join(f"{name} ({number})" for name, number in sorted(seen.items()))
    wanted = f"nobody's diagnosis is one of {', '.join(diagnoses or ())} (`diagnoses`)"
    return f"{wanted}; found: {counted}"


def _read_rows(root: Path, path: Path, needed: Iterable[str]) -> list[dict[str, str]]:
    """The rows of a table, with "" for n/a."""
    if not join_below_root(root, path).is_file():
        raise UserError(
            f"{path}: no such file; a cohort needs it, with the columns "
            f"{', '.join(NEEDED_COLUMNS)} (set `root` to its folder)"
        )
    columns, rows = read_delimited_table(path)
    if lacking := [name for name in needed if name not in columns]:
        listed = " ".join(", ".join(columns).split()) or "nothing"
        given = f"lacks the columns {', '.join(lacking)}; found: {listed[:200]}"
        raise UserError(f"{path}: {given} (columns are separated by tabs)")
    if not rows:
        raise UserError(f"{path}: has no rows")
    return [
        {name: "" if value == MISSING else value for name, value in row.items()} for row in rows
    ]


def read_delimited_table(
    path: Path, separator: str = "\t"
) -> tuple[list[str], list[dict[str, str]]]:
    """Return the columns of a table with a head line, and its rows, without blanks around values.

    Raises UserError where it is no text in UTF-8, or no table.
    """
    import pandas  # a second of import, for those who use it

    try:
        table = pandas.read_csv(
            path,
            sep=separator,
            dtype=str,
            keep_default_na=False,
            encoding="utf-8-sig",
            index_col=False,
        )
    except (OSError, ValueError) as error:  # pandas' own errors and UnicodeDecodeError are these
        why = " ".join(str(error).split())
        between = "tabs" if separator == "\t" else f"{separator!r}"
        raise UserError(f"{path}: no table of values between {between}: {why}") from None
    table = table.fillna("").apply(lambda column: column.str.strip())
    return list(table.columns), table.to_dict("records")


def _visit_rows(
    root: Path, path: Path, rows: list[dict[str, str]]
) -> list[tuple[Path, dict[str, str]]]:
    """The rows of a participant's visits, with the file that says so."""
    participant = rows[0]["participant_id"]
    sessions = root / participant / f"{participant}_sessions.tsv"
    if len(rows) > 1 or not sessions.is_file():
        return [(path, row) for row in rows]
    return [
        (sessions, rows[0] | {name: value for name, value in row.items() if value})
        for row in _read_rows(root, sessions, ("session_id",))
    ]


def parse_subject_with_problems(row: dict[str, str]) -> tuple[VolumeSubject, list[str]]:
    """Return the subject of a row (participant_id, age, sex, and what else there is of session_id,
    site and diagnosis), and what is wrong about it.
    """
    wrong = []
    session = row.get("session_id", "")
    if session and (odd := id_problem("session_id", session)):
        wrong.append(odd)
    try:
        age = float(row["age"])
    except ValueError:
        age = float("nan")
    if not AGES[0] <= age <= AGES[1]:
        wrong.append(f"age is {row['age']!r}; allowed: {AGES[0]} to {AGES[1]} years")
    sex = row["sex"].lower()
    if sex not in SEX:
        wrong.append(f"sex is {row['sex']!r}; allowed: F, M, n/a")
    who = (row["participant_id"], session, age, SEX.get(sex, ""), row.get("site", ""))
    return VolumeSubject(*who, diagnosis=row.get("diagnosis", "")), wrong


def duplicate_problems(path: Path, subjects: list[VolumeSubject]) -> list[SubjectProblem]:
    """Return a problem of each participant and session that is there more than once."""
    allowed = "allowed: once for each participant and session"
    return [
        SubjectProblem(
            *who, f"{path}: {' '.join(who).strip()} stands there {number} times; {allowed}"
        )
        for who, number in Counter(subject[:2] for subject in subjects).items()
        if number > 1
    ]


def chosen_splits(
    path: Path, people: dict[str, list[dict[str, str]]]
) -> tuple[dict[str, str], list[SubjectProblem]]:
    """Return participant → the split of the column ``split``, and what is wrong about it."""
    splits = {}
    problems = []
    for who, rows in people.items():
        names = {row["split"] for row in rows if row.get("split")}
        if len(names) > 1 or not names <= set(SPLITS):
            given = f"split is {', '.join(sorted(names))}; allowed: one of {', '.join(SPLITS)}"
            problems.append(SubjectProblem(who, "*", f"{path}: {who}: {given}"))
        elif names:
            splits[who] = names.pop()
    return splits, problems
