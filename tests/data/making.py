"""Small real files in the real formats, for the tests of the data sources."""

import csv
import gzip
import hashlib
import shutil
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import nibabel
import numpy as np
from PIL import Image

from moecore.data.sources.bids import Bids
from moecore.data.sources.phantom import Phantom, simulate_scan


def idx_bytes(array: np.ndarray) -> bytes:
    """A uint8 array as the content of an IDX file."""
    return (
        bytes((0, 0, 8, array.ndim))
        + np.array(array.shape, ">u4").tobytes()
        + array.astype(np.uint8).tobytes()
    )


def fashion_folder(
    folder: Path, train: int = 200, test: int = 60, packed: bool = True
) -> dict[str, str]:
    """The four files of a tiny Fashion-MNIST; returns {name: sha256 of the content}."""
    random = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    hashes = {}
    for part, number in (("train", train), ("t10k", test)):
        arrays = {
            "images-idx3": random.integers(0, 256, (number, 28, 28)),
            "labels-idx1": np.arange(number) % 10,
        }
        for what, array in arrays.items():
            name = f"{part}-{what}-ubyte"
            content = idx_bytes(array)
            hashes[name] = hashlib.sha256(content).hexdigest()
            (folder / (name + ".gz" * packed)).write_bytes(
                gzip.compress(content) if packed else content
            )
    return hashes


def cifar_content(labels: np.ndarray, seed: int = 0) -> bytes:
    """Records of CIFAR's binary version; labels: (N, label bytes)."""
    pixels = np.random.default_rng(seed).integers(0, 256, (len(labels), 3072), np.uint8)
    return np.concatenate([labels.astype(np.uint8), pixels], 1).tobytes()


def image_classes(
    folder: Path,
    classes: dict[str, int],
    size: tuple[int, int] = (20, 14),
    mode: str = "RGB",
    suffix: str = ".png",
) -> None:
    """Class folders of random images, ``size`` = (width, height)."""
    random = np.random.default_rng(len(str(folder.name)))
    for name, number in classes.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for i in range(number):
            pixels = random.integers(0, 256, (size[1], size[0], 3), np.uint8)
            Image.fromarray(pixels).convert(mode).save(folder / name / f"{i:03}{suffix}")


def photo(width: int, height: int, random: np.random.Generator) -> Image.Image:
    """A smooth coloured picture with a little noise, as JPEG likes them."""
    coarse = random.integers(0, 256, (max(2, height // 12), max(2, width // 12), 3), np.uint8)
    smooth = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
    noisy = np.asarray(smooth) + random.normal(0, 4, (height, width, 3))
    return Image.fromarray(np.clip(noisy, 0, 255).astype(np.uint8))


def photo_classes(folder: Path, classes: dict[str, int], sides: tuple[int, int] = (40, 90)) -> None:
    """Class folders of JPEG files whose heights and widths differ, from ``sides``."""
    random = np.random.default_rng(len(classes))
    for name, number in classes.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for i in range(number):
            width, height = random.integers(*sides, 2).tolist()
            photo(width, height, random).save(folder / name / f"{i:03}.JPEG", quality=92)


SIDE = 32
AFFINE = np.array([[3, 0, 0, -96], [0, 3, 0, -112], [0, 0, 3, -88], [0, 0, 0, 1]]) * 1.0  # RAS
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


def write_phantom(root: Path, phantom: Phantom) -> None:
    """Write a simulated cohort as BIDS files; the source ``bids`` makes the same volumes of it."""
    visits = phantom.visits()
    columns = ("participant_id", "age", "sex", "site")
    participants(root, [{name: getattr(one.subject, name) for name in columns} for one in visits])
    for subject, seed, site in visits:
        made = simulate_scan(subject.age, subject.sex, seed, site=site, preset=phantom.preset)
        who = subject.participant_id
        names = ("T1w", *(f"label-{label}_probseg" for label in ("WM", "GM", "CSF")))
        for name, values in zip(names, (made.volume, *made.regions), strict=True):
            save(root / who / f"anat/{who}_{name}.nii", values, AFFINE)


@cache
def _cohort_files(people: int) -> TemporaryDirectory:
    """Written once a process: to pack the volumes takes longest."""
    folder = TemporaryDirectory()
    rows = [
        {"participant_id": f"sub-{i:02}", "age": str(20 + 3 * i), "sex": "FM"[i % 2], "site": "a"}
        for i in range(people)
    ]
    participants(Path(folder.name), rows)
    for i, row in enumerate(rows):
        visit(Path(folder.name), row["participant_id"], i)
    return folder


def cohort(root: Path, people: int = 12) -> Bids:
    """A whole cohort of ``people`` (ages 20, 23, …; every second a woman) and the source that reads
    it.
    """
    shutil.copytree(_cohort_files(people).name, root, dirs_exist_ok=True)
    return Bids(root=str(root), cache=str(root.parent / "cache"), **SMALL)
