"""A small prepared cohort for tests: volumes whose brightness grows with age, and predictions that
lean towards the mean.
"""

from pathlib import Path
from typing import Literal

import numpy as np

from moecore.core.config import Config
from moecore.data.prepared import Prepared
from moecore.data.volumes.subjects import Subject
from moecore.data.volumes.volume_writer import VolumeFacts, VolumePart, write_volumes


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
            Subject(name, f"ses-{place}", float(np.float32(age)), sex, f"site{place % 3}")
            for place, (name, age, sex) in enumerate(zip(names, ages, sexes, strict=True))
        ]
        parts[split] = VolumePart(rows, [volume(age, generator) for age in ages])
    facts = VolumeFacts(
        "small cohort",
        SHAPE,
        (3.0, 3.0, 3.0),
        "none",
        "made by tests",
        Settings(),
        simulated=simulated,
    )
    write_volumes(folder, facts, parts)
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
