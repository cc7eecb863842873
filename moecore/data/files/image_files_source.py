"""List image files in class folders, and decode them in parallel, resuming after a kill."""

import hashlib
import os
import shutil
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import numpy as np
from pydantic import Field, model_validator

from moecore.core.files import ResumableParts, UserError, find_raw_folder, join_below_root
from moecore.data import stratified_splits, thread_map
from moecore.data.card import Card, count_by_split_and_class, new_memmap, open_array
from moecore.data.files import decode
from moecore.data.layouts.images import PackedJpegFacts, SplitToWrite, write_images
from moecore.data.sources.base import Source
from moecore.tasks.classification import Classification

CHUNK = 1024
MIN_SHORT_SIDE = 32  # pixels: JPEG works on blocks of 8 × 8, or 16 × 16


class LabelledFiles(NamedTuple):
    paths: list[Path]
    labels: np.ndarray  # int64 (N,)

    def take(self, rows: np.ndarray) -> "LabelledFiles":
        return LabelledFiles([self.paths[row] for row in rows], self.labels[rows])


class DecodeCache(NamedTuple):
    """Decodes images in chunks to ``folder``, and reuses the chunks that a killed run finished."""

    folder: Path
    size: int
    channels: int

    def decode(self, split: str, paths: list[Path]) -> tuple[Path, dict[int, str]]:
        """Decode files to a .npy (N, C, size, size); return its path, and index → error text."""
        work_folder = self._make_folder_and_remove_others(split, f"{self.size}", paths)
        array = work_folder / "images.npy"
        shape = (len(paths), self.channels, self.size, self.size)
        finished = ResumableParts(work_folder)
        try:
            if finished.parts:
                open_array(array, shape, np.uint8)
        except UserError:  # damaged
            finished.path.unlink()
            finished = ResumableParts(work_folder)
        out = new_memmap(array, np.uint8, shape, begun=bool(finished.parts))

        def decode_row(row: int) -> str | None:
            try:
                out[row] = decode.decode_image(paths[row], self.size, self.channels)
            except decode.UnreadableImage as error:
                return str(error)
            return None

        def decode_rows(rows: range) -> dict[int, str]:
            reasons = list(thread_map.map_in_threads(decode_row, rows))
            out.flush()
            return {row: reason for row, reason in zip(rows, reasons, strict=True) if reason}

        bad: dict[str, str] = {}
        for rows in _chunk_ranges(len(paths)):
            bad |= finished.part(str(rows), partial(decode_rows, rows))
        return array, {int(row): reason for row, reason in bad.items()}

    def pack_jpegs(
        self, split: str, paths: list[Path], short_side: int
    ) -> tuple[PackedJpegFacts, dict[int, str]]:
        """Recompress files, uncropped, as one file of JPEGs; return it, and index → error text."""
        work_folder = self._make_folder_and_remove_others(split, f"whole {short_side}", paths)
        file = work_folder / "images.bin"
        finished = ResumableParts(work_folder)
        written = sum(sum(part["lengths"]) for part in finished.parts.values())
        if finished.parts and (not file.is_file() or file.stat().st_size < written):
            finished.path.unlink()
            finished = ResumableParts(work_folder)

        def pack_row(row: int) -> decode.JpegWithHistogram | str:
            try:
                return decode.resize_and_encode_jpeg(paths[row], short_side, self.channels)
            except decode.UnreadableImage as error:
                return str(error)

        def pack_rows(rows: range, start: int) -> dict[str, Any]:
            packed = list(zip(rows, thread_map.map_in_threads(pack_row, rows), strict=True))
            images = [image for _, image in packed if not isinstance(image, str)]
            with open(file, "ab") as out:
                out.truncate(start)  # a killed run may have written more than it recorded
                out.write(b"".join(image.content for image in images))
                out.flush()
                os.fsync(out.fileno())
            zeros = np.zeros((self.channels, 256), np.int64)
            return {
                "lengths": [len(image.content) for image in images],
                "histogram": sum((image.histogram for image in images), zeros).tolist(),
                "bad": {row: reason for row, reason in packed if isinstance(reason, str)},
            }

        lengths: list[int] = []
        end = 0
        histogram = np.zeros((self.channels, 256), np.int64)
        bad: dict[str, str] = {}
        for rows in _chunk_ranges(len(paths)):
            part = finished.part(str(rows), partial(pack_rows, rows, end))
            lengths += part["lengths"]
            end += sum(part["lengths"])
            histogram += part["histogram"]
            bad |= part["bad"]
        images = PackedJpegFacts(file, np.array(lengths, np.int64), histogram, short_side)
        return images, {int(row): reason for row, reason in bad.items()}

    def _make_folder_and_remove_others(self, split: str, form: str, paths: list[Path]) -> Path:
        """Make a folder named by a hash of format ``form`` and files; delete the split's others."""
        # Decoding will report broken links.
        lengths = [path.stat().st_size if path.exists() else -1 for path in paths]
        listing = "\n".join(f"{path} {size}" for path, size in zip(paths, lengths, strict=True))
        text = f"{form} {self.channels}\n{listing}"
        name = hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()
        work = self.folder / split / name
        work.mkdir(parents=True, exist_ok=True)
        for other in work.parent.iterdir():
            if other != work:
                shutil.rmtree(other)
        return work


def _chunk_ranges(number: int) -> Iterator[range]:
    for start in range(0, number, CHUNK):
        yield range(start, min(start + CHUNK, number))


def decode_splits(
    cache: DecodeCache,
    splits: Mapping[str, LabelledFiles],
    on_error: Literal["stop", "skip"],
    short_side: int | None = None,  # pixels of uncropped JPEG training images; None: square
) -> dict[str, SplitToWrite]:
    """Decode splits for ``write_images``; "stop": UserError for bad files, "skip": omit them."""
    decoded = {
        split: cache.pack_jpegs(split, files.paths, short_side)
        if short_side is not None and split == "train"
        else cache.decode(split, files.paths)
        for split, files in splits.items()
    }
    bad = [
        f"{splits[split].paths[row]}: {why}"
        for split, (_, reasons) in decoded.items()
        for row, why in sorted(reasons.items())
    ]
    if bad and on_error == "stop":
        raise UserError(
            f"{len(bad)} image files cannot be read; repair or remove them, or set "
            "`on_error: skip`:\n  " + "\n  ".join(bad)
        )
    parts = {}
    for split, (images, reasons) in decoded.items():
        readable = np.setdiff1d(np.arange(len(splits[split].paths)), list(reasons))
        rows = _yield_chunks(images, readable) if reasons and isinstance(images, Path) else images
        parts[split] = SplitToWrite(splits[split].labels[readable], rows)
    return parts


def _yield_chunks(array: Path, rows: np.ndarray) -> Iterator[np.ndarray]:
    images = np.load(array, mmap_mode="r", allow_pickle=False)
    for part in _chunk_ranges(len(rows)):
        yield images[rows[part]]


class ImageFilesSource(stratified_splits.SplitSettings, Source):
    """Base class of data sources whose images are files of different shapes."""

    root: str
    size: int = Field(32, ge=4, le=1024, description="Height and width in pixels")
    channels: Literal[1, 3] = Field(3, description="1 grey, 3 colour; images are converted")
    short_side: int | None = Field(
        None, ge=MIN_SHORT_SIDE, le=1024, description="pixels, of uncropped JPEG; null: raw squares"
    )
    on_error: Literal["stop", "skip"] = Field(
        "stop", description="On unreadable images: stop and list all of them, or skip them"
    )

    @model_validator(mode="after")
    def _check_short_side(self) -> Self:
        if self.short_side is not None and self.short_side < self.size:
            raise ValueError(
                f"short_side is {self.short_side}, size {self.size}; "
                f"allowed: {self.size} or more, or null"
            )
        return self

    @property
    @abstractmethod
    def name_licence_origin(self) -> tuple[str, str, str]:
        """Return name, licence and origin of the data, for the card."""

    @abstractmethod
    def list_splits(self) -> tuple[tuple[str, ...], dict[str, LabelledFiles]]:
        """Return class names, and each split's files and labels; UserError for wrong folders."""

    def scratch_folder(self, folder: Path) -> Path:
        return folder / ".decoded"

    def describe(self) -> Card:
        return self._card().fill_or_set_problem(lambda: self._count(*self.list_splits()))

    def write(self, folder: Path) -> dict[str, Any]:
        classes, splits = self.list_splits()
        card = self._card()._replace(**self._count(classes, splits))
        scratch = self.scratch_folder(folder)
        cache = DecodeCache(scratch, self.size, self.channels)
        parts = decode_splits(cache, splits, self.on_error, self.short_side)
        content = write_images(folder, self, card, parts)
        shutil.rmtree(scratch)
        return content

    def _card(self) -> Card:
        name, licence, source = self.name_licence_origin
        return Card(name, self.channels, self.size, None, licence, source)

    def _count(self, classes: tuple[str, ...], splits: dict[str, LabelledFiles]) -> dict[str, Any]:
        task = Classification(classes=classes)
        labels = {split: files.labels for split, files in splits.items()}
        counts = count_by_split_and_class(self.name_licence_origin[0], task, labels)
        return {"task": task, "counts": counts, "short_side": self.short_side}

    def root_folder(self) -> Path:
        return find_raw_folder(self.root, "the folder with the class folders")


def list_class_folders(folder: Path) -> tuple[str, ...]:
    """Return the sorted names of the class folders in ``folder``; UserError for fewer than two."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    names = sorted(path.name for path in folder.iterdir() if path.is_dir() and path.name[0] != ".")
    if len(names) < 2:
        loose = sum(path.suffix.lower() in decode.SUFFIXES for path in folder.iterdir())
        raise UserError.at(
            folder,
            found=f"{len(names)} class folders, and {loose} images outside of them",
            allowed=f"two or more, with the images of one class each, as {folder}/CLASS/1.jpg",
        )
    return tuple(names)


def list_labelled_images(root: Path, folder: Path, classes: tuple[str, ...]) -> LabelledFiles:
    """Return the image files below ``folder/<class>/``, at any depth, and their class numbers."""
    if (names := list_class_folders(folder)) != classes:
        missing = _join_names(set(classes) - set(names))
        unknown = _join_names(set(names) - set(classes))
        raise UserError(f"{folder}: class folders differ; lacking: {missing}; unknown: {unknown}")
    lists = [sorted(_images_below(root, join_below_root(root, folder / name))) for name in classes]
    if empty := [name for name, paths in zip(classes, lists, strict=True) if not paths]:
        endings = " ".join(sorted(decode.SUFFIXES))
        listed = ", ".join(empty[:10])
        raise UserError(f"{folder}: no image in class {listed}; allowed endings: {endings}")
    labels = np.repeat(np.arange(len(classes), dtype=np.int64), [len(paths) for paths in lists])
    return LabelledFiles([path for paths in lists for path in paths], labels)


def _images_below(root: Path, folder: Path) -> Iterator[Path]:
    """Yield image files at any depth, including broken links; do not follow links to folders."""
    try:
        with os.scandir(folder) as listed:
            entries = list(listed)
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise UserError(f"{folder}: cannot be listed, {why}; correct that, or remove it") from error
    for entry in entries:
        path = Path(entry.path)
        if entry.is_dir(follow_symlinks=False):
            yield from _images_below(root, path)
        if path.suffix.lower() not in decode.SUFFIXES:
            continue
        if entry.is_symlink():  # no folder above it is a link
            join_below_root(root, path)
        if entry.is_file() or not path.exists():
            yield path


def _join_names(names: set[str]) -> str:
    text = ", ".join(sorted(names)[:10]) or "none"
    if len(names) > 10:
        text += f" and {len(names) - 10} more"
    return text
