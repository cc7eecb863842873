"""Base classes of sources of published images, with class labels or captions; downloads.

A source of captions reads annotations; this module finds, splits and writes. ``…_labels.npy`` are
then int32 (N, C, M), the tokens of C captions per image (see moecore/tasks/image_text.py), and the
tokenizer is ``vocabulary.txt``, one word per line, or the user's ``tokenizer.json``.
"""

import http.client
import json
import shutil
import urllib.error
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
import torch
from pydantic import Field, model_validator

from moecore.core import files
from moecore.core.files import UserError, find_raw_folder, join_below_root
from moecore.data.card import SPLITS, Card, count_by_split_and_class
from moecore.data.files.decode import resize_images_in_chunks
from moecore.data.files.image_files_source import DecodeCache, LabelledFiles, decode_splits
from moecore.data.layouts.images import SplitToWrite, write_images
from moecore.data.sources.base import Source
from moecore.data.stratified_splits import SplitSettings, split_train, stratified_limit
from moecore.data.text import tokenizers
from moecore.tasks import classification, image_text

LabelledImages = tuple[np.ndarray, np.ndarray]  # images uint8 (N, C, H, W) and labels int64 (N,)
SPLIT_STREAM = 6  # random stream of the splits; the next one draws limits
# name in Karpathy & Fei-Fei's files → split
KARPATHY_SPLITS = {"train": "train", "restval": "train", "val": "validation", "test": "test"}


class PublishedSetFacts(NamedTuple):
    """Facts of a data set that are known without its files; classes have equally many images."""

    name: str
    classes: tuple[str, ...]
    channels: int
    licence: str
    source: str
    train: int  # images
    test: int


class PublishedSource(SplitSettings, Source):
    """Base class of sources of published labelled images: find, download, split and write them."""

    root: str | tuple[str, ...]
    size: int
    download: bool = Field(False, description="Download missing files to the first root, checked")
    only_classes: tuple[str, ...] = Field((), description="Names of classes to keep; empty: all")
    test_unused: bool = Field(False, description="Also test on training images beyond train_limit")

    @model_validator(mode="after")
    def _check_only_classes(self) -> Self:
        classes = self.facts().classes
        named = self.only_classes
        if named and (len(set(named)) < max(2, len(named)) or not set(named) <= set(classes)):
            allowed = f"two or more of {', '.join(classes)}, each once"
            refusal = files.format_found_and_allowed(found=", ".join(named), allowed=allowed)
            raise ValueError(f"only_classes: {refusal}")
        return self

    @property
    def kept_classes(self) -> tuple[str, ...]:
        classes = self.facts().classes
        return tuple(name for name in classes if name in (self.only_classes or classes))

    @abstractmethod
    def facts(self) -> PublishedSetFacts:
        """Return name, classes and sizes of the data set, which are known without its files."""

    @abstractmethod
    def find_files(self, roots: list[Path]) -> Path | None:
        """Return the first folder or archive in ``roots`` that has all files, or None."""

    @abstractmethod
    def describe_absence(self, roots: list[Path]) -> str:
        """Return an error text that names missing files and how to get them."""

    @abstractmethod
    def fetch_files(self, root: Path) -> Path:
        """Download the files into ``root``, check them, and return their folder or archive."""

    @abstractmethod
    def read_sets(self, place: Path) -> tuple[LabelledImages, LabelledImages]:
        """Read the authors' training and test set from the folder or archive ``place``."""

    def describe(self) -> Card:
        facts = self.facts()
        classes = self.kept_classes
        name = facts.name
        if classes != facts.classes:
            name += f", {len(classes)} of {len(facts.classes)} classes"
        task = classification.Classification(classes=classes)
        card = Card(name, facts.channels, self.size, task, facts.licence, facts.source)

        def count() -> dict[str, Any]:
            place, root = self._find_files_and_root()
            train, test = (np.arange(n) % len(facts.classes) for n in (facts.train, facts.test))
            labels = self._renumber_kept_classes(np.concatenate([train, test]))
            parts = {split: labels[rows] for split, rows in self._split_rows(train, test).items()}
            note = None if place else f"prepare will download it into {root}"
            return {"counts": count_by_split_and_class(name, task, parts), "note": note}

        return card.fill_or_set_problem(count)

    def write(self, folder: Path) -> dict[str, Any]:
        place, root = self._find_files_and_root()
        (train, train_labels), (test, test_labels) = self.read_sets(place or self.fetch_files(root))
        images = np.concatenate([train, test])
        labels = self._renumber_kept_classes(np.concatenate([train_labels, test_labels]))
        parts = {
            split: SplitToWrite(labels[rows], resize_images_in_chunks(images[rows], self.size))
            for split, rows in self._split_rows(train_labels, test_labels).items()
        }
        return write_images(folder, self, self.describe(), parts)

    def _renumber_kept_classes(self, labels: np.ndarray) -> np.ndarray:
        """Renumber labels (N,) by their position in ``kept_classes``; −1 for other classes."""
        if not self.only_classes:
            return labels
        classes = self.kept_classes
        numbers = [classes.index(name) if name in classes else -1 for name in self.facts().classes]
        return np.array(numbers)[labels]

    def _find_files_and_root(self) -> tuple[Path | None, Path]:
        """Return where all files are, or None to download them, and the folder for downloads."""
        roots = files.candidate_raw_folders(self.root)
        place = self.find_files(roots)
        if place is None and not self.download:
            raise files.UserError(self.describe_absence(roots))
        return place, roots[0]

    def _split_rows(self, labels: np.ndarray, test_labels: np.ndarray) -> dict[str, np.ndarray]:
        """Return split → indices of kept images in the joined training and test sets."""
        train, validation = split_train(labels, self)
        all_labels = np.concatenate([labels, test_labels])
        test = np.arange(len(labels), len(all_labels))
        if self.test_unused:
            unused = np.setdiff1d(np.arange(len(labels)), np.concatenate([train, validation]))
            test = np.concatenate([test, unused])
        test = test[stratified_limit(all_labels[test], self.test_limit, self.seed)]
        # Classes are dropped last, so that their choice moves no image to another split.
        numbers = self._renumber_kept_classes(all_labels)
        rows = {"train": train, "validation": validation, "test": test}
        return {split: part[numbers[part] >= 0] for split, part in rows.items()}


def check_digest(path: Path, algorithm: str, expected: str, source: str) -> None:
    if (digest := files.file_checksum(path, algorithm)) != expected:
        raise files.UserError(f"{source}: has {algorithm} {digest}; published: {expected}; refetch")


def download_file(url: str, path: Path, check: Callable[[Path], object]) -> None:
    """Download ``url`` to ``path``; the file appears only if ``check`` raises nothing."""
    with files.atomic_file(path) as temporary:
        try:
            torch.hub.download_url_to_file(url, str(temporary), progress=False)
        except (
            urllib.error.URLError,
            http.client.HTTPException,
            TimeoutError,
            ConnectionError,
            ValueError,  # of a bad address in a redirection
        ) as error:
            mend = f"check the network, or put the file at {path}"
            raise files.UserError(f"{url}: download failed ({error}); {mend}") from error
        check(temporary)


class ImageCaptions(NamedTuple):
    file: str  # relative to the root
    captions: tuple[str, ...]  # in order


class CaptionedSource(Source):
    """Base class of sources of image files with captions: read, split and write them."""

    task: ClassVar[type[image_text.ImageText]] = image_text.ImageText
    sided: ClassVar[bool] = True  # captions may say left and right

    root: str | tuple[str, ...] = Field(description="Folder, or folders in order, of the images")
    size: int = Field(224, ge=4, le=1024, description="Height and width in pixels")
    channels: Literal[1, 3] = Field(3, description="1 grey, 3 colour; images are converted")
    captions: int = Field(5, ge=1, le=100, description="Captions per image: its first ones")
    context: int = Field(77, ge=3, le=2**10, description="Tokens of a caption; CLIP: 77")
    tokenizer: tokenizers.AnyTokenizer = Field(
        tokenizers.WordSettings(), description="words: of the captions; bpe: of a file, as CLIP's"
    )
    validation: float = Field(0.1, gt=0, lt=1, description="Share of images, without a split file")
    test: float = Field(0.1, gt=0, lt=1, description="Share of images, without a split file")
    train_limit: int | None = Field(None, ge=2, description="At most this many training images")
    test_limit: int | None = Field(None, ge=2, description="At most this many test images")
    on_error: Literal["stop", "skip"] = Field(
        "stop", description="On unreadable images: stop and list all of them, or skip them"
    )
    seed: int = Field(0, ge=0, description="Draws splits and limits")

    @property
    @abstractmethod
    def name_licence_origin(self) -> tuple[str, str, str]:
        """Name of the data, licence, and where they are from, for the card."""

    @abstractmethod
    def read(self) -> dict[str, list[ImageCaptions]]:
        """Read the annotation files; return split → images with captions."""

    def describe(self) -> Card:
        """Return the card from annotations alone, without counting words or writing data."""
        # The vocabulary is not known before the captions are tokenized.
        card = self._card(tokenizers.WordTokenizer([]))
        return card.fill_or_set_problem(
            lambda: {"counts": {split: (len(part),) for split, part in self._image_files().items()}}
        )

    def write(self, folder: Path) -> dict[str, Any]:
        splits = self._image_files()
        training = (text for _, image in splits["train"] for text in image.captions)
        tokenizer = self.tokenizer.build(training)
        card = self._card(tokenizer)
        files, counts = {}, {}
        for split, images in splits.items():
            captions = [image.captions for _, image in images]
            labels, counts[split] = tokenize_and_count_captions(captions, tokenizer, card.task)
            files[split] = LabelledFiles([path for path, _ in images], labels)
        scratch = folder / ".decoded"
        parts = decode_splits(DecodeCache(scratch, self.size, self.channels), files, self.on_error)
        written = write_images(folder, self, card, parts, counts, [tokenizer.write(folder)])
        shutil.rmtree(scratch)
        return written

    def _card(self, tokenizer: tokenizers.Tokenizer) -> Card:
        name, licence, source = self.name_licence_origin
        return Card(name, self.channels, self.size, caption_task(self, tokenizer), licence, source)

    def _image_files(self) -> dict[str, list[tuple[Path, ImageCaptions]]]:
        """Return split → (path, image with captions), cut to ``train_limit`` and ``test_limit``."""
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
    order = np.random.default_rng([settings.seed, SPLIT_STREAM]).permutation(len(images)).tolist()
    test = max(1, round(settings.test * len(images)))
    validation = max(1, round(settings.validation * len(images)))
    places = {"test": order[:test], "validation": order[test : test + validation]}
    places["train"] = order[test + validation :]
    return {split: [images[place] for place in sorted(rows)] for split, rows in places.items()}


def read_text_file(path: Path, what: str) -> str:
    """Return the text of a UTF-8 file; ``what`` names the file in the UserError if unreadable."""
    try:
        return path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; fetch the {what} first") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read, {(error.strerror or '').lower()}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8: {error}") from None


def read_annotation_json(path: Path) -> Any:
    try:
        return json.loads(read_text_file(path, "annotations"))
    except (ValueError, RecursionError) as error:  # the latter: too deeply nested brackets
        raise UserError(f"{path}: not valid JSON: {error}") from None


def read_karpathy_split(path: Path) -> dict[str, list[ImageCaptions]]:
    """Read a JSON file by Karpathy & Fei-Fei; return split → images with captions."""
    content = read_annotation_json(path)
    if not isinstance(content, dict) or not isinstance(content.get("images"), list):
        raise UserError(f"{path}: found no list `images`; allowed: dataset_coco.json of Karpathy's")
    splits: dict[str, list[ImageCaptions]] = {split: [] for split in SPLITS}
    for number, image in enumerate(content["images"]):
        try:
            split = KARPATHY_SPLITS[image["split"]]
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
    """Group (image id, caption) pairs by image; ``files`` maps image ids to file names."""
    captions: dict[Any, list[str]] = {image: [] for image in files}
    for image, text in pairs:
        if image not in captions:
            raise UserError(f"{path}: found a caption of image {image!r}, which is not listed")
        captions[image].append(text)
    images = [ImageCaptions(file, tuple(captions[image])) for image, file in files.items()]
    check_captions(path, images)
    return images


def caption_task(settings: Any, tokenizer: tokenizers.Tokenizer) -> image_text.ImageText:
    """Return the image-text task for settings with ``context``, ``captions`` and ``sided``."""
    return image_text.ImageText(
        words=tokenizer.words,
        context=settings.context,
        captions=settings.captions,
        end=tokenizer.end,
        vocabulary=tokenizer.digest,
        sided=settings.sided,
    )


def tokenize_and_count_captions(
    captions: Sequence[Sequence[str]], tokenizer: tokenizers.Tokenizer, task: Any
) -> tuple[np.ndarray, dict[str, int]]:
    """Return tokens int32 (N, captions, context); counts: captions, truncated, unknown words."""
    tokens = np.full((len(captions), task.captions, task.context), image_text.NO_CAPTION, np.int32)
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
