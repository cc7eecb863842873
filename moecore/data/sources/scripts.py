"""Characters of the world's scripts, drawn with the fonts of a folder."""

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from pydantic import Field

from moecore.core.files import UserError, find_raw_folder, write_csv
from moecore.data.card import SPLITS, Card
from moecore.data.files import fonts
from moecore.data.layouts.images import SplitToWrite, write_images
from moecore.data.sources.base import Source
from moecore.tasks.classification import Classification

STREAM = 14  # first random stream of the splits; lower ones belong to other sources
CHOICE = 17  # random stream of the choice of characters
HELD_OUT = 18  # random stream of the choice of test fonts
MAX_SCRIPTS = 255  # truths of an image are bytes
COLUMNS = ("character", "script", "font", "style")


class Character(NamedTuple):
    """A class: a character, its script, and the fonts of each split."""

    code: int
    script: str
    fonts: dict[str, list[fonts.Font]]

    @property
    def name(self) -> str:
        """Name of the class, such as U+0041."""
        return f"U+{self.code:04X}"


class Scripts(Source):
    """Renderings of letters: the label is the character, the truth of every pixel its script.

    Each image has a font, size, rotation, shear and shift drawn from the seed, the character and
    the image's number. A letter that a font leaves blank, or draws with the pixels of a letter
    chosen before it, is left out. ``{split}_renderings.csv`` has the font and style of each image.
    """

    task: ClassVar[type[Classification]] = Classification
    sided: ClassVar[bool] = True

    kind: Literal["scripts"] = "scripts"
    root: str | tuple[str, ...] = Field(
        ("data/raw/fonts", "/usr/share/fonts/truetype/noto"),
        description="Folder of TrueType and OpenType fonts, or folders of which the first one that "
        "exists is read",
    )
    sha256: str | None = Field(
        None, description="Checksum that the fonts must have (card.json: fonts); null: any"
    )
    scripts: tuple[str, ...] | None = Field(
        None, min_length=1, description="Only these scripts, by Unicode's names; null: all"
    )
    without: tuple[str, ...] = Field((), description="Not these scripts")
    ranks: tuple[int, int] | None = Field(
        None,
        description="Only scripts of these ranks, first and last, by their number of letters in "
        "the folder; 1 has most; null: all",
    )
    characters: int | None = Field(
        None, ge=2, description="Number of characters in total, drawn by the seed; null: all"
    )
    per_script: int | None = Field(
        None, ge=1, description="Largest number of characters per script; null: all"
    )
    split: Literal["renderings", "fonts"] = Field(
        "renderings",
        description="Test images are other renderings, or of font families that training has not; "
        "fonts: only of characters with both",
    )
    train: int = Field(12, ge=1, description="Images per character for training")
    validation: int = Field(3, ge=1, description="Images per character for validation")
    test: int = Field(3, ge=1, description="Images per character for the test")
    size: int = Field(28, ge=12, le=256, description="Height and width in pixels")
    distortion: float = Field(
        1.0,
        ge=0,
        le=2,
        description="Factor of the largest changes: 30 % smaller, 15° of rotation, a shear of 0.2 "
        "and a shift of 8 % of the size; 0: only fonts differ",
    )
    seed: int = Field(0, ge=0, description="Draws characters, fonts and renderings")

    def describe(self) -> Card:
        licence = "of the fonts; Noto: SIL Open Font License 1.1"
        card = Card("Scripts", 1, self.size, None, licence, "rendered fonts, Unicode's scripts")
        return card.complete_with(lambda: self._describe(*self.choose_characters()))

    def write(self, folder: Path) -> dict[str, Any]:
        font_folder, characters = self.choose_characters()
        folder.mkdir(parents=True, exist_ok=True)
        parts, tables = {}, []
        for split in SPLITS:
            labels = np.arange(len(characters)).repeat(getattr(self, split))
            parts[split] = SplitToWrite(labels, self._draw(characters, split))
            tables.append(f"{split}_renderings.csv")
            write_csv(folder / tables[-1], self._list_renderings(characters, split))
        card = self.describe()._replace(**self._describe(font_folder, characters))
        return write_images(folder, self, card, parts, files=tables)

    def choose_characters(self) -> tuple[fonts.FontFolder, tuple[Character, ...]]:
        """Return the fonts, and the classes by code.

        Raises:
            UserError: For a missing folder, files that are no fonts or not those of ``sha256``,
                unknown scripts, and fewer characters than are asked for.
        """
        root = find_raw_folder(
            self.root, "a folder of fonts, such as that of Debian's package fonts-noto-core"
        )
        font_folder = fonts.read_font_folder(root)
        if self.sha256 not in (None, font_folder.sha256):
            found = f"fonts with sha256 {font_folder.sha256}"
            raise UserError.at(root, found=found, allowed=f"{self.sha256}, see `sha256`")
        return font_folder, _choose_characters(self, font_folder)

    def _describe(
        self, font_folder: fonts.FontFolder, characters: tuple[Character, ...]
    ) -> dict[str, Any]:
        """Return the card's fields that depend on the fonts."""
        import PIL
        from PIL import features

        scripts = sorted({character.script for character in characters})
        source = {
            "folder": str(font_folder.folder),
            "files": len(font_folder.fonts),
            "sha256": font_folder.sha256,
            "pillow": PIL.__version__,
            "freetype": features.version("freetype2"),
        }
        task = Classification(classes=tuple(character.name for character in characters))
        return {
            "name": f"{len(characters):,} characters of {len(scripts)} scripts",
            "task": task,
            "counts": {split: (getattr(self, split),) * len(characters) for split in SPLITS},
            "truth": len(scripts),
            "more": {"fonts": source, "scripts": scripts},
        }

    def _renderings(
        self, character: Character, split: str
    ) -> Iterator[tuple[fonts.Font, np.random.Generator]]:
        """Yield the font of each image, and the generator that draws the rest."""
        choices = character.fonts[split]
        for number in range(getattr(self, split)):
            stream = STREAM + SPLITS.index(split)
            random = np.random.default_rng([self.seed, stream, character.code, number])
            yield choices[random.integers(len(choices))], random

    def _list_renderings(self, characters: tuple[Character, ...], split: str) -> Iterator[Any]:
        yield COLUMNS
        for character in characters:
            for font, _ in self._renderings(character, split):
                yield chr(character.code), character.script, font.family, font.style

    def _draw(self, characters: tuple[Character, ...], split: str) -> Iterator[np.ndarray]:
        """Yield the images of each character, uint8 (n, 2, S, S): pixels, and truth from 1."""
        scripts = sorted({character.script for character in characters})
        for character in characters:
            images = []
            for font, random in self._renderings(character, split):
                glyph = fonts.draw_glyph(font, character.code, self.size)
                images.append(fonts.warp_glyph(glyph, self.size, self.distortion, random))
            grey = np.stack(images)
            truth = np.full_like(grey, scripts.index(character.script) + 1)
            yield np.stack([grey, truth], axis=1)


@lru_cache(maxsize=8)
def _choose_characters(settings: Scripts, font_folder: fonts.FontFolder) -> tuple[Character, ...]:
    """Draw the classes of ``settings``; UserError for fewer than are asked for."""
    letters = font_folder.fonts_of_letters()
    scripts = {code: fonts.script_of(code) for code in letters}
    chosen = _choose_scripts(settings, Counter(scripts.values()))
    letters = {code: found for code, found in letters.items() if scripts[code] in chosen}
    held_out: set[str] = set()
    if settings.split == "fonts":
        held_out = _hold_out_families(settings.seed, letters, scripts)
    seen: set[fonts.Drawing] = set()
    counts: Counter[str] = Counter()
    characters = []
    for code in np.random.default_rng([settings.seed, CHOICE]).permutation(list(letters)).tolist():
        if len(characters) == settings.characters:
            break
        test = [font for font in letters[code] if font.family in held_out]
        train = [font for font in letters[code] if font.family not in held_out]
        if settings.split == "renderings":
            test = train
        if not train or not test or counts[scripts[code]] == settings.per_script:
            continue
        drawings = fonts.fingerprint_drawings(letters[code], code, settings.size)
        if drawings is None or drawings & seen:
            continue
        seen |= drawings
        counts[scripts[code]] += 1
        by_split = {"train": train, "validation": train, "test": test}
        characters.append(Character(code, scripts[code], by_split))
    wanted = settings.characters or 2
    if len(characters) < wanted:
        kind = "characters" if settings.split == "renderings" else "characters in two font families"
        found = f"{wanted:,}, but {font_folder.folder} has {len(characters):,} {kind}"
        allowed = "fewer, more scripts, or other fonts"
        raise UserError.at("characters", found=f"{found} of these scripts", allowed=allowed)
    return tuple(sorted(characters))


def _choose_scripts(settings: Scripts, letters: Mapping[str, int]) -> set[str]:
    """Return the names of the scripts to use; letters: script → number of letters in the fonts."""
    ranked = sorted(letters, key=lambda script: (-letters[script], script))
    named = {*(settings.scripts or ()), *settings.without}
    if unknown := sorted(named - set(ranked)):
        found = ", ".join(unknown)
        raise UserError.at("scripts", found=found, allowed=", ".join(sorted(ranked)))
    first, last = settings.ranks or (1, len(ranked))
    if not 1 <= first <= last <= len(ranked):
        found = f"{first} to {last}"
        raise UserError.at("ranks", found=found, allowed=f"1 to {len(ranked)}, first and last")
    chosen = set(ranked[first - 1 : last]) - set(settings.without)
    return chosen & set(settings.scripts or ranked)


def _hold_out_families(
    seed: int, letters: Mapping[int, list[fonts.Font]], scripts: Mapping[int, str]
) -> set[str]:
    """Draw font families for the test: if possible, each script has a family in it and outside."""
    families: dict[str, set[str]] = {}
    for code, found in letters.items():
        families.setdefault(scripts[code], set()).update(font.family for font in found)
    random = np.random.default_rng([seed, HELD_OUT])
    held_out: set[str] = set()
    training: set[str] = set()
    for script in sorted(families):
        undecided = sorted(families[script] - held_out - training)
        if undecided and len(families[script]) > 1 and not families[script] & held_out:
            held_out.add(undecided.pop(random.integers(len(undecided))))
        training.update(undecided)
    return held_out
