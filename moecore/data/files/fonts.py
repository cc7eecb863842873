"""Font files (TrueType and OpenType): their letters, and how Pillow draws them.

A code is a character's Unicode number, S the height and width of an image.
"""

import hashlib
import unicodedata
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


Drawing = tuple[Path, tuple[int, int], bytes]  # font, width and height, checksum of the pixels


class Font(NamedTuple):
    """A font file: its family and style, and the codes of its letters."""

    path: Path
    family: str
    style: str
    letters: frozenset[int]

    @property
    def name(self) -> str:
        """Name of the font, such as "Noto Sans Bold"."""
        return f"{self.family} {self.style}"


class FontFolder(NamedTuple):
    """All fonts below a folder, in the order of their paths; ``sha256`` is that of their files."""

    folder: Path
    sha256: str
    fonts: tuple[Font, ...]

    def fonts_of_letters(self) -> dict[int, list[Font]]:
        """Return code → the fonts that have the letter, by code."""
        found: dict[int, list[Font]] = {}
        for font in self.fonts:
            for code in font.letters:
                found.setdefault(code, []).append(font)
        return dict(sorted(found.items()))


def read_font_folder(folder: Path) -> FontFolder:
    """Read every font below ``folder``. Raises UserError for none, or for a file that is no font.

    Fonts are read again only if a file was added, removed or changed.
    """
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in ENDINGS)
    if not paths:
        allowed = f"one or more files that end with {' or '.join(ENDINGS)}"
        raise UserError.at(folder, found="no font", allowed=allowed)
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{path.relative_to(folder)}\0{file_checksum(path)}\n".encode())
    return _read_fonts(folder, digest.hexdigest(), tuple(paths))


@lru_cache(maxsize=4)
def _read_fonts(folder: Path, sha256: str, paths: tuple[Path, ...]) -> FontFolder:
    return FontFolder(folder, sha256, tuple(_read_font(path) for path in paths))


def _read_font(path: Path) -> Font:
    from fontTools.ttLib import TTFont, TTLibError  # takes 0.1 s to import

    try:
        with TTFont(path, lazy=True) as font:
            glyphs = font.getBestCmap() or {}
            missing = font.getGlyphOrder()[0]  # .notdef
        family, style = open_font(path, 16).getname()
    except (TTLibError, OSError, KeyError, AssertionError, ValueError) as error:
        allowed = "a TrueType or OpenType font, or remove it"
        raise UserError.at(path, found=f"no font ({error})", allowed=allowed) from error
    letters = (code for code, glyph in glyphs.items() if glyph != missing and is_letter(code))
    return Font(path, family or path.stem, style or "Regular", frozenset(letters))


def is_letter(code: int) -> bool:
    """Return whether the character is a letter, without marks and digits, and has one script."""
    from fontTools.unicodedata import script

    text = chr(code)
    return unicodedata.category(text).startswith("L") and script(text) not in NO_SCRIPT


def script_of(code: int) -> str:
    """Return the name of a character's script, such as "Old Italic"."""
    from fontTools.unicodedata import script, script_name

    return str(script_name(script(chr(code))))


@lru_cache(maxsize=512)
def open_font(path: Path, pixels: int) -> Any:  # PIL's FreeTypeFont
    """Open a font whose em square has ``pixels`` pixels."""
    from PIL import ImageFont

    # The other layout engine, Raqm, is not in every build of Pillow.
    return ImageFont.truetype(path, pixels, layout_engine=ImageFont.Layout.BASIC)


def draw_glyph(font: Font, code: int, size: int) -> Any:  # PIL's Image
    """Draw a character upright, for an image with S = ``size``, and crop it to what is drawn."""
    from PIL import Image

    mask = open_font(font.path, round(EM * OVERSAMPLING * size)).getmask(chr(code))
    glyph = Image.frombytes("L", mask.size, bytes(mask))
    return glyph.crop(glyph.getbbox() or (0, 0, 0, 0))


def fingerprint_drawings(fonts: list[Font], code: int, size: int) -> set[Drawing] | None:
    """Return what each font draws for a character; None if one of them leaves it blank."""
    drawings = set()
    for font in fonts:
        glyph = draw_glyph(font, code, size)
        if not glyph.width:
            return None
        drawings.add((font.path, glyph.size, hashlib.sha256(glyph.tobytes()).digest()))
    return drawings


def warp_glyph(glyph: Any, size: int, distortion: float, random: np.random.Generator) -> np.ndarray:
    """Return ``glyph`` in an image uint8 (S, S), scaled, rotated, sheared and shifted at random.

    distortion: factor of the largest changes.
    """
    from PIL import Image

    side = OVERSAMPLING * size
    width, height = glyph.size
    scale = 1 - distortion * SHRINKING * random.random()
    scale *= min(1, LARGEST * side / max(width, height))
    angle, shear = distortion * random.uniform(-1, 1, 2) * (np.radians(DEGREES), SHEAR)
    rotation = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    # from places in the image to places in the glyph
    matrix = np.linalg.inv(scale * rotation @ np.array([[1, shear], [0, 1]]))
    centre = side / 2 + distortion * side * SHIFT * random.uniform(-1, 1, 2)
    padded = Image.new("L", (width + 2, height + 2))  # or edges would not be interpolated
    padded.paste(glyph, (1, 1))
    offset = np.array(padded.size) / 2 - matrix @ centre
    affine = np.column_stack([matrix, offset]).ravel().tolist()
    method, filter = Image.Transform.AFFINE, Image.Resampling.BILINEAR
    return np.asarray(padded.transform((side, side), method, affine, filter).reduce(OVERSAMPLING))
