"""Which participant belongs to which split, stratified by age and sex, never by session."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
from pydantic import Field

from moecore.core.config import Config
from moecore.core.files import UserError
from moecore.data.prepared import SPLITS
from moecore.data.sources.base import PlannedData
from moecore.data.stratified_splits import class_quotas
from moecore.data.volumes.subjects import VolumeSubject
from moecore.tasks.regression import Regression

# random streams; those below are in use (splits, few_shot, mosaics)
PURPOSE = {"test": 5, "validation": 6}


class CohortSettings(Config):
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
        8, ge=1, le=100, description="Equally large, for the splits, within each sex"
    )
    test_sites: tuple[str, ...] = Field(
        (), description="The test is everybody of these sites, and nobody else; empty: drawn"
    )

    @property
    def allowed_diagnoses(self) -> tuple[str, ...] | None:
        """Who has another diagnosis is in the test alone; None: no matter."""
        return None


def split_cohort(
    subjects: Sequence[VolumeSubject],
    settings: CohortSettings,
    given: Mapping[str, str] | None = None,
    places: Mapping[str, str] | None = None,
) -> dict[str, list[int]]:
    """Rows of ``subjects`` in each split, all volumes of a participant in one; a function of the
    seed and the participants, not of their order.

    given: participant → split, the user's; others are drawn, but for those that ``test_sites`` and
    ``train_diagnoses`` hold out. places: participant → file:line, for messages. UserError for an
    empty split, and where what is given contradicts what is held out.
    """
    # a participant is stratified by the youngest age, which comes last
    oldest_first = sorted(subjects, key=lambda subject: -subject.age)
    people = {subject.participant_id: subject for subject in oldest_first}
    splits_of = dict(given or {})
    held = held_out_participants(subjects, settings, places or {})
    _refuse_contradictions(splits_of, held, settings, places or {})
    splits_of |= dict.fromkeys(held, "test")
    left = [people[name] for name in sorted(people) if name not in splits_of]
    splits_of |= draw_splits(left, settings)
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
    """Return who may be in the test alone, and why, by ``test_sites`` and ``train_diagnoses``.

    Raises UserError for a site that nobody has, and for a participant with visits at sites of both
    sides.
    """
    sites = set(settings.test_sites)
    there = {subject.site for subject in subjects}
    if strange := sorted(sites - there):
        listed = ", ".join(sorted(there - {""})) or "none"
        raise UserError(
            f"test_sites: found {', '.join(strange)}; allowed: sites of the cohort: {listed}"
        )
    allowed = settings.allowed_diagnoses
    visits: dict[str, set[str]] = {}
    held = {}
    for subject in subjects:
        who = subject.participant_id
        visits.setdefault(who, set()).add(subject.site)
        if subject.site in sites:
            held[who] = f"site {subject.site} is of test_sites"
        elif allowed is not None and subject.diagnosis not in allowed:
            held[who] = f"diagnosis {subject.diagnosis or 'none'} is not of train_diagnoses"
    if both := [who for who, own in visits.items() if own & sites and own - sites]:
        lines = [
            f"{places.get(who, who)}: {who}: visits at {', '.join(sorted(visits[who]))}, some of "
            "which are of test_sites; allowed: all, or none"
            for who in both
        ]
        raise UserError("\n".join(lines))
    return held


def _refuse_contradictions(
    given: Mapping[str, str],
    held: Mapping[str, str],
    settings: CohortSettings,
    places: Mapping[str, str],
) -> None:
    lines = [
        f"{places.get(who, who)}: {who}: split is {given[who]}, but its {why}; allowed: test"
        for who, why in held.items()
        if given.get(who, "test") != "test"
    ]
    if settings.test_sites:
        lines += [
            f"{places.get(who, who)}: {who}: split is test, but its site is none of test_sites; "
            "allowed: train, validation"
            for who, split in given.items()
            if split == "test" and who not in held
        ]
    if lines:
        raise UserError("\n".join(lines))


def draw_splits(people: Sequence[VolumeSubject], settings: CohortSettings) -> dict[str, str]:
    """Participant → split: test and validation take their share of each age and sex."""
    if settings.validation + settings.test >= 1:
        raise UserError(
            f"validation {settings.validation:g} and test {settings.test:g} leave nothing to "
            "train on; allowed: less than 1 together"
        )
    shares = {"test": 0.0 if settings.test_sites else settings.test}
    shares["validation"] = settings.validation
    left = np.arange(len(people))
    groups = _age_sex_groups(people, settings.age_groups)
    splits_of = {person.participant_id: "train" for person in people}
    for split, purpose in PURPOSE.items():
        number = round(shares[split] * len(people))
        chosen = _draw_from_groups(left, groups, number, [settings.seed, purpose])
        splits_of |= {people[row].participant_id: split for row in chosen}
        left = np.setdiff1d(left, chosen)
    return splits_of


def _age_sex_groups(people: Sequence[VolumeSubject], age_groups: int) -> np.ndarray:
    """A whole number for each person: quantile of age, and sex; int64 (N,)."""
    ages = np.array([person.age for person in people])
    rank = np.argsort(np.argsort(ages, kind="stable"), kind="stable")
    sexes = np.unique([person.sex for person in people], return_inverse=True)[1]
    return rank * age_groups // max(len(people), 1) * 3 + sexes.astype(int)


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


def planned_age_cohort_data(
    name: str, size: tuple[int, int, int], regions: tuple[str, ...]
) -> PlannedData:
    """The preview of a cohort whose volumes have ages, before anything is counted."""
    task = Regression(target="age", unit="years")
    return PlannedData(name, 1, size, task, regions=regions)
