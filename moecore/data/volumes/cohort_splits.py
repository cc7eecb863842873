"""Which participant belongs to which split, stratified by age and sex, never by session; and what a
cohort says before a volume is read: its tables and its files.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from moecore.core.config import Config
from moecore.core.files import UserError
from moecore.data.prepared import SPLITS
from moecore.data.preview import Preview
from moecore.data.splits import class_quotas
from moecore.data.volumes.bids_table import CohortTable, SubjectProblem
from moecore.data.volumes.subjects import VolumeSubject
from moecore.data.volumes.volumes import SubjectFiles
from moecore.tasks.regression import Regression

# random streams; those below are in use (splits, few_shot, mosaics)
PURPOSE = {"test": 5, "validation": 6}


class CohortSplits(Config):
    """Fields of every cohort: volumes, each with an age."""

    task: ClassVar[type[Regression]] = Regression  # of the labels that ``prepare`` writes
    volumes: ClassVar[bool] = True

    seed: int = Field(
        0, ge=0, description="Seed of the splits, and of the people where they are simulated"
    )
    validation: float = Field(
        0.15, gt=0, lt=1, description="Share of the participants for validation"
    )
    test: float = Field(0.25, gt=0, lt=1, description="Share of the participants for the test")
    age_groups: int = Field(
        8,
        ge=1,
        le=100,
        description=(
            "Groups of equally many participants by age; splits are drawn within each and within a "
            "sex"
        ),
    )


def split_cohort(
    subjects: Sequence[VolumeSubject],
    settings: CohortSplits,
    given: Mapping[str, str] | None = None,
) -> dict[str, list[int]]:
    """Rows of ``subjects`` in each split, all volumes of a participant in one; a function of the
    seed and the participants, not of their order.

    given: participant → split, where the user has decided; the others are drawn. Raises UserError
    where a split would be empty.
    """
    first: dict[str, VolumeSubject] = {}
    for subject in subjects:  # a participant is stratified by the youngest age
        seen = first.get(subject.participant_id)
        if seen is None or subject.age < seen.age:
            first[subject.participant_id] = subject
    drawn = draw_splits(
        [first[name] for name in sorted(first) if name not in (given or {})], settings
    )
    where = drawn | dict(given or {})
    splits = {
        split: [
            row for row, subject in enumerate(subjects) if where[subject.participant_id] == split
        ]
        for split in SPLITS
    }
    if empty := [split for split, rows in splits.items() if not rows]:
        raise UserError(
            f"no participant of {len(first)} is in {', '.join(empty)}; allowed: more "
            "participants, or larger `validation` and `test`"
        )
    return splits


def draw_splits(people: Sequence[VolumeSubject], settings: CohortSplits) -> dict[str, str]:
    """Participant → split for one subject a participant: test and validation take their share of
    every group of age and sex.
    """
    if settings.validation + settings.test >= 1:
        raise UserError(
            f"validation {settings.validation:g} and test {settings.test:g} leave nothing to "
            "train on; allowed: less than 1 together"
        )
    left = np.arange(len(people))
    groups = _age_sex_groups(people, settings.age_groups)
    where = {person.participant_id: "train" for person in people}
    for split in ("test", "validation"):
        number = round(getattr(settings, split) * len(people))
        chosen = _draw_from_groups(left, groups, number, [settings.seed, PURPOSE[split]])
        where |= {people[row].participant_id: split for row in chosen}
        left = np.setdiff1d(left, chosen)
    return where


def _age_sex_groups(people: Sequence[VolumeSubject], age_groups: int) -> np.ndarray:
    """A whole number for each person: quantile of age, and sex; int64 (N,)."""
    ages = np.array([person.age for person in people])
    rank = np.argsort(np.argsort(ages, kind="stable"), kind="stable")
    if people:
        sexes = np.unique([person.sex for person in people], return_inverse=True)[1]
    else:
        sexes = np.zeros(0, int)
    return rank * age_groups // max(len(people), 1) * 3 + sexes


def _draw_from_groups(
    rows: np.ndarray, groups: np.ndarray, number: int, seed: list[int]
) -> np.ndarray:
    """``number`` of the rows, from every group in proportion (largest remainder)."""
    if number == 0:
        return rows[:0]
    names, counts = np.unique(groups[rows], return_counts=True)
    random = np.random.default_rng(seed)
    takes = class_quotas(counts, number)
    return np.concatenate(
        [
            random.permutation(rows[groups[rows] == name])[:take]
            for name, take in zip(names, takes, strict=True)
        ]
    )


FindFiles = Callable[[VolumeSubject], tuple[SubjectFiles | None, list[str]]]


def age_preview(name: str, size: tuple[int, int, int], regions: tuple[str, ...]) -> Preview:
    """The preview of a cohort whose volumes have ages, before anything is counted."""
    task = Regression(target="age", unit="years")
    return Preview(name, 1, size, task, regions=regions)


def preview_cohort(
    root: Path, table: CohortTable, files: FindFiles, settings: CohortSplits
) -> dict[str, Any]:
    """Return ``counts`` and ``note`` of a Preview; no volume is opened.

    files: a subject's files, or None and what is wrong with them. Raises UserError that lists the
    problems of the whole cohort, unless ``settings.on_error`` is "skip".
    """
    problems = list(table.problems)
    usable = []
    for subject in table.subjects:
        paths, wrong = files(subject)
        problems += [SubjectProblem(*subject[:2], why) for why in wrong]
        if paths is not None:
            usable.append(subject)
    if problems and getattr(settings, "on_error", "stop") == "stop":
        raise UserError(list_problems(root, problems))
    known = {subject.participant_id for subject in usable}
    asked = {who: split for who, split in table.splits.items() if who in known}
    rows = split_cohort(usable, settings, asked)
    note = f"{len(problems)} problems; those subjects will be left out" if problems else None
    counts = {split: (len(part),) for split, part in rows.items()}
    return {"counts": counts, "note": note}


def list_problems(root: Path, problems: Sequence[SubjectProblem]) -> str:
    """Return what is wrong with a cohort, a line per problem."""
    lines = "\n  ".join(" ".join(problem.reason.split()) for problem in problems)
    way = "repair them, or set `on_error: skip` to leave these subjects out"
    return f"{len(problems)} problems in the cohort {root}; {way}:\n  {lines}"
