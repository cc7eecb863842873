"""What a cohort says before a volume is read: its tables, its files, and their headers."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from moecore.core.files import UserError
from moecore.data.preview import Preview
from moecore.data.volumes.bids_table import Problem, Table
from moecore.data.volumes.cohort_splits import CohortSplits, split_cohort
from moecore.data.volumes.nifti import header_problem
from moecore.data.volumes.subjects import Subject
from moecore.data.volumes.volumes import SubjectFiles
from moecore.tasks.regression import Regression

Files = Callable[[Subject], tuple[SubjectFiles | None, list[str]]]


def of_ages(
    name: str, size: tuple[int, int, int], regions: tuple[str, ...], *seen: Path
) -> Preview:
    """The preview of a cohort whose volumes have ages, before anything is counted."""
    task = Regression(target="age", unit="years")
    return Preview(name, 1, size, task, regions=regions, seen=seen)


def look_at_cohort(root: Path, table: Table, files: Files, settings: CohortSplits) -> dict:
    """``counts`` and ``seen`` of a Preview; headers are opened, volumes are not read.

    files: a subject's files, or None and what is wrong with them. Raises UserError that lists the
    problems of the whole cohort, unless ``settings.on_error`` is "skip".
    """
    problems = list(table.problems)
    seen = [root, root / "participants.tsv"]
    usable = []
    for subject in table.subjects:
        paths, wrong = files(subject)
        if paths is not None:
            seen.append(paths.t1)
            wrong = [why for path in _all(paths) if (why := header_problem(path))]
        problems += [Problem(*subject[:2], why) for why in wrong]
        if not wrong:
            usable.append(subject)
    stops = getattr(settings, "on_error", "stop") == "stop"
    if problems and stops:
        raise UserError(listed(root, problems))
    known = {subject.participant_id for subject in usable}
    asked = {who: split for who, split in table.splits.items() if who in known}
    rows = split_cohort(usable, settings, asked)
    found: dict[str, Any] = {"counts": {split: (len(part),) for split, part in rows.items()}}
    if problems:
        found["note"] = f"{len(problems)} problems; those subjects will be left out"
    return found | {"seen": seen}


def _all(files: SubjectFiles) -> list[Path]:
    maps = list((files.maps or {}).values())
    return [path for path in (files.t1, files.mask, *maps, files.dseg) if path is not None]


def listed(root: Path, problems: Sequence[Problem]) -> str:
    """What is wrong with a cohort, a line a problem."""
    lines = "\n  ".join(problem.reason for problem in problems)
    way = "mend them, or set `on_error: skip` to leave these subjects out"
    return f"{len(problems)} problems in the cohort {root}; {way}:\n  {lines}"
