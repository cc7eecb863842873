"""Tables of a cohort's participants and sessions, and splits of participants by age and sex."""

import csv
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from glob import escape
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
from pydantic import Field

from moecore.core.config import Config
from moecore.core.files import UserError, join_below_root
from moecore.data.card import SPLITS, Card
from moecore.data.stratified_splits import class_quotas
from moecore.tasks.regression import Regression

ID_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,99}")  # part of paths and patterns
NEEDED_COLUMNS = ("participant_id", "age", "sex")
AGES = (0, 120)  # years; other ages are problems
SEX = {"f": "F", "female": "F", "m": "M", "male": "M", "": ""}
MISSING = "n/a"
SPLIT_STREAMS = {"test": 5, "validation": 6}  # random streams; lower ones are in use


class VolumeSubject(NamedTuple):
    """One volume of one participant; ``age`` in years, ``sex`` F, M or "" (unknown)."""

    participant_id: str
    session_id: str
    age: float
    sex: str
    site: str = ""
    qc_flags: str = ""  # short texts, separated by "; "
    diagnosis: str = ""  # in the cohort's words; "": unknown


def read_prepared_csv_rows(path: Path) -> list[dict[str, str]]:
    if not path.is_file():
        raise UserError(f"{path}: no such file; run the stage `prepare` again")
    with open(path, newline="", encoding="utf-8") as handle:
        return list(csv.DictReader(handle))


def describe_invalid_id(name: str, value: str) -> str | None:
    if ID_PATTERN.fullmatch(value):
        return None
    shown = repr(value[:60]) + ("…" if len(value) > 60 else "")
    return f"{name} is {shown}; allowed: up to 100 letters a to z, digits, and . _ + - after one"


def find_only_file(root: Path, pattern: str, subject: VolumeSubject) -> Path:
    """Find the one file at the glob ``pattern``, filled with the subject's ids; else UserError."""
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
        raise UserError(f"{root / filled}: found {len(files)} files ({names}); narrow the pattern")
    if not files[0].is_file():  # reading a pipe would never end
        raise UserError(f"{files[0]}: no file, or a link to nothing")
    return files[0]


class SubjectProblem(NamedTuple):
    participant_id: str
    session_id: str  # ``*``: all sessions
    reason: str  # why the session cannot be used


class CohortTable(NamedTuple):
    subjects: list[VolumeSubject]  # the usable ones
    splits: dict[str, str]  # participant → split, where the table sets it
    problems: list[SubjectProblem]
    places: dict[str, str]  # participant → file:line of the first row


def read_participants_table(root: Path, diagnoses: tuple[str, ...] | None = None) -> CohortTable:
    """Read root/participants.tsv and each participant's sessions.tsv, if it exists."""
    # A sessions table gives session_id and, if it has the columns, age and diagnosis; otherwise
    # participants.tsv does. Rows of a diagnosis outside ``diagnoses`` are skipped.
    path = root / "participants.tsv"
    people = defaultdict(list)
    places: dict[str, str] = {}
    for line, row in enumerate(_read_rows(root, path, NEEDED_COLUMNS), 2):
        people[row["participant_id"]].append(row)
        places.setdefault(row["participant_id"], f"{path}:{line}")
    problems = []
    subjects = []
    diagnosis_counts: Counter[str] = Counter()
    for participant, rows in people.items():
        if reason := describe_invalid_id("participant_id", participant):  # before it becomes a path
            problems.append(SubjectProblem(participant, "*", f"{path}: {reason}"))
            continue
        visits = [(path, row) for row in rows]
        sessions = root / participant / f"{participant}_sessions.tsv"
        if len(rows) == 1 and sessions.is_file():
            visits = [
                (sessions, rows[0] | {name: value for name, value in row.items() if value})
                for row in _read_rows(root, sessions, ("session_id",))
            ]
        for file, row in visits:
            diagnosis = row.get("diagnosis", "")
            diagnosis_counts[diagnosis or "none given"] += 1
            if diagnoses is None or diagnosis in diagnoses:
                subject, reasons = parse_subject_with_problems(row)
                who = subject[:2]
                problems += [SubjectProblem(*who, f"{file}: {who[0]}: {why}") for why in reasons]
                subjects.append(subject)
    if not subjects and not problems:
        raise UserError(f"{path}: {format_absent_diagnoses(diagnoses, diagnosis_counts)}")
    table = table_of_usable_rows(path, people, subjects, problems, places)
    for folder in sorted(root.glob("sub-*")):
        if folder.is_dir() and folder.name not in people:
            reason = f"{folder}: a folder without a row in participants.tsv"
            table.problems.append(SubjectProblem(folder.name, "", reason))
    return table


def table_of_usable_rows(
    path: Path,
    people: dict[str, list[dict[str, str]]],
    subjects: list[VolumeSubject],
    problems: list[SubjectProblem],
    places: dict[str, str],
) -> CohortTable:
    """Return the subjects without problems or duplicates, and all problems; people: id → rows."""
    splits = {}
    split_problems = []
    for who, rows in people.items():
        names = {row["split"] for row in rows if row.get("split")}
        if len(names) > 1 or not names <= set(SPLITS):
            reason = f"split is {', '.join(sorted(names))}; allowed: one of {', '.join(SPLITS)}"
            split_problems.append(SubjectProblem(who, "*", f"{path}: {who}: {reason}"))
        elif names:
            splits[who] = names.pop()
    duplicate_problems = []
    for who, number in Counter(subject[:2] for subject in subjects).items():
        if number > 1:
            reason = f"{path}: {' '.join(who).strip()} is listed {number} times"
            once = "allowed: once for each participant and session"
            duplicate_problems.append(SubjectProblem(*who, f"{reason}; {once}"))
    problems = problems + duplicate_problems + split_problems
    bad = {problem[:2] for problem in problems}
    usable = [row for row in subjects if not bad & {row[:2], (row.participant_id, "*")}]
    return CohortTable(usable, splits, problems, places)


def format_absent_diagnoses(diagnoses: tuple[str, ...] | None, counts: Counter[str]) -> str:
    """Return the error text for a table with none of ``diagnoses``; counts: rows per diagnosis."""
    counted = ", ".join(f"{name} ({number})" for name, number in sorted(counts.items()))
    listed = ", ".join(diagnoses or ())
    return f"no participant's diagnosis is one of {listed} (`diagnoses`); found: {counted}"


def _read_rows(root: Path, path: Path, needed: Iterable[str]) -> list[dict[str, str]]:
    """Read a table's rows (column → text, "" for n/a); UserError for missing columns."""
    if not join_below_root(root, path).is_file():
        raise UserError(
            f"{path}: no such file; a cohort needs it, with the columns "
            f"{', '.join(NEEDED_COLUMNS)} (set `root` to its folder)"
        )
    columns, rows = read_text_table(path)
    if missing := [name for name in needed if name not in columns]:
        listed = " ".join(", ".join(columns).split()) or "nothing"
        raise UserError(
            f"{path}: lacks the columns {', '.join(missing)}; found: {listed[:200]} "
            "(columns are separated by tabs)"
        )
    if not rows:
        raise UserError(f"{path}: has no rows")
    return [{key: "" if value == MISSING else value for key, value in row.items()} for row in rows]


def read_text_table(path: Path, separator: str = "\t") -> tuple[list[str], list[dict[str, str]]]:
    """Read a table; return column names and rows (column → text without outer blanks)."""
    import pandas  # takes a second to import

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


def parse_subject_with_problems(row: dict[str, str]) -> tuple[VolumeSubject, list[str]]:
    """Parse a table's row; return the subject and a list of reasons why it is unusable."""
    reasons = []
    session = row.get("session_id", "")
    if session and (reason := describe_invalid_id("session_id", session)):
        reasons.append(reason)
    try:
        age = float(row["age"])
    except ValueError:
        age = float("nan")
    if not AGES[0] <= age <= AGES[1]:
        reasons.append(f"age is {row['age']!r}; allowed: {AGES[0]} to {AGES[1]} years")
    sex = row["sex"].lower()
    if sex not in SEX:
        reasons.append(f"sex is {row['sex']!r}; allowed: F, M, n/a")
    who = row["participant_id"]
    site = row.get("site", "")
    diagnosis = row.get("diagnosis", "")
    return VolumeSubject(who, session, age, SEX.get(sex, ""), site, diagnosis=diagnosis), reasons


class CohortSettings(Config):
    """Base settings of cohorts of volumes with ages: how participants are split."""

    task: ClassVar[type[Regression]] = Regression
    volumes: ClassVar[bool] = True

    seed: int = Field(0, ge=0, description="Seed of the splits, and of simulated people")
    validation: float = Field(0.15, gt=0, lt=1, description="Share of participants for validation")
    test: float = Field(0.25, gt=0, lt=1, description="Share of the participants for the test")
    age_groups: int = Field(8, ge=1, le=100, description="Equal age groups, per sex, of the splits")
    test_sites: tuple[str, ...] = Field((), description="Sites that are the test set; (): drawn")

    @property
    def allowed_diagnoses(self) -> tuple[str, ...] | None:
        """Diagnoses with which a participant may be in any split; None for all."""
        return None


def split_cohort(
    subjects: Sequence[VolumeSubject],
    settings: CohortSettings,
    splits_by_user: Mapping[str, str] | None = None,  # participant → split
    places: Mapping[str, str] | None = None,  # participant → file:line, for messages
) -> dict[str, list[int]]:
    """Return split → indices of ``subjects``; each participant is in one, preset or drawn."""
    # A function of the seed and the participants, not of their order.
    # A participant is stratified by the youngest age, which overwrites the others.
    oldest_first = sorted(subjects, key=lambda subject: -subject.age)
    people = {subject.participant_id: subject for subject in oldest_first}
    splits_of = dict(splits_by_user or {})
    held_out = held_out_participants(subjects, settings, places or {})
    _refuse_splits_against_hold_out(splits_of, held_out, settings, places or {})
    splits_of |= dict.fromkeys(held_out, "test")
    remaining = [people[name] for name in sorted(people) if name not in splits_of]
    splits_of |= draw_splits(remaining, settings)
    splits: dict[str, list[int]] = {split: [] for split in SPLITS}
    for row, subject in enumerate(subjects):
        splits[splits_of[subject.participant_id]].append(row)
    if empty := [split for split, rows in splits.items() if not rows]:
        raise UserError(
            f"no participant of {len(people)} is in {', '.join(empty)}; allowed: more "
            "participants, or larger `validation` and `test`"
        )
    return splits


def held_out_participants(
    subjects: Sequence[VolumeSubject], settings: CohortSettings, places: Mapping[str, str]
) -> dict[str, str]:
    """Return participant → why it must be in the test split: its site or its diagnosis."""
    sites = set(settings.test_sites)
    cohort_sites = {subject.site for subject in subjects}
    if unknown := sorted(sites - cohort_sites):
        listed = ", ".join(sorted(cohort_sites - {""})) or "none"
        raise UserError.at("test_sites", found=", ".join(unknown), allowed=listed)
    allowed = settings.allowed_diagnoses
    visits: dict[str, set[str]] = {}
    reasons = {}
    for subject in subjects:
        who = subject.participant_id
        visits.setdefault(who, set()).add(subject.site)
        if subject.site in sites:
            reasons[who] = f"site {subject.site} is in test_sites"
        elif allowed is not None and subject.diagnosis not in allowed:
            reasons[who] = f"diagnosis {subject.diagnosis or 'none'} is not in train_diagnoses"
    if lines := [
        f"{places.get(who, who)}: {who}: visits at {', '.join(sorted(visited))}, some of "
        "which are in test_sites; allowed: all, or none"
        for who, visited in visits.items()
        if visited & sites and visited - sites
    ]:
        raise UserError("\n".join(lines))
    return reasons


def _refuse_splits_against_hold_out(
    splits_of: Mapping[str, str],
    held_out: Mapping[str, str],
    settings: CohortSettings,
    places: Mapping[str, str],
) -> None:
    lines = [
        f"{places.get(who, who)}: {who}: split is {splits_of[who]}, but its {why}; allowed: test"
        for who, why in held_out.items()
        if splits_of.get(who, "test") != "test"
    ]
    if settings.test_sites:
        lines += [
            f"{places.get(who, who)}: {who}: split is test, but its site is not in test_sites; "
            "allowed: train, validation"
            for who, split in splits_of.items()
            if split == "test" and who not in held_out
        ]
    if lines:
        raise UserError("\n".join(lines))


def draw_splits(people: Sequence[VolumeSubject], settings: CohortSettings) -> dict[str, str]:
    """Draw each participant's split, in proportion within each group of age and sex."""
    if settings.validation + settings.test >= 1:
        raise UserError(
            f"validation {settings.validation:g} and test {settings.test:g} leave nothing to "
            "train on; allowed: less than 1 together"
        )
    test_share = 0.0 if settings.test_sites else settings.test
    shares = {"test": test_share, "validation": settings.validation}
    remaining = np.arange(len(people))
    # one group per quantile of age and sex
    ages = np.array([person.age for person in people])
    rank = np.argsort(np.argsort(ages, kind="stable"), kind="stable")
    sexes = np.unique([person.sex for person in people], return_inverse=True)[1]
    groups = rank * settings.age_groups // max(len(people), 1) * 3 + sexes.astype(int)
    splits_of = {person.participant_id: "train" for person in people}
    for split, purpose in SPLIT_STREAMS.items():
        number = round(shares[split] * len(people))
        if not number:
            continue
        # from every group in proportion
        names, counts = np.unique(groups[remaining], return_counts=True)
        random = np.random.default_rng([settings.seed, purpose])
        chosen_by_group = [
            random.permutation(remaining[groups[remaining] == name])[:take]
            for name, take in zip(names, class_quotas(counts, number), strict=True)
        ]
        chosen = np.concatenate(chosen_by_group)
        splits_of |= {people[row].participant_id: split for row in chosen}
        remaining = np.setdiff1d(remaining, chosen)
    return splits_of


def age_cohort_card(
    name: str,
    size: tuple[int, int, int],
    voxel_mm: float,
    regions: tuple[str, ...],
    about: tuple[str, str],
    simulated: bool = False,
) -> Card:
    """Return the card, without counts, of a cohort with ages; ``about`` is (licence, source)."""
    task = Regression(target="age", unit="years")
    more = {"voxel_mm": [voxel_mm] * 3, "simulated": simulated, "skipped": []}
    return Card(name, 1, size, task, *about, regions=regions, more=more)
