"""Small real files for tests of sources: volumes of nested tissues, a cohort, pictures."""

# A ball of "brain": csf in the middle, which grows with age, wm around it, gm outside.

import csv
import gzip
import hashlib
import shutil
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import nibabel
import numpy as np
from PIL import Image

from moecore.data.layouts.volumes import VolumeSplitToWrite, write_volumes
from moecore.data.prepared import Prepared
from moecore.data.sources.bids import Bids
from moecore.data.sources.phantom import Phantom, simulate_scan
from moecore.data.volumes.participants import VolumeSubject, age_cohort_card
from moecore.data.volumes.volume_preparation import TISSUES
from moecore.parts import Config, ImageSpec
from moecore.tasks.regression import Regression

SIDE = 32
AFFINE = np.array([[3, 0, 0, -96], [0, 3, 0, -112], [0, 0, 3, -88], [0, 0, 0, 1]]) * 1.0  # RAS
SMALL = {"voxel_mm": 6.0, "size": (32, 32, 32), "age_groups": 2}
NUMBERS = {"train": 60, "validation": 24, "test": 40}
SHAPE = (16, 16, 16)
COLOURS = {"clover": (40, 160, 60), "poppy": (210, 40, 30), "sky": (60, 110, 220)}
MODES = ("RGB", "L", "RGBA", "P", "I;16", "LA", "1", "CMYK")
SIZE = (16, 16, 16)
AGED = Regression(target="age", unit="years", mean=55.0, deviation=20.0)
VOLUMES = ImageSpec(channels=1, size=SIZE, mean=(0.5,), std=(0.25,), task=AGED)
GREY = {"wm": 0.9, "gm": 0.6, "csf": 0.2}


def idx_bytes(array: np.ndarray) -> bytes:
    header = bytes((0, 0, 8, array.ndim)) + np.array(array.shape, ">u4").tobytes()
    return header + array.astype(np.uint8).tobytes()


def fashion_folder(folder: Path, train: int = 200, test: int = 60, packed: bool = True) -> dict:
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
            written = gzip.compress(content) if packed else content
            (folder / (name + ".gz" * packed)).write_bytes(written)
    return hashes


def cifar_content(labels: np.ndarray, seed: int = 0) -> bytes:
    """Records of CIFAR's binary version; labels: (N, label bytes)."""
    pixels = np.random.default_rng(seed).integers(0, 256, (len(labels), 3072), np.uint8)
    return np.concatenate([labels.astype(np.uint8), pixels], 1).tobytes()


def image_classes(folder: Path, classes: dict, size=(20, 14), mode="RGB", suffix=".png") -> None:
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
    random = np.random.default_rng(len(classes))
    for name, number in classes.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for i in range(number):
            width, height = random.integers(*sides, 2).tolist()
            photo(width, height, random).save(folder / name / f"{i:03}.JPEG", quality=92)


def head(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """A ball of 1.6 L on 32³ voxels of 6 mm, T1 (32, 32, 32) and regions (3, 32, 32, 32)."""
    random = np.random.default_rng(seed)
    centre = 15.5 - random.uniform(-0.5, 0.5, (3, 1, 1, 1))
    away = np.linalg.norm(np.indices((SIDE,) * 3) - centre, axis=0)
    # radii 8.6, 11.6, 12.1 voxels: shares 0.36, 0.52, 0.12 of 7421 voxels = 1.6 L
    grey, fluid = (away >= 8.6) & (away < 11.6), (away >= 11.6) & (away < 12.1)
    regions = np.stack([away < 8.6, grey, fluid]).astype(np.float32)
    t1 = (regions * np.array([900, 600, 200], np.float32)[:, None, None, None]).sum(0)
    return np.where(t1 > 0, t1 + random.uniform(0, 50, t1.shape), 0).astype(np.float32), regions


def save(path: Path, values: np.ndarray, affine: np.ndarray | None = None) -> None:
    """Write one NIfTI file with voxels of 6 mm in RAS order, or with an affine of its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if affine is None:
        affine = AFFINE * [[2], [2], [2], [1]]
    nibabel.Nifti1Image(values, affine).to_filename(path)


def participants(root: Path, rows: list[dict]) -> None:
    root.mkdir(parents=True, exist_ok=True)
    with open(root / "participants.tsv", "w", newline="", encoding="utf-8") as handle:
        table = csv.DictWriter(handle, list(rows[0]), delimiter="\t", lineterminator="\n")
        table.writeheader()
        table.writerows(rows)


def visit(root: Path, who: str, seed: int, session: str = "") -> Path:
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
    """A whole cohort of ``people`` (ages 20, 23, …; women and men in turn) and its source."""
    shutil.copytree(_cohort_files(people).name, root, dirs_exist_ok=True)
    return Bids(root=str(root), cache=str(root.parent / "cache"), **SMALL)


class Balls(Config):
    kind: str = "balls"
    seed: int = 0


def ball(age: float, seed: int, size: tuple[int, int, int] = SIZE) -> tuple[np.ndarray, np.ndarray]:
    """A volume float16 (1, D, H, W) in [0, 1] and shares of wm, gm, csf, uint8 (3, D, H, W)."""
    random = np.random.default_rng([seed, 0])
    axes = [np.arange(length) + 0.5 - length / 2 for length in size]
    radius = np.sqrt(sum(axis**2 for axis in np.ix_(*axes)))
    edge = min(size) / 2 - 1
    inner = edge * (0.2 + 0.4 * (age - 20) / 70)
    csf, gm = radius < inner, (radius < edge) & (radius >= 0.8 * edge)
    regions = np.stack([(radius < edge) & ~csf & ~gm, gm, csf & (radius < edge)])
    noise = random.normal(0, 0.02, size)
    volume = sum(grey * mask for grey, mask in zip(GREY.values(), regions, strict=True))
    image = np.where(radius < edge, (volume + noise).clip(0.01, 1), 0)[None]
    return image.astype(np.float16), (regions * 255).astype(np.uint8)


def write_balls(folder: Path, counts=(24, 10, 12), size=SIZE, regions: bool = True) -> dict:
    parts = {}
    splits = zip(("train", "validation", "test"), counts, strict=True)
    for number, (split, count) in enumerate(splits):
        ages = np.linspace(20, 90, count)
        rows = [
            VolumeSubject(f"sub-{split}{i}", "1", float(age), "FM"[i % 2], "a", "")
            for i, age in enumerate(ages)
        ]
        made = [ball(age, 1000 * number + i, size) for i, age in enumerate(ages)]
        pairs = [(volume, shares if regions else None) for volume, shares in made]
        parts[split] = VolumeSplitToWrite(rows, pairs)
    tissues = TISSUES if regions else ()
    card = age_cohort_card("balls", size, 1.0, tissues, ("none", "generated"), simulated=True)
    return write_volumes(folder, Balls(), card, parts)


def balls(folder: Path, **settings) -> Prepared:
    write_balls(folder, **settings)
    return Prepared.open(folder)


class Settings(Config):
    kind: Literal["generated"] = "generated"
    seed: int = 0


def write_cohort(folder: Path, simulated: bool = True, numbers: dict = NUMBERS) -> Prepared:
    """One session for each, two for the first of a split; sexes F, M in turn, the last unknown."""
    generator, parts = np.random.default_rng(0), {}
    for split, number in numbers.items():
        ages = generator.uniform(45, 85, number)
        sexes = [("F", "M")[place % 2] for place in range(number - 1)] + [""]
        names = [f"sub-{split}{max(place, 1):03d}" for place in range(number)]
        rows = [
            VolumeSubject(name, f"ses-{place}", float(np.float32(age)), sex, f"site{place % 3}")
            for place, (name, age, sex) in enumerate(zip(names, ages, sexes, strict=True))
        ]
        parts[split] = VolumeSplitToWrite(rows, [volume(age, generator) for age in ages])
    about = ("none", "made by tests")
    card = age_cohort_card("small cohort", SHAPE, 3.0, TISSUES, about, simulated)
    write_volumes(folder, Settings(), card, parts)
    return Prepared.open(folder)


def volume(age: float, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """A cube of 10³ voxels in 0s, brighter with age, and the three tissue shares that fill it."""
    image = np.zeros((1, *SHAPE), np.float16)
    cube = age / 100 + generator.normal(0, 0.05, (1, 10, 10, 10))
    image[:, 3:13, 3:13, 3:13] = np.clip(cube, 0.01, 1)
    regions = np.zeros((3, *SHAPE), np.uint8)
    regions[:, 3:13, 3:13, 3:13] = 85
    return image, regions


def leaning(data: Prepared, seed: int = 0) -> dict[str, np.ndarray]:
    """Predictions of all splits: 20 + 0.7·age + noise of 2 years."""
    generator = np.random.default_rng(seed)
    labels = {split: getattr(data, split).labels for split in ("train", "validation", "test")}
    return {name: 20 + 0.7 * y + generator.normal(0, 2, len(y)) for name, y in labels.items()}


def picture(name: str, number: int) -> Image.Image:
    """One picture of a class: its size and mode depend on the number."""
    draws = np.random.default_rng([number, len(name)])
    width, height = (int(side) for side in draws.integers(9, 60, 2))
    pixels = np.clip(np.array(COLOURS[name]) + draws.normal(0, 25, (height, width, 3)), 0, 255)
    image = Image.fromarray(pixels.astype(np.uint8))
    mode = MODES[number % len(MODES)]
    if mode == "I;16":
        return Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 257)
    if mode in ("RGBA", "LA"):
        image.putalpha(200)
    return image.convert(mode)


def suffix(image: Image.Image) -> str:
    """An ending whose format keeps the mode."""
    return {"CMYK": ".jpg", "I;16": ".tif"}.get(image.mode, ".png")


def write_classes(folder: Path, number: int) -> None:
    for name in COLOURS:
        (folder / name).mkdir(parents=True)
        for index in range(number):
            image = picture(name, index)
            image.save(folder / name / f"{index:03}{suffix(image)}")
