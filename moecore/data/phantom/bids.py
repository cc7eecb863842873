"""Write the simulated cohort as BIDS files; needs nibabel.

python -m moecore.data.phantom.bids FOLDER --subjects 20
"""

import argparse
import csv
import gzip
from functools import partial
from pathlib import Path
from typing import get_args

import numpy as np
from pydantic import ValidationError

from moecore.core.files import UserError, whole_text, write_json, write_whole
from moecore.data.phantom.fields import SIDE, VOXEL_MM
from moecore.data.phantom.numbers import Preset
from moecore.data.sources.phantom import LICENCE, Phantom, Visit, simulate_scan
from moecore.data.workers import map_in_threads

# RAS, near MNI space
AFFINE = np.array(
    [[VOXEL_MM, 0, 0, -96], [0, VOXEL_MM, 0, -112], [0, 0, VOXEL_MM, -88], [0, 0, 0, 1]]
)
LABELS = ("WM", "GM", "CSF")
README = """Simulated ageing cohort
=======================

Every volume here is simulated by moecore (`moecore.data.sources.phantom`) from the MNI152 average
brain and published trajectories of tissue volumes. No volume shows a person. It can show that
software works; it says nothing about real brains or patients.
"""


def write_bids(folder: Path, phantom: Phantom) -> None:
    """Write participants.tsv (with sessions tables where there are second sessions), skull-stripped
    T1w volumes and tissue maps to ``folder``.

    The source ``bids`` with ``voxel_mm: 3`` and ``size: [64, 64, 64]`` makes the same volumes of it
    as the source ``phantom``.
    """
    visits = phantom.visits()
    first = {visit.subject.participant_id: visit.subject for visit in reversed(visits)}
    columns = ("participant_id", "age", "sex", "site")
    _write_table(
        folder / "participants.tsv",
        columns,
        [[getattr(first[who], name) for name in columns] for who in sorted(first)],
    )
    if phantom.second_sessions:
        for who in first:
            own = [v.subject for v in visits if v.subject.participant_id == who]
            rows = [[subject.session_id, subject.age] for subject in own]
            _write_table(folder / who / f"{who}_sessions.tsv", ("session_id", "age"), rows)
    _write_description(folder, phantom)
    write_whole(folder / "README", README)
    for _ in map_in_threads(partial(_write_visit, folder, phantom.preset), visits):
        pass


def _write_description(folder: Path, phantom: Phantom) -> None:
    """BIDS wants a dataset_description.json."""
    made = {
        "Name": "moecore phantom",
        "Description": "Simulated by moecore from the MNI152 maps",
        "CodeURL": "moecore/data/sources/phantom.py",
    }
    write_json(
        folder / "dataset_description.json",
        {
            "Name": f"Simulated ageing cohort ({phantom.preset}, seed {phantom.seed})",
            "BIDSVersion": "1.10.0",
            "DatasetType": "raw",
            "License": LICENCE,
            "GeneratedBy": [made],
        },
    )


def _write_table(path: Path, columns: tuple[str, ...], rows: list[list]) -> None:
    with whole_text(path) as handle:
        table = csv.writer(handle, delimiter="\t", lineterminator="\n")
        table.writerow(columns)
        table.writerows(rows)


def _write_visit(folder: Path, preset: Preset, visit: Visit) -> None:
    import nibabel  # only for files

    who, session, age, sex = visit.subject[:4]
    words = [who, session] if session else [who]
    place = folder.joinpath(*words, "anat")
    place.mkdir(parents=True, exist_ok=True)
    made = simulate_scan(age, sex, visit.seed, scan=visit.scan, site=visit.site, preset=preset)
    names = ["T1w", *(f"label-{label}_probseg" for label in LABELS)]
    for name, values in zip(names, [made.volume, *made.regions], strict=True):
        image = nibabel.Nifti1Image(values.astype(np.float32), AFFINE)
        image.header.set_xyzt_units("mm")
        content = gzip.compress(image.to_bytes(), 1, mtime=0)
        write_whole(place / f"{'_'.join(words)}_{name}.nii.gz", content)


def main() -> None:
    """Read the command line and write the cohort; what cannot be done is one line."""
    parser = argparse.ArgumentParser(
        description=f"Write a SIMULATED cohort as BIDS files ({SIDE}³ voxels of {VOXEL_MM:g} mm)."
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--subjects", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sites", type=int, default=3)
    parser.add_argument(
        "--second-sessions",
        type=float,
        default=0.0,
        help="share of the people who are scanned a second time",
    )
    parser.add_argument("--preset", choices=get_args(Preset), default="demo")
    arguments = vars(parser.parse_args())
    folder = arguments.pop("folder")
    try:
        write_bids(folder, Phantom(**arguments))
    except ValidationError as error:
        reason = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()]
        parser.error("; ".join(reason))
    except UserError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
