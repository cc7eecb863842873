"""One image file to one square of uint8."""

from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

SUFFIXES = frozenset(
    (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff", ".gif", ".ppm", ".pgm")
)
MODES = {1: "L", 3: "RGB"}
BACKGROUND = "white"  # behind transparent pixels: what most pages show them on
DEEPEST = 65535  # of 16 bits; what a file of fewer bits leaves unused stays dark
SIXTEEN = ("I;16", "I;16L", "I;16B", "I;16N")
DEEP = ("I", "F")  # beginnings of the modes of 32 bits, whose range is not known


class Unreadable(Exception):
    """A file that is not a whole image of a kind that is supported; its text is the reason."""


def decode_image(path: str | Path, size: int, channels: int) -> np.ndarray:
    """Decode every pixel of a file: uint8 (channels, size, size); short side to ``size``
    (bilinear), then the centre.

    A camera's rotation mark (EXIF) is obeyed; transparent pixels stand on ``BACKGROUND``; 16 bits
    a channel become the nearest of 8; large JPEG files are decoded at a fraction of their size,
    never below twice ``size``. Of several pictures in a file the first is taken.
    Raises Unreadable on damaged, truncated and enormous files, and on 32 bits a channel.
    """
    try:
        with Image.open(path) as image:
            image.draft(MODES[channels], (2 * size, 2 * size))
            plain = _plain(ImageOps.exif_transpose(image)).convert(MODES[channels])
            return _square(plain, size).reshape(size, size, channels).transpose(2, 0, 1)
    except UnidentifiedImageError as error:
        raise Unreadable("cannot identify image file: not a picture, or damaged") from error
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
    return None if mode in SIXTEEN or not mode.startswith(DEEP) else of_mode(mode)


def of_mode(mode: str) -> str:
    """Why images of a mode are not taken."""
    return f"has mode {mode}; allowed: 8 or 16 bits a channel"


def _plain(image: Image.Image) -> Image.Image:
    """The image with 8 bits a channel and without transparency."""
    if image.mode in SIXTEEN:
        deep = np.asarray(image).astype(np.float32)
        return Image.fromarray(np.rint(deep * (255 / DEEPEST)).astype(np.uint8))
    if image.mode.startswith(DEEP):
        # PIL would clip them to 0 … 255 silently
        raise Unreadable(of_mode(image.mode))
    if not image.has_transparency_data:
        return image
    clear = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", clear.size, BACKGROUND), clear)


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
