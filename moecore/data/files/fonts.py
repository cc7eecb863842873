"""Read font files (TrueType, OpenType), list their letters, and draw distorted characters.

A code is a character's Unicode number, S the height and width of an image.
"""

import hashlib
import unicodedata
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moecore.core.files import UserError, file_checksum

ENDINGS = (".ttf", ".otf")
NO_SCRIPT = {"Zinh", "Zyyy", "Zzzz"}  # Unicode's codes for inherited, common and unknown
OVERSAMPLING = 2  # pixels drawn per pixel of the image, along each axis
EM = 0.8  # side of the font's em square in S, before the random scale
LARGEST = 0.95  # side of the largest glyph in S, before the random scale
SHRINKING = 0.3  # largest decrease of the scale from 1
DEGREES = 15.0  # largest rotation
SHEAR = 0.2
SHIFT = 0.08  # largest shift in S

Drawing = tuple[Path, tuple[int, int], bytes]  # font, width and height, pixels' checksum


class Font(NamedTuple):
    """A font file; ``letters``: code → name of the script, such as "Old Italic"."""

    path: Path
    family: str
    style: str
    letters: Mapping[int, str]


def read_fonts(folder: Path) -> tuple[str, list[Font]]:
    """Return a checksum of all fonts below ``folder``, and the fonts; UserError for other files."""
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in ENDINGS)
    if not paths:
        allowed = f"one or more files that end with {' or '.join(ENDINGS)}"
        raise UserError.at(folder, found="no font", allowed=allowed)
    checksums = {path: file_checksum(path) for path in paths}
    lines = [f"{path.relative_to(folder)}\0{checksum}" for path, checksum in checksums.items()]
    sha256 = hashlib.sha256("\n".join(lines).encode(errors="surrogateescape")).hexdigest()
    return sha256, [_read_font(path, checksum) for path, checksum in checksums.items()]


@lru_cache(maxsize=2048)
def _read_font(path: Path, checksum: str) -> Font:
    """Read a font; the file's checksum is a key of the cache, so that a changed file is read."""
    from fontTools import ttLib  # takes 0.1 s to import
    from fontTools import unicodedata as scripts

    try:
        with ttLib.TTFont(path, lazy=True) as font:
            glyphs = font.getBestCmap() or {}
            missing = font.getGlyphOrder()[0]  # .notdef
        family, style = _open_font(path, 16).getname()
    except (ttLib.TTLibError, OSError, KeyError, AssertionError, ValueError) as error:
        allowed = "a TrueType or OpenType font, or remove it"
        raise UserError.at(path, found=f"no font ({error})", allowed=allowed) from error
    letters = {
        code: str(scripts.script_name(scripts.script(chr(code))))
        for code, glyph in glyphs.items()
        if glyph != missing
        and unicodedata.category(chr(code)).startswith("L")
        and scripts.script(chr(code)) not in NO_SCRIPT
    }
    return Font(path, family or path.stem, style or "Regular", letters)


@lru_cache(maxsize=2048)
def _open_font(path: Path, pixels: int) -> Any:  # PIL's FreeTypeFont
    from PIL import ImageFont

    # The other layout engine, Raqm, is not in every build of Pillow.
    return ImageFont.truetype(path, pixels, layout_engine=ImageFont.Layout.BASIC)


def draw_glyph(font: Font, code: int, size: int) -> Any:  # PIL's Image
    """Draw a character upright for an image of ``size`` pixels, and crop it to its ink."""
    from PIL import Image

    mask = _open_font(font.path, round(EM * OVERSAMPLING * size)).getmask(chr(code))
    glyph = Image.frombytes("L", mask.size, bytes(mask))
    return glyph.crop(glyph.getbbox() or (0, 0, 0, 0))


def fingerprint_drawings(fonts: list[Font], code: int, size: int) -> set[Drawing] | None:
    """Return a checksum per font of the drawn character; None if a font leaves it blank."""
    glyphs = [(font.path, draw_glyph(font, code, size)) for font in fonts]
    if not all(glyph.width for _, glyph in glyphs):
        return None
    return {(path, glyph.size, hashlib.sha256(glyph.tobytes()).digest()) for path, glyph in glyphs}


def warp_glyph(glyph: Any, size: int, distortion: float, random: np.random.Generator) -> np.ndarray:
    """Return ``glyph`` in an image uint8 (S, S), scaled, rotated, sheared and shifted at random."""
    from PIL import Image, ImageOps

    side = OVERSAMPLING * size
    scale = min(1, LARGEST * side / max(glyph.size))
    scale *= 1 - distortion * SHRINKING * random.random()
    angle, shear = distortion * random.uniform(-1, 1, 2) * (np.radians(DEGREES), SHEAR)
    rotation = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    # from places in the image to places in the glyph
    matrix = np.linalg.inv(scale * rotation @ np.array([[1, shear], [0, 1]]))
    centre = side / 2 + distortion * side * SHIFT * random.uniform(-1, 1, 2)
    padded = ImageOps.expand(glyph, 1)  # or edges would not be interpolated
    affine = np.column_stack([matrix, np.array(padded.size) / 2 - matrix @ centre]).ravel().tolist()
    method, filter = Image.Transform.AFFINE, Image.Resampling.BILINEAR
    return np.asarray(padded.transform((side, side), method, affine, filter).reduce(OVERSAMPLING))
