"""A cohort of T1-weighted MRI in BIDS format: participants.tsv and NIfTI files."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from moecore.data.sources.file_cohort import PATTERN_HELP, FileCohort, TissueMapPatterns
from moecore.data.volumes.participants import CohortTable, read_participants_table


class Bids(FileCohort):
    """One T1-weighted volume per row of participants.tsv (or of sessions.tsv).

    Volumes are skull-stripped or have a brain mask, and share one space. They are turned to
    canonical axes, resampled, cropped or padded, and normalised inside the brain; they are not
    registered.
    """

    kind: Literal["bids"] = "bids"
    root: str = Field(description="Folder with participants.tsv; derivatives may lie below it")
    t1: str = Field("{folder}/anat/{prefix}*_T1w.nii*", description=f"T1w volume: {PATTERN_HELP}")
    maps: TissueMapPatterns | None = Field(
        TissueMapPatterns(), description="Tissue as probability maps; null: none"
    )

    def read_rows(self, root: Path) -> CohortTable:
        return read_participants_table(root, self.diagnoses)
