"""A cohort of T1-weighted MRI in folders of any layout, with a spreadsheet: IXI, UK Biobank."""

import re
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from moecore.data.sources.file_cohort import FileCohort
from moecore.data.sources.spreadsheet import (
    ColumnNames,
    SpreadsheetReading,
    read_spreadsheet,
)
from moecore.data.volumes.cohorts import CohortTable
from moecore.data.volumes.subjects import VolumeSubject


class Spreadsheet(FileCohort):
    """One T1-weighted volume a row of a spreadsheet, whose columns and codes settings name; the
    files lie wherever patterns find them, by {prefix}, the participant's id (and session).

    Of the volumes it asks what ``bids`` does.
    """

    kind: Literal["spreadsheet"] = "spreadsheet"
    table: str = Field(description="The table below root, a spreadsheet saved as .csv or .tsv")
    columns: ColumnNames = Field(ColumnNames(), description="What the table's columns are called")
    sexes: dict[str, Literal["F", "M"]] = Field(
        {}, description="The table's code of a sex → F or M, as {1: M, 2: F}"
    )
    digits: int = Field(
        0, ge=0, le=20, description="Digits of an id in file names; a shorter one gets zeros"
    )
    site_in_name: str | None = Field(
        None,
        description="A regular expression whose group is the site, sought in the T1's file name",
    )

    @model_validator(mode="after")
    def _one_group(self) -> Self:
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

    def read_rows(self, root: Path) -> CohortTable:
        """Return the rows of the table."""
        reading = SpreadsheetReading(self.columns, self.sexes, self.digits, self.diagnoses)
        return read_spreadsheet(root, self.table, reading)

    def complete_subject(self, subject: VolumeSubject, t1: Path) -> VolumeSubject:
        """Return the subject with the site of the T1's name, "" where it names none."""
        if self.site_in_name is None:
            return subject
        match = re.search(self.site_in_name, t1.name)
        return subject._replace(site=match[1] if match else "")
