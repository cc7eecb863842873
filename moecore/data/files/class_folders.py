"""Folders of images, one folder a class: what the sources image_folder and imagenet share."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from moecore.core.files import UserError, candidate_folders, join_below_root
from moecore.data.files.decode import SUFFIXES
from moecore.data.files.image_files import DecodeCache, LabelledFiles, decode_splits
from moecore.data.sources.base import PlannedData, Source, class_counts
from moecore.data.stratified_splits import SplitSettings
from moecore.data.writer import DatasetInfo, write_prepared
from moecore.tasks.classification import Classification

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

    def facts(self) -> tuple[str, str, str]:
        """Name, licence and source, for the card."""
        raise NotImplementedError

    def list_splits(self) -> tuple[tuple[str, ...], dict[str, LabelledFiles]]:
        """The classes and the files of each split. Raises UserError on wrong folders."""
        raise NotImplementedError

    def scratch_folder(self, folder: Path) -> Path:
        """Return where unfinished work lies."""
        return folder / ".decoded"

    def prepare(self, folder: Path) -> dict[str, Any]:
        """Write the prepared layout and return its card; UserError on wrong folders or files."""
        classes, splits = self.list_splits()
        scratch = self.scratch_folder(Path(folder))
        cache = DecodeCache(scratch, self.size, self.channels)
        parts = decode_splits(cache, splits, self.on_error, self.short_side)
        name, licence, source = self.facts()
        task = Classification(classes=classes)
        info = DatasetInfo(name, task, self.channels, self.size, licence, source, self)
        card = write_prepared(folder, info, parts)
        shutil.rmtree(scratch)
        return card

    def preview(self) -> PlannedData:
        """Return what ``prepare`` would write; files are counted."""
        known = PlannedData(self.facts()[0], self.channels, self.size, None)
        return known.complete_with(self._count_files)

    def _count_files(self) -> dict[str, Any]:
        classes, splits = self.list_splits()
        labels = {split: part.labels for split, part in splits.items()}
        return {
            "task": Classification(classes=classes),
            "counts": class_counts(self.facts()[0], classes, labels),
            "short_side": self.short_side,
        }

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
