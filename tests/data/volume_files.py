"""Small cohorts of volumes for tests: real NIfTI files of simple shapes."""

import csv
from pathlib import Path

import nibabel
import numpy as np

from moecore.data.phantom.bids import AFFINE
from moecore.data.sources.bids import Bids

SIDE = 32
SMALL = {"voxel_mm": 6.0, "size": (32, 32, 32), "age_groups": 2}


def head(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """A ball of 1.6 L on 32³ voxels of 6 mm: white inside, grey around it, fluid outside; T1
    (32, 32, 32), regions (3, 32, 32, 32).
    """
    random = np.random.default_rng(seed)
    away = np.linalg.norm(
        np.indices((SIDE,) * 3) - 15.5 + random.uniform(-0.5, 0.5, (3, 1, 1, 1)), axis=0
    )
    # radii 8.6, 11.6, 12.1 voxels: shares 0.36, 0.52, 0.12 of 7421 voxels = 1.6 L
    regions = np.stack(
        [away < 8.6, (away >= 8.6) & (away < 11.6), (away >= 11.6) & (away < 12.1)]
    ).astype(np.float32)
    t1 = (regions * np.array([900, 600, 200], np.float32)[:, None, None, None]).sum(0)
    return np.where(t1 > 0, t1 + random.uniform(0, 50, t1.shape), 0).astype(np.float32), regions


def save(path: Path, values: np.ndarray, affine: np.ndarray | None = None) -> None:
    """Write one NIfTI file with voxels of 6 mm in RAS order, or with an affine of its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if affine is None:
        affine = AFFINE * [[2], [2], [2], [1]]
    nibabel.Nifti1Image(values, affine).to_filename(path)


def participants(root: Path, rows: list[dict]) -> None:
    """Write participants.tsv."""
    root.mkdir(parents=True, exist_ok=True)
    with open(root / "participants.tsv", "w", newline="", encoding="utf-8") as handle:
        table = csv.DictWriter(handle, list(rows[0]), delimiter="\t", lineterminator="\n")
        table.writeheader()
        table.writerows(rows)


def visit(root: Path, who: str, seed: int, session: str = "") -> Path:
    """Write one subject's T1w volume and tissue maps; returns the folder."""
    t1, regions = head(seed)
    words = [who, *([session] if session else [])]
    folder = root.joinpath(*words, "anat")
    prefix = "_".join(words)
    save(folder / f"{prefix}_T1w.nii.gz", t1)
    for name, values in zip(("WM", "GM", "CSF"), regions, strict=True):
        save(folder / f"{prefix}_label-{name}_probseg.nii.gz", values)
    return folder


def cohort(root: Path, people: int = 12) -> Bids:
    """A whole cohort of ``people`` (ages 20, 23, …; every second a woman) and the source that reads
    it.
    """
    rows = [
        {"participant_id": f"sub-{i:02}", "age": str(20 + 3 * i), "sex": "FM"[i % 2], "site": "a"}
        for i in range(people)
    ]
    participants(root, rows)
    for i, row in enumerate(rows):
        visit(root, row["participant_id"], i)
    return Bids(root=str(root), cache=str(root.parent / "cache"), **SMALL)
