"""Pictures as people have them: any size, any mode, three classes that differ by colour."""

from pathlib import Path

import numpy as np
from PIL import Image

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
