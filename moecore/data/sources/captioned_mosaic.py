"""Mosaics of 2 × 2 images whose captions name their layout, one test image per layout."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from moecore.data.card import SPLITS, Card
from moecore.data.files.published_source import caption_task, tokenize_and_count_captions
from moecore.data.layouts.images import SplitToWrite, write_images
from moecore.data.prepared import Prepared, Split
from moecore.data.sources.mosaic import CombinedImageSource, compose_mosaics
from moecore.data.text.tokenizers import WordTokenizer
from moecore.data.text.words import lower_words
from moecore.tasks.image_text import ImageText

STREAM = 8  # first random stream; lower ones belong to splits, few_shot and mosaics
CHUNK = 4096
NUMBER_OF_LAYOUTS = 10**4  # of four cells with ten classes each
# five wordings of the layout {0} {1} / {2} {3}, in different words and order
WORDINGS = (
    "a {0} at the top left, a {1} at the top right, a {2} at the bottom left, "
    "a {3} at the bottom right",
    "top row: {0} and {1}; bottom row: {2} and {3}",
    "{3} lower right, {2} lower left, {1} upper right, {0} upper left",
    "left column: {0} above {2}; right column: {1} above {3}",
    "below a {2} next to a {3}, over them a {0} next to a {1}",
)
PROMPT_TEMPLATES = ("a photo of a {0}",)  # adds the words of zero-shot prompts to the vocabulary


class CaptionedMosaic(CombinedImageSource):
    """Mosaics captioned with the class of each cell; no other split has a test mosaic's layout."""

    task: ClassVar[type[ImageText]] = ImageText
    sided: ClassVar[bool] = True  # captions say left and right

    kind: Literal["captioned_mosaic"] = "captioned_mosaic"
    train: int = Field(20000, ge=1, description="Number of mosaics for training")
    validation: int = Field(1000, ge=1, description="Number of mosaics for validation")
    test: int = Field(1000, ge=1, description="Number of mosaics for the test")
    captions: int = Field(len(WORDINGS), ge=1, le=len(WORDINGS), description="Wordings per mosaic")
    context: int = Field(36, ge=36, le=2**10, description="Tokens of a caption")
    seed: int = Field(0, ge=0, description="Draws layouts and images")

    @model_validator(mode="after")
    def _check_layouts_suffice(self) -> Self:
        number = self.validation + self.test
        if number >= NUMBER_OF_LAYOUTS:
            raise ValueError(
                f"validation and test are {number} mosaics; "
                f"allowed: fewer than the {NUMBER_OF_LAYOUTS} layouts of four cells"
            )
        return self

    def describe(self) -> Card:
        source = self.source.describe()
        return source._replace(
            name=f"{source.name}, captioned mosaics",
            size=2 * source.shape[0],
            task=caption_task(self, build_tokenizer(source.classes or ())),
            counts={split: (getattr(self, split),) for split in SPLITS},
        )

    def write_from(self, source: Prepared, folder: Path) -> dict[str, Any]:
        names = source.task.classes
        card = self.describe()
        tokenizer = build_tokenizer(names)
        parts, counts = {}, {}
        for split, rows in draw_layouts(len(names), self).items():
            captions = [layout_captions([names[cell] for cell in row]) for row in rows]
            labels, counts[split] = tokenize_and_count_captions(captions, tokenizer, card.task)
            images = self._mosaics(getattr(source, split), rows, SPLITS.index(split))
            parts[split] = SplitToWrite(labels, images)
        return write_images(folder, self, card, parts, counts, [tokenizer.write(folder)])

    def _mosaics(self, split: Split, layouts: np.ndarray, number: int) -> Iterator[np.ndarray]:
        """Yield uint8 chunks of mosaics; ``layouts`` (n, 4) has the class of each cell's image."""
        random = np.random.default_rng([self.seed, STREAM + number])
        members = [np.flatnonzero(split.labels == c) for c in range(int(layouts.max()) + 1)]
        images = np.asarray(split.images)
        for start in range(0, len(layouts), CHUNK):
            part = layouts[start : start + CHUNK]
            rows = np.zeros_like(part)
            for class_number in np.unique(part):
                cells = part == class_number
                rows[cells] = random.choice(members[class_number], int(cells.sum()))
            yield compose_mosaics(images[rows], 2)


def layout_captions(names: Sequence[str]) -> list[str]:
    """Return the captions of a mosaic with four class names, row by row from the top left."""
    return [wording.format(*names) for wording in WORDINGS]


def build_tokenizer(names: Sequence[str]) -> WordTokenizer:
    """Return a tokenizer of all words in captions, prompts and class names."""
    texts = [text.format(*[""] * 4) for text in (*WORDINGS, *PROMPT_TEMPLATES)]
    return WordTokenizer(sorted({word for text in (*texts, *names) for word in lower_words(text)}))


def draw_layouts(classes: int, settings: CaptionedMosaic) -> dict[str, np.ndarray]:
    """Draw each split's layouts, classes of cells (n, 4); test layouts are in no other split."""
    random = np.random.default_rng([settings.seed, STREAM + len(SPLITS)])
    order = random.permutation(classes**4)
    test, validation, rest = np.split(order, [settings.test, settings.test + settings.validation])
    # Training repeats a layout only after all others.
    rounds = -(-settings.train // len(rest))
    train = np.concatenate([random.permutation(rest) for _ in range(rounds)])[: settings.train]
    powers = classes ** np.arange(3, -1, -1)
    splits = {"train": train, "validation": validation, "test": test}
    return {split: numbers[:, None] // powers % classes for split, numbers in splits.items()}
