"""Images with captions: a source reads annotations, this module finds, splits and writes.

Images are stored as in layouts/images; ``…_labels.npy`` are int32 (N, C, M), the tokens of C
captions per image (see moecore/tasks/image_text.py), and the tokenizer is ``vocabulary.txt``, one
word per line, or the user's ``tokenizer.json``.
"""

import json
import shutil
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from pydantic import Field

from moecore.core.files import UserError, find_raw_folder, join_below_root
from moecore.data.card import SPLITS, Card
from moecore.data.files.image_files import DecodeCache, LabelledFiles, decode_splits
from moecore.data.layouts.images import write_images
from moecore.data.sources.base import Source
from moecore.data.text import tokenizers
from moecore.tasks.image_text import NONE, ImageText

SPLIT_STREAM = 6  # random stream of the splits; the next one draws limits
# of Karpathy & Fei-Fei's files
SPLIT_NAMES = {"train": "train", "restval": "train", "val": "validation", "test": "test"}


class ImageCaptions(NamedTuple):
    """One image: its file, relative to the root, and its captions in order."""

    file: str
    captions: tuple[str, ...]


class CaptionedSource(Source):
    """Base of the sources of image files with captions: settings, splits and written files."""

    task: ClassVar[type[ImageText]] = ImageText
    sided: ClassVar[bool] = True  # captions may say left and right

    root: str | tuple[str, ...] = Field(description="Folder, or folders in order, of the images")
    size: int = Field(224, ge=4, le=1024, description="Height and width in pixels")
    channels: Literal[1, 3] = Field(3, description="1 grey, 3 colour; images are converted")
    captions: int = Field(5, ge=1, le=100, description="Captions per image: its first ones")
    context: int = Field(77, ge=3, le=2**10, description="Tokens of a caption; CLIP: 77")
    tokenizer: tokenizers.AnyTokenizer = Field(
        tokenizers.WordSettings(), description="words: of the captions; bpe: of a file, as CLIP's"
    )
    validation: float = Field(
        0.1, gt=0, lt=1, description="Share of the images, where no file names the split"
    )
    test: float = Field(
        0.1, gt=0, lt=1, description="Share of the images, where no file names the split"
    )
    train_limit: int | None = Field(None, ge=2, description="At most this many training images")
    test_limit: int | None = Field(None, ge=2, description="At most this many test images")
    on_error: Literal["stop", "skip"] = Field(
        "stop", description="On unreadable images: stop and list all of them, or skip them"
    )
    seed: int = Field(0, ge=0, description="Draws splits and limits")

    @property
    @abstractmethod
    def about(self) -> tuple[str, str, str]:
        """Name of the data, licence, and where they are from, for the card."""

    @abstractmethod
    def read(self) -> dict[str, list[ImageCaptions]]:
        """Return split → images with captions, from the annotation files in the settings."""

    def describe(self) -> Card:
        """Return the card without writing data; annotations are read, but no word is counted."""
        # The vocabulary is not known before the captions are tokenized.
        card = self._card(tokenizers.WordTokenizer([]))
        return card.complete_with(
            lambda: {"counts": {split: (len(part),) for split, part in self._image_files().items()}}
        )

    def write(self, folder: Path) -> dict[str, Any]:
        """Write images, tokens and card.json; return its content. UserError for bad files."""
        splits = self._image_files()
        training = (text for _, image in splits["train"] for text in image.captions)
        tokenizer = self.tokenizer.build(training)
        card = self._card(tokenizer)
        files, counts = {}, {}
        for split, images in splits.items():
            captions = [image.captions for _, image in images]
            labels, counts[split] = tokenize_captions(captions, tokenizer, card.task)
            files[split] = LabelledFiles([path for path, _ in images], labels)
        scratch = folder / ".decoded"
        parts = decode_splits(DecodeCache(scratch, self.size, self.channels), files, self.on_error)
        written = write_images(folder, self, card, parts, counts, [tokenizer.write(folder)])
        shutil.rmtree(scratch)
        return written

    def _card(self, tokenizer: tokenizers.Tokenizer) -> Card:
        name, licence, source = self.about
        task = caption_task(self, tokenizer)
        return Card(name, self.channels, self.size, task, licence, source)

    def _image_files(self) -> dict[str, list[tuple[Path, ImageCaptions]]]:
        """Return split → (path, image with captions), within ``train_limit``, ``test_limit``."""
        root = find_raw_folder(self.root, "the folder of the images")
        images_of_split = self.read()
        limits = {"train": self.train_limit, "test": self.test_limit}
        chosen = {}
        for split in SPLITS:
            images = images_of_split[split]
            if not images:
                raise UserError(f"{root}: no image with captions in the split {split}")
            limit = limits.get(split)
            if limit is not None and limit < len(images):
                random = np.random.default_rng([self.seed, SPLIT_STREAM + 1])
                places = sorted(random.permutation(len(images))[:limit])
                images = [images[place] for place in places]
            chosen[split] = [(join_below_root(root, image.file), image) for image in images]
        if missing := [path for part in chosen.values() for path, _ in part if not path.is_file()]:
            listed = ", ".join(repr(str(path))[1:-1] for path in missing[:3])
            raise UserError(
                f"{root}: {len(missing)} images with captions are not there, {listed} among them; "
                "add them, or leave out theirs"
            )
        return chosen


def split_by_seed(
    images: list[ImageCaptions], settings: CaptionedSource
) -> dict[str, list[ImageCaptions]]:
    """Return split → images, drawn at random by the seed and the shares in ``settings``."""
    random = np.random.default_rng([settings.seed, SPLIT_STREAM])
    order = random.permutation(len(images)).tolist()
    test = max(1, round(settings.test * len(images)))
    validation = max(1, round(settings.validation * len(images)))
    places = {"test": order[:test], "validation": order[test : test + validation]}
    places["train"] = order[test + validation :]
    return {split: [images[place] for place in sorted(rows)] for split, rows in places.items()}


def read_text_file(path: Path, what: str) -> str:
    """Return the text of a UTF-8 file. Raises UserError if unreadable; what: for its message."""
    try:
        return path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; fetch the {what} first") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read, {(error.strerror or '').lower()}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8: {error}") from None


def read_annotation_json(path: Path) -> Any:
    """Return the parsed content of a JSON file. Raises UserError if it is missing or invalid."""
    try:
        return json.loads(read_text_file(path, "annotations"))
    except (ValueError, RecursionError) as error:  # the latter: too deeply nested brackets
        raise UserError(f"{path}: not valid JSON: {error}") from None


def read_karpathy_split(path: Path) -> dict[str, list[ImageCaptions]]:
    """Return split → images of a JSON file by Karpathy & Fei-Fei. Raises UserError for others."""
    content = read_annotation_json(path)
    if not isinstance(content, dict) or not isinstance(content.get("images"), list):
        raise UserError(f"{path}: found no list `images`; allowed: dataset_coco.json of Karpathy's")
    splits: dict[str, list[ImageCaptions]] = {split: [] for split in SPLITS}
    for number, image in enumerate(content["images"]):
        try:
            split = SPLIT_NAMES[image["split"]]
            parts = (image.get("filepath", ""), image["filename"])
            captions = tuple(sentence["raw"] for sentence in image["sentences"])
            if not all(isinstance(text, str) for text in (*parts, *captions)):
                raise TypeError("file name or caption, which is not text")
        except (KeyError, TypeError) as error:
            raise UserError(f"{path}: images[{number}]: lacks or has an odd {error}") from None
        splits[split].append(ImageCaptions("/".join(part for part in parts if part), captions))
    for part in splits.values():
        check_captions(path, part)
    return splits


def check_captions(path: Path, images: list[ImageCaptions]) -> None:
    """Raise UserError for duplicate images, and for images with no caption or an empty one."""
    files: set[str] = set()
    for image in images:
        if not image.captions or not all(text.strip() for text in image.captions):
            raise UserError(f"{path}: {image.file!r}: has no caption, or an empty one")
        if image.file in files:
            raise UserError(f"{path}: {image.file!r}: is listed twice; allowed: once")
        files.add(image.file)


def group_captions(
    path: Path, files: Mapping[Any, str], pairs: Iterable[tuple[Any, str]]
) -> list[ImageCaptions]:
    """Return each image with its captions; files: image id → file, pairs: (image id, caption)."""
    captions: dict[Any, list[str]] = {image: [] for image in files}
    for image, text in pairs:
        if image not in captions:
            raise UserError(f"{path}: found a caption of image {image!r}, which is not listed")
        captions[image].append(text)
    images = [ImageCaptions(file, tuple(captions[image])) for image, file in files.items()]
    check_captions(path, images)
    return images


def caption_task(settings: Any, tokenizer: tokenizers.Tokenizer) -> ImageText:
    """Return the image-text task; settings: anything with ``context``, ``captions``, ``sided``."""
    return ImageText(
        words=tokenizer.words,
        context=settings.context,
        captions=settings.captions,
        end=tokenizer.end,
        vocabulary=tokenizer.digest,
        sided=settings.sided,
    )


def tokenize_captions(
    captions: Sequence[Sequence[str]], tokenizer: tokenizers.Tokenizer, task: Any
) -> tuple[np.ndarray, dict[str, int]]:
    """Return tokens int32 (N, C, M), and counts: ``captions``, ``cut`` ones, ``unknown`` words."""
    tokens = np.full((len(captions), task.captions, task.context), NONE, np.int32)
    counts = {"captions": 0, "cut": 0, "unknown": 0}
    encoded_texts: dict[str, tokenizers.EncodedCaption] = {}
    for image, texts in enumerate(captions):
        for place, text in enumerate(texts[: task.captions]):
            if text not in encoded_texts:
                encoded_texts[text] = tokenizer.encode(text, task.context)
            encoded = encoded_texts[text]
            tokens[image, place] = encoded.tokens
            counts["captions"] += 1
            counts["cut"] += encoded.cut
            counts["unknown"] += encoded.unknown
    return tokens, counts
