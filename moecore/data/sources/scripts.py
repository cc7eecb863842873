"""Characters of the world's scripts, drawn with the fonts of a folder (TrueType, OpenType).

A code is a character's Unicode number, S the height and width of an image.
"""

import hashlib
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from pydantic import Field

from moecore.core.files import UserError, file_checksum, find_raw_folder, write_csv
from moecore.data.card import SPLITS, Card
from moecore.data.layouts.images import SplitToWrite, write_images
from moecore.data.sources.base import Source
from moecore.tasks.classification import Classification

STREAM = 14  # first random stream of the splits; lower ones belong to other sources
CHOICE_STREAM = 17  # random stream of the choice of characters
TEST_FONTS_STREAM = 18  # random stream of the choice of test fonts
RENDERING_COLUMNS = ("character", "script", "font", "style")
ENDINGS = (".ttf", ".otf")
NO_SCRIPT = {"Zinh", "Zyyy", "Zzzz"}  # Unicode's codes for inherited, common and unknown
OVERSAMPLING = 2  # pixels drawn per pixel of the image, along each axis
EM_SHARE = 0.8  # side of the font's em square / S, before the random scale
MAX_GLYPH_SHARE = 0.95  # side of the largest glyph / S, before the random scale
MAX_SHRINKING = 0.3  # largest decrease of the scale from 1
MAX_DEGREES = 15.0  # largest rotation
MAX_SHEAR = 0.2
MAX_SHIFT = 0.08  # largest shift / S

Drawing = tuple[Path, tuple[int, int], bytes]  # font, width and height, pixels' checksum


class Font(NamedTuple):
    """A font file; ``letters``: code → name of the script, such as "Old Italic"."""

    path: Path
    family: str
    style: str
    letters: Mapping[int, str]


class CharacterFonts(NamedTuple):
    code: int
    script: str
    train: list[Font]  # fonts in training and validation
    test: list[Font]  # fonts in the test


Rendering = tuple[CharacterFonts, Font, np.random.Generator]


class Scripts(Source):
    """Renderings of letters, labelled by character; a channel hidden from models has the script.

    Each image has a font, size, rotation, shear and shift drawn from the seed, the character and
    the image's number. A letter that a font leaves blank, or draws with the pixels of a letter
    chosen before it, is left out. ``{split}_renderings.csv`` has the font and style of each image.
    """

    task: ClassVar[type[Classification]] = Classification
    sided: ClassVar[bool] = True

    kind: Literal["scripts"] = "scripts"
    root: str | tuple[str, ...] = Field(
        ("data/raw/fonts", "/usr/share/fonts/truetype/noto"),
        description="Folder of TrueType and OpenType fonts, or several: the first that exists",
    )
    sha256: str | None = Field(None, description="Fonts' checksum (card.json: fonts); null: any")
    scripts: tuple[str, ...] | None = Field(
        None, min_length=1, description="Only these scripts, by Unicode's names; null: all"
    )
    without: tuple[str, ...] = Field((), description="Not these scripts")
    ranks: tuple[int, int] | None = Field(
        None, description="First and last rank of scripts by number of letters; 1: most; null: all"
    )
    characters: int | None = Field(None, ge=2, description="Number of drawn characters; null: all")
    per_script: int | None = Field(None, ge=1, description="Most characters per script; null: all")
    split: Literal["renderings", "fonts"] = Field(
        "renderings", description="Test images are other renderings, or of other font families"
    )
    train: int = Field(12, ge=1, description="Images per character for training")
    validation: int = Field(3, ge=1, description="Images per character for validation")
    test: int = Field(3, ge=1, description="Images per character for the test")
    size: int = Field(28, ge=12, le=256, description="Height and width in pixels")
    distortion: float = Field(
        1.0, ge=0, le=2, description="Factor of up to 30 % smaller, 15°, shear 0.2, shift 8 %"
    )
    seed: int = Field(0, ge=0, description="Draws characters, fonts and renderings")

    def describe(self) -> Card:
        licence = "of the fonts; Noto: SIL Open Font License 1.1"
        card = Card("Scripts", 1, self.size, None, licence, "rendered fonts, Unicode's scripts")
        return card.fill_or_set_problem(self._fields_from_fonts)

    def _fields_from_fonts(self) -> dict[str, Any]:
        import PIL
        from PIL import features

        root, sha256, characters = self.choose_characters()
        scripts = sorted({character.script for character in characters})
        versions = {"pillow": PIL.__version__, "freetype": features.version("freetype2")}
        return {
            "name": f"{len(characters):,} characters of {len(scripts)} scripts",
            "task": Classification(classes=tuple(f"U+{code:04X}" for code, *_ in characters)),
            "counts": {split: (getattr(self, split),) * len(characters) for split in SPLITS},
            "truth": len(scripts),
            "more": {
                "fonts": {"folder": str(root), "sha256": sha256, **versions},
                "scripts": scripts,
            },
        }

    def write(self, folder: Path) -> dict[str, Any]:
        card = self.describe().check_has_no_problem()
        *_, characters = self.choose_characters()
        folder.mkdir(parents=True, exist_ok=True)
        parts, tables = {}, []
        for split in SPLITS:
            renderings = list(self._draw_fonts(characters, split))
            rows = [(chr(code), script, *font[1:3]) for (code, script, *_), font, _ in renderings]
            tables.append(f"{split}_renderings.csv")
            write_csv(folder / tables[-1], [RENDERING_COLUMNS, *rows])
            labels = np.arange(len(characters)).repeat(getattr(self, split))
            parts[split] = SplitToWrite(labels, self._draw_images(renderings, card.more["scripts"]))
        return write_images(folder, self, card, parts, files=tables)

    def choose_characters(self) -> tuple[Path, str, tuple[CharacterFonts, ...]]:
        """Return the folder of fonts, its checksum, and the characters (classes), by code.

        Raises:
            UserError: For a missing folder, files that are no fonts or have another checksum than
                ``sha256``, unknown scripts, and a folder with too few characters.
        """
        what = "a folder of fonts, such as that of Debian's package fonts-noto-core"
        root = find_raw_folder(self.root, what)
        sha256, _ = read_fonts_and_hash(root)
        if self.sha256 not in (None, sha256):
            allowed = f"{self.sha256}, see `sha256`"
            raise UserError.at(root, found=f"fonts with sha256 {sha256}", allowed=allowed)
        return root, sha256, _pick_characters(self, root, sha256)

    def _draw_fonts(self, characters: Iterable[CharacterFonts], split: str) -> Iterator[Rendering]:
        """Yield each image's character and font, and the generator that draws its distortion."""
        for character in characters:
            choices = character.test if split == "test" else character.train
            for number in range(getattr(self, split)):
                stream = STREAM + SPLITS.index(split)
                random = np.random.default_rng([self.seed, stream, character.code, number])
                yield character, choices[random.integers(len(choices))], random

    def _draw_images(self, renderings: list[Rendering], scripts: list[str]) -> Iterator[np.ndarray]:
        """Yield images uint8 (1, 2, S, S): pixels, and the script's number from 1."""
        for character, font, random in renderings:
            glyph = draw_cropped_glyph(font, character.code, self.size)
            grey = warp_glyph(glyph, self.size, self.distortion, random)
            yield np.stack([grey, np.full_like(grey, scripts.index(character.script) + 1)])[None]


@lru_cache(maxsize=8)
def _pick_characters(settings: Scripts, root: Path, sha256: str) -> tuple[CharacterFonts, ...]:
    """Choose characters (classes) at random from fonts below ``root``; UserError if too few."""
    fonts_of: dict[int, list[Font]] = {}
    scripts: dict[int, str] = {}
    for font in read_fonts_and_hash(root)[1]:
        scripts |= font.letters
        for code in font.letters:
            fonts_of.setdefault(code, []).append(font)
    chosen = _select_scripts_by_settings(settings, Counter(scripts.values()))
    codes = sorted(code for code, script in scripts.items() if script in chosen)
    held_out: set[str] = set()
    if settings.split == "fonts":
        held_out = _hold_out_families(settings, [(scripts[code], fonts_of[code]) for code in codes])
    earlier: set[Drawing] = set()
    counts: Counter[str] = Counter()
    characters = []
    for code in np.random.default_rng([settings.seed, CHOICE_STREAM]).permutation(codes).tolist():
        if len(characters) == settings.characters:
            break
        train = [font for font in fonts_of[code] if font.family not in held_out]
        test = train
        if settings.split == "fonts":
            test = [font for font in fonts_of[code] if font.family in held_out]
        if not train or not test or counts[scripts[code]] == settings.per_script:
            continue
        drawings = glyph_checksum_per_font(fonts_of[code], code, settings.size)
        if drawings and not drawings & earlier:
            earlier |= drawings
            counts[scripts[code]] += 1
            characters.append(CharacterFonts(code, scripts[code], train, test))
    number = settings.characters or 2
    if len(characters) < number:
        kind = "characters" if settings.split == "renderings" else "characters in two font families"
        text = f"{number:,}, but {root} has {len(characters):,} {kind} of these scripts"
        raise UserError.at("characters", found=text, allowed="fewer, more scripts, or other fonts")
    return tuple(sorted(characters))


def _select_scripts_by_settings(settings: Scripts, letters: Mapping[str, int]) -> set[str]:
    """Return the scripts that the settings select; ``letters`` is script → number of letters."""
    ranked = sorted(letters, key=lambda script: (-letters[script], script))
    if unknown := {*(settings.scripts or ()), *settings.without} - letters.keys():
        text = ", ".join(sorted(unknown))
        raise UserError.at("scripts", found=text, allowed=", ".join(sorted(letters)))
    first, last = settings.ranks or (1, len(ranked))
    if not 1 <= first <= last <= len(ranked):
        allowed = f"1 to {len(ranked)}, first and last"
        raise UserError.at("ranks", found=f"{first} to {last}", allowed=allowed)
    return set(ranked[first - 1 : last]) & set(settings.scripts or ranked) - set(settings.without)


def _hold_out_families(settings: Scripts, letters: list[tuple[str, list[Font]]]) -> set[str]:
    """Draw test font families, if possible one per script; letters: (script, fonts) pairs."""
    families: dict[str, set[str]] = {}
    for script, script_fonts in letters:
        families.setdefault(script, set()).update(font.family for font in script_fonts)
    random = np.random.default_rng([settings.seed, TEST_FONTS_STREAM])
    held_out: set[str] = set()
    training: set[str] = set()
    for _, names in sorted(families.items()):
        undecided = sorted(names - held_out - training)
        if undecided and len(names) > 1 and not names & held_out:
            held_out.add(undecided.pop(random.integers(len(undecided))))
        training.update(undecided)
    return held_out


def read_fonts_and_hash(folder: Path) -> tuple[str, list[Font]]:
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
    """Read a font; ``checksum`` is a key of the cache, so that a changed file is read again."""
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


def draw_cropped_glyph(font: Font, code: int, size: int) -> Any:  # PIL's Image
    """Draw a character upright for an image of ``size`` pixels, and crop it to its ink."""
    from PIL import Image

    mask = _open_font(font.path, round(EM_SHARE * OVERSAMPLING * size)).getmask(chr(code))
    glyph = Image.frombytes("L", mask.size, bytes(mask))
    return glyph.crop(glyph.getbbox() or (0, 0, 0, 0))


def glyph_checksum_per_font(fonts: list[Font], code: int, size: int) -> set[Drawing] | None:
    """Return a checksum per font of the drawn character; None if a font leaves it blank."""
    glyphs = [(font.path, draw_cropped_glyph(font, code, size)) for font in fonts]
    if not all(glyph.width for _, glyph in glyphs):
        return None
    return {(path, glyph.size, hashlib.sha256(glyph.tobytes()).digest()) for path, glyph in glyphs}


def warp_glyph(glyph: Any, size: int, distortion: float, random: np.random.Generator) -> np.ndarray:
    """Return ``glyph`` in an image uint8 (S, S), scaled, rotated, sheared and shifted at random."""
    from PIL import Image, ImageOps

    side = OVERSAMPLING * size
    scale = min(1, MAX_GLYPH_SHARE * side / max(glyph.size))
    scale *= 1 - distortion * MAX_SHRINKING * random.random()
    angle, shear = distortion * random.uniform(-1, 1, 2) * (np.radians(MAX_DEGREES), MAX_SHEAR)
    rotation = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    # from places in the image to places in the glyph
    matrix = np.linalg.inv(scale * rotation @ np.array([[1, shear], [0, 1]]))
    centre = side / 2 + distortion * side * MAX_SHIFT * random.uniform(-1, 1, 2)
    padded = ImageOps.expand(glyph, 1)  # or edges would not be interpolated
    affine = np.column_stack([matrix, np.array(padded.size) / 2 - matrix @ centre]).ravel().tolist()
    method, filter = Image.Transform.AFFINE, Image.Resampling.BILINEAR
    return np.asarray(padded.transform((side, side), method, affine, filter).reduce(OVERSAMPLING))
