"""Volumes that no cohort lists: a folder in BIDS form, or any folder of NIfTI files, found and prepared as the training data were."""

import csv
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moecore.data.grids import Grid
from moecore.data.volumes import read_volume
from moecore.files import StageError

SEXES = {"f": "F", "female": "F", "m": "M", "male": "M", "": "", "n/a": ""}
ENDINGS = (".nii.gz", ".nii")
MASKS = ("_desc-brain_mask", "_mask")  # at the end of the name of a brain mask, in the place of _T1w or after the whole name


class Found(NamedTuple):
    """One volume: its file, its brain mask (None: the brain is where the volume is above 0), and what is known of its subject (age "" is unknown)."""

    path: Path
    mask: Path | None
    subject: dict[str, str]


def find_volumes(folder: str | Path) -> list[Found]:
    """Every T1-weighted volume below ``folder``, in the order of their names.

    BIDS form: sub-*/[ses-*/]anat/*_T1w.nii[.gz]; else every .nii[.gz] that is directly in the folder and is no mask. participants.tsv may
    give age, sex and site by participant_id (and session_id): in a plain folder that is the file's name without its ending.
    Raises StageError where there is no volume, or where participants.tsv has an age that is no number or a sex that is unknown.
    """
    folder = Path(folder)
    paths = sorted(path for path in folder.glob("sub-*/**/*_T1w.nii*") if _stem(path))
    bids = bool(paths)
    paths = paths or sorted(path for path in folder.glob("*.nii*") if _stem(path) and not _stem(path).endswith(MASKS))
    if not paths:
        raise StageError(f"{folder}: no volumes; allowed: sub-*/anat/*_T1w.nii.gz below it (BIDS), or .nii.gz files in it")
    table = _participants(folder / "participants.tsv")
    return [Found(path, _mask(path), _subject(path, bids, table)) for path in paths]


def prepared(found: list[Found], reference: Mapping[str, Any]) -> tuple[list[np.ndarray | None], list[str]]:
    """Each volume as the model takes it, float16 (1, D, H, W), or None for one that cannot be used; and all problems, each naming its file."""
    data, volumes, problems = reference["data"], [], []
    if len(set(data["voxel_mm"])) > 1:
        raise StageError(f"reference.json: voxel_mm is {data['voxel_mm']}; allowed: one edge for all axes")
    grid = Grid(voxel_mm=data["voxel_mm"][0], size=tuple(data["size"]))
    for one in found:
        try:
            volumes.append(read_volume(one.path, grid, one.mask))
        except StageError as error:
            volumes.append(None)
            problems.append(str(error))
    return volumes, problems


def _stem(path: Path) -> str:
    """The name without .nii or .nii.gz; "" for another file, or a hidden one."""
    ending = next((ending for ending in ENDINGS if path.name.endswith(ending)), "")
    return path.name.removesuffix(ending) if ending and not path.name.startswith(".") else ""


def _mask(path: Path) -> Path | None:
    stems = (_stem(path), _stem(path).removesuffix("_T1w"))
    places = [path.with_name(f"{stem}{end}{ending}") for stem in stems for end in MASKS for ending in ENDINGS]
    return next((place for place in places if place.is_file()), None)


def _subject(path: Path, bids: bool, table: Mapping[tuple[str, str], Mapping[str, str]]) -> dict[str, str]:
    stem = _stem(path)
    participant = re.match(r"sub-[^_]+", stem)[0] if bids else stem
    session = re.search(r"_(ses-[^_]+)", stem) if bids else None
    identity = (participant, session[1] if session else "")
    row = table.get(identity) or table.get((participant, "")) or {}
    return {"participant_id": identity[0], "session_id": identity[1], "age": row.get("age", ""), "sex": row.get("sex", ""), "site": row.get("site", ""), "qc_flags": ""}


def _participants(path: Path) -> dict[tuple[str, str], dict[str, str]]:
    """(participant, session or "") → age, sex, site as in predictions.csv; {} where there is no such file."""
    if not path.is_file():
        return {}
    with open(path, newline="", encoding="utf-8-sig") as handle:
        rows = list(csv.DictReader(handle, delimiter="\t", restval=""))
    if rows and "participant_id" not in rows[0]:
        raise StageError(f"{path}: lacks the column participant_id")
    problems, table = [], {}
    for row in rows:
        age, sex = row.get("age", "").strip().replace("n/a", ""), row.get("sex", "").strip().lower()
        if age and not re.fullmatch(r"\d+(\.\d*)?", age):
            problems.append(f"{path}: {row['participant_id']}: age is {age!r}; allowed: a number of years, or n/a")
        if sex not in SEXES:
            problems.append(f"{path}: {row['participant_id']}: sex is {row['sex']!r}; allowed: F, M, n/a")
        table[row["participant_id"], row.get("session_id", "")] = {"age": age, "sex": SEXES.get(sex, ""), "site": row.get("site", "").replace("n/a", "")}
    if problems:
        raise StageError("\n".join(problems))
    return table
