"""A cohort of T1-weighted MRI in any folders, with a .csv or .tsv table: IXI, UK Biobank."""

import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from moecore.core.config import Config
from moecore.core.files import UserError, join_below_root
from moecore.data.sources.file_cohort import FileCohort
from moecore.data.volumes import participants

SEPARATORS = {".csv": ",", ".tsv": "\t"}


class ColumnNames(Config):
    """The table's names for the columns that a cohort uses; null for a missing column."""

    participant_id: str = "participant_id"
    age: str = Field("age", description="At the scan, years")
    sex: str = "sex"
    session_id: str | None = None
    site: str | None = None
    diagnosis: str | None = None
    split: str | None = Field(None, description="train, validation or test; empty: drawn")


class Spreadsheet(FileCohort):
    """One T1-weighted volume per row of a spreadsheet; settings name its columns and codes.

    Patterns find the files by {prefix}, the participant's id (and session). Volumes must be as for
    ``bids``.
    """

    kind: Literal["spreadsheet"] = "spreadsheet"
    table: str = Field(description="The table below root, a spreadsheet saved as .csv or .tsv")
    columns: ColumnNames = Field(ColumnNames(), description="Names of the table's columns")
    sexes: dict[str, Literal["F", "M"]] = Field(
        {}, description="The table's code of a sex → F or M, such as {1: M, 2: F}"
    )
    digits: int = Field(0, ge=0, le=20, description="Digits of ids in file names; zeros are added")
    site_in_name: str | None = Field(
        None, description="A regular expression for the T1's file name, whose group is the site"
    )

    @model_validator(mode="after")
    def _check_site_in_name(self) -> Self:
        if self.site_in_name is None:
            return self
        if self.columns.site is not None:
            raise ValueError("site_in_name and columns.site are both set; allowed: one of them")
        try:
            groups = re.compile(self.site_in_name).groups
        except re.error as error:
            raise ValueError(f"site_in_name: no regular expression: {error}") from None
        if groups != 1:
            raise ValueError(f"site_in_name: found {groups} groups; allowed: one, the site's")
        return self

    def read_rows(self, root: Path) -> participants.CohortTable:
        path = root / self.table
        if path.suffix not in SEPARATORS:
            raise UserError.at(
                path,
                found=f"a file that ends in {path.suffix!r}",
                allowed="a table saved as .csv (between commas) or .tsv (between tabs)",
            )
        if not join_below_root(root, path).is_file():
            raise UserError(f"{path}: no such file; `table` names the cohort's table below `root`")
        _, rows = participants.read_text_table(path, SEPARATORS[path.suffix])
        if not rows:
            raise UserError(f"{path}: has no rows")
        problems = []
        subjects = []
        diagnosis_counts: Counter[str] = Counter()
        people = defaultdict(list)
        places: dict[str, str] = {}
        for line, row in enumerate(self._translate_rows(path, rows), 2):
            diagnosis_counts[row.get("diagnosis") or "none given"] += 1
            if self.diagnoses is not None and row.get("diagnosis") not in self.diagnoses:
                continue
            who = row["participant_id"]
            place = f"{path}:{line}"
            people[who].append(row)
            places.setdefault(who, place)
            subject, reasons = participants.parse_subject_with_problems(row)
            lines = [f"{place}: {who}: {why}" for why in reasons]
            problems += [participants.SubjectProblem(*subject[:2], line) for line in lines]
            subjects.append(subject)
        if not subjects:
            why = participants.format_absent_diagnoses(self.diagnoses, diagnosis_counts)
            raise UserError(f"{path}: {why}")
        return participants.table_of_usable_rows(path, people, subjects, problems, places)

    def _translate_rows(self, path: Path, rows: list[dict[str, str]]) -> list[dict[str, str]]:
        """Rename columns as in ``ColumnNames``, sexes to F and M, and pad ids with zeros."""
        names = {name: theirs for name, theirs in self.columns.model_dump().items() if theirs}
        if missing := [theirs for theirs in names.values() if theirs not in rows[0]]:
            raise UserError(
                f"{path}: lacks the columns {', '.join(missing)}; found: "
                f"{', '.join(rows[0])[:200]} (`columns` says what they are called)"
            )
        renamed = []
        for row in rows:
            ours = {name: row[theirs] for name, theirs in names.items()}
            ours = {
                name: "" if value == participants.MISSING else value for name, value in ours.items()
            }
            ours["sex"] = self.sexes.get(ours["sex"], ours["sex"])
            ours["participant_id"] = ours["participant_id"].zfill(self.digits)
            renamed.append(ours)
        return renamed

    def complete_subject(
        self, subject: participants.VolumeSubject, t1: Path
    ) -> participants.VolumeSubject:
        if self.site_in_name is None:
            return subject
        match = re.search(self.site_in_name, t1.name)
        return subject._replace(site=match[1] if match else "")
