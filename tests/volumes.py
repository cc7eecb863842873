"""A tiny cohort of generated volumes in the prepared layout, a model's view of them, and pictures.

A ball of "brain" of three nested tissues: csf in the middle, wm around it, gm outside. The csf
grows with age, so age can be learned. Pictures as people have them: any size, any mode, three
classes that differ by colour.
"""

from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image

from moecore.core.config import Config
from moecore.data.layouts.volumes import VolumeSplitToWrite, write_volumes
from moecore.data.prepared import Prepared
from moecore.data.volumes.cohorts import age_cohort_card
from moecore.data.volumes.subjects import VolumeSubject
from moecore.data.volumes.volume_preparation import REGIONS
from moecore.nn.backbones.base_model import ImageSpec
from moecore.tasks.regression import Regression

SIZE = (16, 16, 16)
VOLUMES = ImageSpec(
    channels=1,
    size=SIZE,
    mean=(0.5,),
    std=(0.25,),
    task=Regression(target="age", unit="years", mean=55.0, deviation=20.0),
)
GREY = {"wm": 0.9, "gm": 0.6, "csf": 0.2}


class Balls(Config):
    """Settings of the cohort."""

    kind: str = "balls"
    seed: int = 0


def ball(age: float, seed: int, size: tuple[int, int, int] = SIZE) -> tuple[np.ndarray, np.ndarray]:
    """A volume float16 (1, D, H, W) in [0, 1], background 0, and its tissue shares uint8 (3, D, H,
    W): wm, gm, csf.
    """
    random = np.random.default_rng([seed, 0])
    axes = [np.arange(length) + 0.5 - length / 2 for length in size]
    radius = np.sqrt(
        sum(
            axis.reshape([-1 if place == i else 1 for place in range(3)]) ** 2
            for i, axis in enumerate(axes)
        )
    )
    edge = min(size) / 2 - 1
    inner = edge * (0.2 + 0.4 * (age - 20) / 70)
    csf, gm = radius < inner, (radius < edge) & (radius >= 0.8 * edge)
    wm = (radius < edge) & ~csf & ~gm
    regions = np.stack([wm, gm, csf & (radius < edge)])
    noise = random.normal(0, 0.02, size)
    volume = sum(grey * mask for grey, mask in zip(GREY.values(), regions, strict=True))
    return np.where(radius < edge, (volume + noise).clip(0.01, 1), 0)[None].astype(np.float16), (
        regions * 255
    ).astype(np.uint8)


def write_balls(
    folder: Path,
    counts: tuple[int, int, int] = (24, 10, 12),
    size: tuple[int, int, int] = SIZE,
    regions: bool = True,
) -> dict:
    """Write the cohort to ``folder``, ages spread evenly over 20 … 90, and return its card."""
    parts = {}
    for number, (split, count) in enumerate(
        zip(("train", "validation", "test"), counts, strict=True)
    ):
        ages = np.linspace(20, 90, count)
        rows = [
            VolumeSubject(f"sub-{split}{i}", "1", float(age), "FM"[i % 2], "a", "")
            for i, age in enumerate(ages)
        ]
        made = [ball(age, 1000 * number + i, size) for i, age in enumerate(ages)]
        parts[split] = VolumeSplitToWrite(
            rows, [(volume, shares if regions else None) for volume, shares in made]
        )
    tissues = REGIONS if regions else ()
    card = age_cohort_card("balls", size, 1.0, tissues, ("none", "generated"), simulated=True)
    return write_volumes(folder, Balls(), card, parts)


def balls(folder: Path, **settings) -> Prepared:
    """The cohort, written and opened."""
    write_balls(folder, **settings)
    return Prepared.open(folder)


class Settings(Config):
    kind: Literal["generated"] = "generated"
    seed: int = 0


NUMBERS = {"train": 60, "validation": 24, "test": 40}
SHAPE = (16, 16, 16)


def write_cohort(
    folder: Path, simulated: bool = True, numbers: dict[str, int] = NUMBERS
) -> Prepared:
    """Participants with one session each, but for the first of each split, who has two; sexes F, M
    in turn, the last of unknown sex.
    """
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
    card = age_cohort_card("small cohort", SHAPE, 3.0, REGIONS, about, simulated)
    write_volumes(folder, Settings(), card, parts)
    return Prepared.open(folder)


def volume(age: float, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """A cube of 10³ voxels in a background of 0, brighter with age, and three tissue shares that
    fill it.
    """
    image = np.zeros((1, *SHAPE), np.float16)
    image[:, 3:13, 3:13, 3:13] = np.clip(
        age / 100 + generator.normal(0, 0.05, (1, 10, 10, 10)), 0.01, 1
    )
    regions = np.zeros((3, *SHAPE), np.uint8)
    regions[:, 3:13, 3:13, 3:13] = 85
    return image, regions


def leaning(data: Prepared, seed: int = 0) -> dict[str, np.ndarray]:
    """Predictions of all splits: 20 + 0.7·age + noise of 2 years."""
    generator = np.random.default_rng(seed)
    return {
        split: 20
        + 0.7 * getattr(data, split).labels
        + generator.normal(0, 2, len(getattr(data, split).labels))
        for split in ("train", "validation", "test")
    }


COLOURS = {"clover": (40, 160, 60), "poppy": (210, 40, 30), "sky": (60, 110, 220)}
MODES = ("RGB", "L", "RGBA", "P", "I;16", "LA", "1", "CMYK")


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
    """``number`` pictures of each class, in a folder a class."""
    for name in COLOURS:
        (folder / name).mkdir(parents=True)
        for index in range(number):
            image = picture(name, index)
            image.save(folder / name / f"{index:03}{suffix(image)}")
