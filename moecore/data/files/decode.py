"""Decode an image file to a square uint8 array, or recompress it as a smaller JPEG."""

import io
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps, UnidentifiedImageError

CHUNK = 4096
QUALITY = 95  # of stored JPEG files


def resize_images_in_chunks(images: np.ndarray, size: int) -> Iterator[np.ndarray]:
    """Resize images (N, C, H, W) bilinearly; yield chunks uint8 (n, C, size, size)."""
    for start in range(0, len(images), CHUNK):
        chunk = images[start : start + CHUNK]
        if chunk.shape[-2:] == (size, size):
            # Interpolating to the same size could round.
            yield np.ascontiguousarray(chunk)
        else:
            pixels = torch.from_numpy(np.ascontiguousarray(chunk)).to(torch.float32)
            shrunk = F.interpolate(pixels, size=(size, size), mode="bilinear", antialias=True)
            yield shrunk.round_().clamp_(0, 255).to(torch.uint8).numpy()


SUFFIXES = frozenset(".png .jpg .jpeg .bmp .webp .tif .tiff .gif .ppm .pgm".split())
# Checked by content: PIL would pass PostScript named .png to Ghostscript, which executes it.
FORMATS = ("PNG", "JPEG", "BMP", "WEBP", "TIFF", "GIF", "PPM")
MODES = {1: "L", 3: "RGB"}
BACKGROUND = "white"  # behind transparent pixels, as on most web pages
MAX_16_BIT_VALUE = 65535  # 16 bits; a file that uses fewer bits of them stays dark
MODES_OF_16_BITS = ("I;16", "I;16L", "I;16B", "I;16N")
REFUSED_MODE_PREFIXES = ("I", "F")  # prefixes of 32-bit modes, whose range is not known


class UnreadableImage(Exception):
    """Raised for a file that is not a complete image of a supported format, with the reason."""


def decode_image(path: str | Path, size: int, channels: int) -> np.ndarray:
    """Decode an image file; return its centre square, resized, uint8 (channels, size, size)."""
    # Large JPEG files are decoded at reduced size, at least twice ``size``. Only the first picture
    # of a file is read.
    with _errors_as_unreadable():
        return resize_centre_square(_open_image(path, size, channels), size).transpose(2, 0, 1)


class JpegWithHistogram(NamedTuple):
    content: bytes  # of the JPEG file
    histogram: np.ndarray  # int64 (C, 256), of the pixels before compression


def resize_and_encode_jpeg(path: str | Path, short_side: int, channels: int) -> JpegWithHistogram:
    """Resize an image file, uncropped, to ``short_side`` pixels, and encode it as JPEG."""
    with _errors_as_unreadable():
        image = _open_image(path, short_side, channels)
        factor = short_side / min(image.size)
        width, height = (max(short_side, round(side * factor)) for side in image.size)
        small = image.resize((width, height), Image.Resampling.BILINEAR)
        file = io.BytesIO()
        # 4:2:0: colour has half the resolution of brightness, as in camera files.
        small.save(file, "JPEG", quality=QUALITY, subsampling="4:2:0")
    histogram = np.array(small.histogram(), np.int64).reshape(channels, 256)
    return JpegWithHistogram(file.getvalue(), histogram)


def decode_jpeg_to_pil(content: bytes, channels: int) -> Image.Image:
    """Return the picture in a JPEG file's bytes. Raises UnreadableImage if it is damaged."""
    with _errors_as_unreadable():
        image = Image.open(io.BytesIO(content), formats=["JPEG"])
        image.load()
    if image.mode != MODES[channels]:
        raise UnreadableImage(format_mode_refusal(image.mode))
    return image


def _open_image(path: str | Path, size: int, channels: int) -> Image.Image:
    with Image.open(path, formats=FORMATS) as image:
        image.draft(MODES[channels], (2 * size, 2 * size))
        image.load()
        ImageOps.exif_transpose(image, in_place=True)  # a copy of a large picture is a gigabyte
        plain = _to_opaque_8_bit(image)
        if plain.mode == MODES[channels]:
            return plain
        return plain.convert(MODES[channels])


@contextmanager
def _errors_as_unreadable() -> Iterator[None]:
    """Turn errors that bad file content causes in the ``with`` block into UnreadableImage."""
    try:
        yield
    except UnidentifiedImageError as error:
        why = f"not a picture, or damaged; allowed: {', '.join(FORMATS)}"
        raise UnreadableImage(f"cannot identify image file: {why}") from error
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise UnreadableImage(str(error) or type(error).__name__) from error
    # PIL's EXIF and chunk readers raise these for wrong lengths and types.
    except (
        struct.error,
        zlib.error,
        LookupError,
        TypeError,
        AttributeError,
        ArithmeticError,
        EOFError,
    ) as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise UnreadableImage(f"its header or its EXIF is damaged ({why})") from error


def format_mode_refusal(mode: str) -> str:
    return f"has mode {mode}; allowed: 8 or 16 bits a channel"


def _to_opaque_8_bit(image: Image.Image) -> Image.Image:
    """Return the image with 8 bits per channel, transparency blended with BACKGROUND."""
    if image.mode in MODES_OF_16_BITS:
        values = np.asarray(image).astype(np.float32)
        return Image.fromarray(np.rint(values * (255 / MAX_16_BIT_VALUE)).astype(np.uint8))
    if image.mode.startswith(REFUSED_MODE_PREFIXES):
        # PIL would clip them to 0 … 255 silently.
        raise UnreadableImage(format_mode_refusal(image.mode))
    if not image.has_transparency_data:
        return image
    transparent = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", transparent.size, BACKGROUND), transparent)


def resize_centre_square(image: Image.Image, size: int) -> np.ndarray:
    """Return the image's largest centred square, resized to uint8 (size, size, C)."""
    width, height = image.size
    side = min(width, height)
    x, y = (width - side) / 2, (height - side) / 2
    square = image.resize((size, size), Image.Resampling.BILINEAR, box=(x, y, x + side, y + side))
    return np.asarray(square).reshape(size, size, -1)
