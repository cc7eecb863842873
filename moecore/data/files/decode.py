"""One image file to one square of uint8."""

from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

SUFFIXES = frozenset(
    (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff", ".gif", ".ppm", ".pgm")
)
MODES = {1: "L", 3: "RGB"}
DEEP = ("I", "F")  # modes with more than 8 bits: PIL would clip them silently


class Unreadable(Exception):
    """A file that is not a whole image of a kind that is supported; its text is the reason."""


def decode_image(path: str | Path, size: int, channels: int) -> np.ndarray:
    """Decode every pixel of a file: uint8 (channels, size, size); short side to ``size``
    (bilinear), then the centre.

    A camera's rotation mark (EXIF) is obeyed; large JPEG files are decoded at a fraction of their
    size, never below twice ``size``.
    Raises Unreadable on damaged, truncated, enormous or 16-bit files.
    """
    try:
        with Image.open(path) as image:
            if image.mode.startswith(DEEP):
                raise Unreadable(f"has mode {image.mode}; allowed: 8 bits a channel")
            image.draft(MODES[channels], (2 * size, 2 * size))
            return (
                _square(ImageOps.exif_transpose(image).convert(MODES[channels]), size)
                .reshape(size, size, channels)
                .transpose(2, 0, 1)
            )
    except (
        OSError,
        SyntaxError,
        ValueError,
        Image.DecompressionBombError,
    ) as error:  # all that PIL raises on bad content
        raise Unreadable(str(error) or type(error).__name__) from error


def header_problem(path: str | Path) -> str | None:
    """Why a file is no image that ``decode_image`` takes, as far as its header says; else None."""
    try:
        with Image.open(path) as image:
            mode = image.mode
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        return str(error) or type(error).__name__
    return f"has mode {mode}; allowed: 8 bits a channel" if mode.startswith(DEEP) else None


def _square(image: Image.Image, size: int) -> np.ndarray:
    """The largest centred square of the image, resized to (size, size): equal to resizing the short
    side and cropping.
    """
    width, height = image.size
    side = min(width, height)
    left = (width - side) / 2
    top = (height - side) / 2
    return np.asarray(
        image.resize(
            (size, size), Image.Resampling.BILINEAR, box=(left, top, left + side, top + side)
        )
    )
