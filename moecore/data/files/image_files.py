"""Many image files: class folders, and decoding in parallel that resumes after a kill."""

import hashlib
import os
import shutil
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, TypeVar

import numpy as np
from pydantic import Field, model_validator

from moecore.core.files import (
    UserError,
    candidate_folders,
    join_below_root,
    read_json,
    write_sealed,
)
from moecore.data.card import Card, count_classes
from moecore.data.files.decode import (
    SUFFIXES,
    JpegWithHistogram,
    UnreadableImage,
    decode_image,
    recompress_image,
)
from moecore.data.layouts.images import PackedJpegFile, SplitToWrite, write_images
from moecore.data.sources.base import Source
from moecore.data.stored_arrays import new_array, open_array
from moecore.data.stratified_splits import SplitSettings
from moecore.data.thread_map import map_in_threads
from moecore.tasks.classification import Classification

CHUNK = 1024
Result = TypeVar("Result")


class LabelledFiles(NamedTuple):
    """The image files of one split and their labels int64 (N,)."""

    paths: list[Path]
    labels: np.ndarray


class DecodeCache(NamedTuple):
    """Where decoded images are gathered: ``{split}.npy``, and ``{split}.json``, how far."""

    folder: Path
    size: int
    channels: int

    def decode(self, split: str, paths: list[Path]) -> tuple[Path, dict[int, str]]:
        """Decode all ``paths``: path of uint8 (N, C, size, size), {row: reason} of the unreadable.

        State is saved every 1,024 files; another file list, file length, size or number of channels
        starts afresh, and so does a damaged state or array.
        """
        array = self.folder / f"{split}.npy"
        shape = (len(paths), self.channels, self.size, self.size)
        state = self._resume(split, array, shape, np.uint8, _key(f"{self.size}", self, paths))
        out = new_array(array, np.uint8, shape, begun=state["done"] > 0)

        def decode_row(row: int) -> str | None:
            try:
                out[row] = decode_image(paths[row], self.size, self.channels)
            except UnreadableImage as error:
                return str(error)
            return None

        for rows, reasons in _chunks_in_threads(range(state["done"], len(paths)), decode_row):
            state["failures"] |= {
                str(row): reason for row, reason in zip(rows, reasons, strict=True) if reason
            }
            out.flush()
            write_sealed(self.folder / f"{split}.json", state | {"done": rows.stop})
        return array, {int(row): reason for row, reason in state["failures"].items()}

    def pack(
        self, split: str, paths: list[Path], short_side: int
    ) -> tuple[PackedJpegFile, dict[int, str]]:
        """Encode all ``paths`` into ``{split}.bin``; also {row: reason} of the unreadable ones.

        State is saved as by ``decode``; another short side starts afresh too.
        """
        file = self.folder / f"{split}.bin"
        listed, shape = self.folder / f"{split}_lengths.npy", (len(paths),)
        key = _key(f"whole {short_side}", self, paths)
        state: dict[str, Any] = {"bytes": 0} | self._resume(split, listed, shape, np.int64, key)
        lengths = new_array(listed, np.int64, shape, begun=state["done"] > 0)
        histogram = np.array(state.get("histogram", np.zeros((self.channels, 256))), np.int64)
        _append_content(file, state["bytes"], b"")

        def pack_row(row: int) -> JpegWithHistogram | str:
            try:
                return recompress_image(paths[row], short_side, self.channels)
            except UnreadableImage as error:
                return str(error)

        for rows, packed in _chunks_in_threads(range(state["done"], len(paths)), pack_row):
            contents = []
            for row, one in zip(rows, packed, strict=True):
                if isinstance(one, str):
                    state["failures"][str(row)] = one
                    lengths[row] = 0
                    continue
                contents.append(one.content)
                lengths[row] = len(one.content)
                histogram += one.histogram
            state["bytes"] = _append_content(file, state["bytes"], b"".join(contents))
            lengths.flush()
            state |= {"done": rows.stop, "histogram": histogram.tolist()}
            write_sealed(self.folder / f"{split}.json", state)
        bad = {int(row): reason for row, reason in state["failures"].items()}
        return PackedJpegFile(file, np.delete(lengths, sorted(bad)), histogram, short_side), bad

    def _resume(
        self, split: str, array: Path, shape: tuple[int, ...], dtype: type, key: str
    ) -> dict[str, Any]:
        """Return how far a killed run of the same ``key`` got, where all that it left is whole."""
        self.folder.mkdir(parents=True, exist_ok=True)
        fresh = {"key": key, "done": 0, "failures": {}}
        try:
            state = read_json(self.folder / f"{split}.json", sealed=True)
            open_array(array, shape, dtype)
        except UserError:  # nothing there, or damaged: all of it can be made again
            return fresh
        file = self.folder / f"{split}.bin"
        kept = file.stat().st_size if file.is_file() else 0
        if state.get("key") != key or kept < state.get("bytes", 0):
            return fresh
        return state


def _key(form: str, cache: DecodeCache, paths: list[Path]) -> str:
    """Digest of what is made, of which files, and of their lengths."""
    listing = "\n".join(f"{path} {_file_length(path)}" for path in paths)
    text = f"{form} {cache.channels}\n{listing}"
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()


def _file_length(path: Path) -> int:
    """Bytes of a file; -1 of a link to nothing, which decoding complains of."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return -1


def _append_content(file: Path, start: int, content: bytes) -> int:
    """Write to the disk what comes after ``start`` bytes of a file, and return where it ends."""
    with open(file, "ab") as out:
        out.truncate(start)  # what a killed run wrote and never said
        out.write(content)
        out.flush()
        os.fsync(out.fileno())
    return start + len(content)


def _chunks_in_threads(
    rows: range, work: Callable[[int], Result]
) -> Iterator[tuple[range, Iterator[Result]]]:
    """Pieces of ``rows`` with what ``work`` makes of each, by several threads."""
    results = map_in_threads(work, rows)
    for start in range(rows.start, rows.stop, CHUNK):
        piece = range(start, min(start + CHUNK, rows.stop))
        yield piece, islice(results, len(piece))


def decode_splits(
    cache: DecodeCache,
    splits: Mapping[str, LabelledFiles],
    on_error: Literal["stop", "skip"],
    short_side: int | None = None,
) -> dict[str, SplitToWrite]:
    """Decode every split; the parts take the cache's files over.

    short_side: of the training images where they are kept whole, as JPEG files; None for an array
    as those of the other splits. Raises UserError that lists every unreadable file with its reason,
    unless ``on_error`` is ``skip``: then they are left out.
    """
    decoded: dict[str, tuple[Path | PackedJpegFile, dict[int, str]]] = {}
    for split, files in splits.items():
        if short_side is not None and split == "train":
            decoded[split] = cache.pack(split, files.paths, short_side)
        else:
            decoded[split] = cache.decode(split, files.paths)
    bad = [
        f"{splits[split].paths[row]}: {why}"
        for split, (_, reasons) in decoded.items()
        for row, why in sorted(reasons.items())
    ]
    if bad and on_error == "stop":
        count = f"{len(bad)} image files cannot be read"
        listed = "\n  ".join(bad)
        raise UserError(f"{count}; repair or remove them, or set `on_error: skip`:\n  {listed}")
    parts = {}
    for split, (images, reasons) in decoded.items():
        kept = np.setdiff1d(np.arange(len(splits[split].paths)), list(reasons))
        rows = _stored_rows(images, kept) if reasons and isinstance(images, Path) else images
        parts[split] = SplitToWrite(splits[split].labels[kept], rows)
    return parts


def _stored_rows(array: Path, rows: np.ndarray) -> Iterator[np.ndarray]:
    images = np.load(array, mmap_mode="r", allow_pickle=False)
    for start in range(0, len(rows), CHUNK):
        yield images[rows[start : start + CHUNK]]


SMALLEST = 32  # pixels: JPEG works on blocks of 8 × 8, or 16 × 16


class ImageFilesSource(SplitSettings, Source):
    """Fields of the sources whose images are files of different shapes."""

    root: str
    size: int = Field(32, ge=4, le=1024, description="Height and width in pixels")
    channels: Literal[1, 3] = Field(3, description="1 grey, 3 colour; images are converted")
    short_side: int | None = Field(
        None,
        ge=SMALLEST,
        le=1024,
        description="Keep whole JPEG files with this short side; null: raw squares",
    )
    on_error: Literal["stop", "skip"] = Field(
        "stop", description="An unreadable image: stop, naming all of them, or leave it out"
    )

    @model_validator(mode="after")
    def _large_enough(self) -> Self:
        if self.short_side is not None and self.short_side < self.size:
            given = f"short_side is {self.short_side}, size {self.size}"
            raise ValueError(f"{given}; allowed: {self.size} or more, or null")
        return self

    @property
    @abstractmethod
    def about(self) -> tuple[str, str, str]:
        """Name, licence and source, for the card."""

    @abstractmethod
    def list_splits(self) -> tuple[tuple[str, ...], dict[str, LabelledFiles]]:
        """The classes and the files of each split. Raises UserError on wrong folders."""

    def scratch_folder(self, folder: Path) -> Path:
        """Return where unfinished work lies."""
        return folder / ".decoded"

    def describe(self) -> Card:
        """Return what ``write`` would write; files are counted."""
        return self._card().complete_with(lambda: self._count(*self.list_splits()))

    def write(self, folder: Path) -> dict[str, Any]:
        """Write the prepared layout and return its card; UserError on wrong folders or files."""
        classes, splits = self.list_splits()
        card = self._card()._replace(**self._count(classes, splits))
        scratch = self.scratch_folder(folder)
        cache = DecodeCache(scratch, self.size, self.channels)
        parts = decode_splits(cache, splits, self.on_error, self.short_side)
        written = write_images(folder, self, card, parts)
        shutil.rmtree(scratch)
        return written

    def _card(self) -> Card:
        name, licence, source = self.about
        return Card(name, self.channels, self.size, None, licence, source)

    def _count(
        self, classes: tuple[str, ...], splits: Mapping[str, LabelledFiles]
    ) -> dict[str, Any]:
        task = Classification(classes=classes)
        labels = {split: files.labels for split, files in splits.items()}
        counts = count_classes(self.about[0], task, labels)
        return {"task": task, "counts": counts, "short_side": self.short_side}

    def root_folder(self) -> Path:
        """The first of the folders that ``root`` may be. Raises UserError where there is none."""
        roots = candidate_folders(self.root)
        if folder := next((root for root in roots if root.is_dir()), None):
            return folder
        looked = " and ".join(map(str, roots))
        raise UserError(
            f"{looked}: no such folder; set `root` to the folder with the class folders"
        )


def class_names(folder: Path) -> tuple[str, ...]:
    """Return the sorted names of the class folders; UserError where there are fewer than two."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    names = [path.name for path in folder.iterdir() if path.is_dir()]
    names = sorted(name for name in names if not name.startswith("."))
    if len(names) < 2:
        allowed = "two or more, with the images of one class each"
        raise UserError(f"{folder}: found {len(names)} class folders; allowed: {allowed}")
    return tuple(names)


def list_labelled_images(root: Path, folder: Path, classes: tuple[str, ...]) -> LabelledFiles:
    """Sorted image files under ``folder/<class>/``, at any depth, with labels by position in
    ``classes``. A link to nothing is among them: it cannot be read, and nobody is told otherwise.

    Raises UserError on class folders that differ from ``classes``, on a class without an image, and
    on links that lead out of ``root``.
    """
    if (names := class_names(folder)) != classes:
        lacking = _join_names(set(classes) - set(names))
        unknown = _join_names(set(names) - set(classes))
        raise UserError(f"{folder}: class folders differ; lacking: {lacking}; unknown: {unknown}")
    lists = [sorted(_images_below(root, join_below_root(root, folder / name))) for name in classes]
    if empty := [name for name, paths in zip(classes, lists, strict=True) if not paths]:
        endings = " ".join(sorted(SUFFIXES))
        listed = ", ".join(empty[:10])
        raise UserError(f"{folder}: no image in class {listed}; allowed endings: {endings}")
    labels = np.repeat(np.arange(len(classes), dtype=np.int64), [len(paths) for paths in lists])
    return LabelledFiles([path for paths in lists for path in paths], labels)


def _images_below(root: Path, folder: Path) -> Iterator[Path]:
    """Yield the image files at any depth; links to folders are not followed, those to files are.

    Raises UserError where a folder cannot be listed.
    """
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
        if path.suffix.lower() not in SUFFIXES:
            continue
        if entry.is_symlink():  # all above it are folders of their own
            join_below_root(root, path)
        if entry.is_file() or not path.exists():
            yield path


def take_files_at_rows(files: LabelledFiles, rows: np.ndarray) -> LabelledFiles:
    """The files at ``rows``, in that order."""
    return LabelledFiles([files.paths[row] for row in rows], files.labels[rows])


def _join_names(names: set[str]) -> str:
    words = ", ".join(sorted(names)[:10]) or "none"
    if len(names) > 10:
        words += f" and {len(names) - 10} more"
    return words
