"""A params.yaml for a folder of pictures, derived from its files: ``moecore new --data FOLDER``."""

import json
import math
from pathlib import Path
from statistics import median
from string import Template

import numpy as np
from PIL import Image

from moecore.core.files import UserError, find_raw_folder
from moecore.data.files import decode
from moecore.data.files.image_files import class_names, list_labelled_images
from moecore.data.sources.image_folder import ImageFolder

TEMPLATE = Path(__file__).with_name("own_data.yaml")
STAGES = ("prepare", "teacher_router", "pretrain", "routing", "measure", "compare")  # no attacks
SAMPLE = 200  # pictures whose size and colour are read, evenly spread
MIN_PER_CLASS = 3  # pictures: to train, to validate, to test
MIN_SIZE = 32
MAX_SIZE = 64  # pixels: a CPU trains on them in minutes
PATCHES = 8  # per side
MAX_BATCH = 64
EPOCHS = 10
MIN_STEPS = 1200  # 90 pictures of three drawn shapes reach 90 % test accuracy
MAX_STEPS = 6000
SHOTS = (1, 5, 10, 25)


def derive_params_text(folder: Path) -> str:
    """Return a params.yaml for a folder with class folders, or with train/ and test/ of such.

    Raises UserError for missing classes, for a class with too few pictures, and for pictures that
    cannot be read.
    """
    root = find_raw_folder(str(folder), "the folder with the class folders").resolve()
    train = root / "train"
    if not train.is_dir():
        train = root
    classes = class_names(train)
    files = list_labelled_images(root, train, classes)
    sizes = np.bincount(files.labels)
    if sizes.min() < MIN_PER_CLASS:
        problem = f"{sizes.min()} pictures"
        allowed = f"{MIN_PER_CLASS} or more per class; add some, or remove the folder"
        raise UserError.at(train / classes[sizes.argmin()], found=problem, allowed=allowed)
    side, channels = _read_sample(files.paths)
    number = len(files.paths)
    size = min(max(round(side / PATCHES) * PATCHES, MIN_SIZE), MAX_SIZE)
    # Every class needs a picture in each split
    test = max(0.2, math.ceil(100 * len(classes) / number) / 100)
    validation = max(len(classes), round(0.1 * number))
    source = ImageFolder(root=str(root), size=size, test=test, validation=validation)
    counts = source.describe().without_problem().counts["train"]
    images = sum(counts)
    batch = min(MAX_BATCH, max(1, images // 4))
    per_epoch = images // batch
    return Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        root=json.dumps(str(root), ensure_ascii=False),
        size=size,
        side=f"{side:g}",
        min_size=MIN_SIZE,
        max_size=MAX_SIZE,
        channels=channels,
        test=test,
        validation=validation,
        patch=size // PATCHES,
        batch=batch,
        max_batch=MAX_BATCH,
        epochs=min(EPOCHS, max(1, MAX_STEPS // per_epoch)),
        updates=MIN_STEPS // EPOCHS if per_epoch * EPOCHS < MIN_STEPS else "null",
        train=images,
        classes=len(classes),
        shots=[shots for shots in SHOTS if shots <= min(counts)],
        smallest=min(counts),
    )


def _read_sample(paths: list[Path]) -> tuple[float, int]:
    """Return the median shorter side in pixels, and 1 channel if all are grey, else 3."""
    sides = []
    channels = 1
    for path in paths[:: math.ceil(len(paths) / SAMPLE)]:
        try:
            pixels = decode.decode_image(path, MIN_SIZE, 3)
        except decode.UnreadableImage as error:
            raise UserError(f"{path}: {error}; repair it, or remove it") from None
        if (pixels != pixels[:1]).any():
            channels = 3
        with Image.open(path, formats=decode.FORMATS) as image:  # reads the header alone
            sides.append(min(image.size))
    return median(sides), channels
