"""Volumes that no cohort lists, found and prepared as the training data were.

In a folder in BIDS form, or any folder of NIfTI or .mgz files.
"""

import re
from pathlib import Path
from typing import NamedTuple

import numpy as np

from moecore.brain.prediction_table import TrainingCohortRanges
from moecore.core.files import UserError, join_below_root
from moecore.data.volumes.cohorts import SEX, read_delimited_table
from moecore.data.volumes.volume_preparation import Grid, read_volume

ENDINGS = (".nii.gz", ".nii", ".mgz")
# At the end of a brain mask's name, in the place of _T1w or after the whole name.
MASKS = ("_desc-brain_mask", "_mask")
Participants = dict[tuple[str, str], dict[str, str]]  # (participant, session or "") → facts


class NewVolumeFile(NamedTuple):
    """One volume of a folder, and what is known of its subject."""

    path: Path
    mask: Path | None  # None: the brain is where the volume is above 0
    subject: dict[str, str]  # as a row of predictions.csv; an age "" is unknown
    root: Path  # the folder; no link leads out of it


def find_volumes(folder: str | Path) -> list[NewVolumeFile]:
    """Every T1-weighted volume below ``folder``, in the order of their names.

    BIDS form: sub-*/[ses-*/]anat/*_T1w.nii[.gz]; else every .nii[.gz] or .mgz that is directly in
    the folder and is no mask. participants.tsv may give age, sex and site by participant_id (and
    session_id): in a plain folder that is the file's name without its ending.
    Raises UserError where there is no volume, or where participants.tsv has an age that is no
    number or a sex that is unknown.
    """
    folder = Path(folder)
    paths = sorted(path for path in folder.glob("sub-*/**/*_T1w.nii*") if _stem(path))
    bids = bool(paths)
    if not bids:
        every = [path for path in folder.glob("*") if _stem(path)]
        paths = sorted(path for path in every if not _stem(path).endswith(MASKS))
    if not paths:
        raise UserError(
            f"{folder}: no volumes; allowed: sub-*/anat/*_T1w.nii.gz below it (BIDS), or .nii.gz "
            "or .mgz files in it"
        )
    table = _participants(folder / "participants.tsv")
    return [NewVolumeFile(path, _mask(path), _subject(path, bids, table), folder) for path in paths]


def prepare_volumes(
    new_volumes: list[NewVolumeFile], reference: TrainingCohortRanges
) -> tuple[list[np.ndarray], list[str]]:
    """Return the usable volumes, float16 (1, D, H, W), and for each of all why not, or ""."""
    edge, *others = set(reference.data.voxel_mm)
    if others:
        raise UserError("reference.json: found voxel_mm of unlike axes; allowed: one edge for all")
    grid = Grid(voxel_mm=edge, size=reference.data.size)
    volumes = []
    reasons = []
    for one in new_volumes:
        try:
            for path in filter(None, (one.path, one.mask)):
                join_below_root(one.root, path)
            volumes.append(read_volume(one.path, grid, one.mask))
            reasons.append("")
        except UserError as error:
            reasons.append(str(error))
    return volumes, reasons


def _stem(path: Path) -> str:
    """The name without .nii, .nii.gz or .mgz; "" for another file, or a hidden one."""
    if path.name.startswith(".") or not path.name.endswith(ENDINGS):
        return ""
    return path.name.removesuffix(".mgz").removesuffix(".gz").removesuffix(".nii")


def _mask(path: Path) -> Path | None:
    stems = (_stem(path), _stem(path).removesuffix("_T1w"))
    places = [
        path.with_name(f"{stem}{end}{ending}")
        for stem in stems
        for end in MASKS
        for ending in ENDINGS
    ]
    return next((place for place in places if place.is_file()), None)


def _subject(path: Path, bids: bool, table: Participants) -> dict[str, str]:
    stem = _stem(path)
    participant = stem.split("_")[0] if bids else stem
    named = re.search(r"_(ses-[^_]+)", stem) if bids else None
    session = named[1] if named else ""
    facts = table.get((participant, session)) or table.get((participant, "")) or {}
    known = {"age": "", "sex": "", "site": "", "qc_flags": ""} | facts
    return {"participant_id": participant, "session_id": session} | known


def _participants(path: Path) -> Participants:
    """Age, sex, site as in predictions.csv; {} where there is no such file."""
    if not join_below_root(path.parent, path).exists():
        return {}
    columns, rows = read_delimited_table(path)
    if rows and "participant_id" not in columns:
        raise UserError(f"{path}: lacks the column participant_id")
    problems = []
    table = {}
    for row in rows:
        who = f"{path}: {row['participant_id']!r:.60}"
        age = row.get("age", "").strip().replace("n/a", "")
        sex = row.get("sex", "").strip().lower()
        if age and not re.fullmatch(r"[0-9]{1,3}(\.[0-9]*)?", age):
            problems.append(f"{who}: age is {age!r}; allowed: a number of years, or n/a")
        if sex not in SEX:
            problems.append(f"{who}: sex is {row['sex']!r}; allowed: F, M, n/a")
        table[row["participant_id"], row.get("session_id", "")] = {
            "age": age,
            "sex": SEX.get(sex, ""),
            "site": row.get("site", "").replace("n/a", ""),
        }
    if problems:
        raise UserError("\n".join(problems))
    return table
