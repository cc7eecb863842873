"""Folders of images, one folder a class, and how their images are kept."""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, Self

import numpy as np
from pydantic import Field, model_validator

from moecore.core.files import UserError
from moecore.core.inside import path_inside
from moecore.data.files.decode import SUFFIXES, Packing
from moecore.data.files.decode_cache import SplitFiles
from moecore.data.preview import class_counts
from moecore.data.splits import SplitSettings

SMALLEST = 32  # pixels: JPEG works on blocks of 8 × 8, or 16 × 16
QUALITY = 95


class ImageStoreSettings(SplitSettings):
    """Fields of the sources whose images are files of different shapes."""

    store: Literal["raw", "jpeg"] = Field(
        "raw", description="Training images: raw bytes, or JPEG, decoded whenever they are seen"
    )
    short_side: int | None = Field(
        None, ge=4, le=1024, description="With store: jpeg: keep whole images, with this short side"
    )
    quality: int = Field(
        QUALITY, ge=50, le=100, description="Of the JPEG files, where they are kept"
    )

    @model_validator(mode="after")
    def _stored(self) -> Self:
        size = getattr(self, "size", SMALLEST)
        if self.store == "jpeg" and size < SMALLEST:
            raise ValueError(f"store is jpeg, size {size}; allowed: {SMALLEST} or more, or raw")
        if self.store == "raw" and self.quality != QUALITY:
            given = f"quality is {self.quality}, of JPEG files, and store is raw"
            raise ValueError(f"{given}; allowed: {QUALITY}, or store: jpeg")
        if self.short_side is None:
            return self
        if self.store == "raw":
            given = f"short_side is {self.short_side}, store raw, which has one shape for all"
            raise ValueError(f"{given}; allowed: short_side: null, or store: jpeg")
        if self.short_side < size:
            given = f"short_side is {self.short_side}, size {size}"
            raise ValueError(f"{given}; allowed: {size} or more, or null")
        return self

    def packing(self, size: int, channels: int) -> Packing | None:
        """Return how training images become JPEG files; None where they stay raw."""
        if self.store == "raw":
            return None
        return Packing(self.short_side or size, self.short_side is not None, channels, self.quality)


def class_names(folder: Path) -> tuple[str, ...]:
    """Return the sorted names of the class folders; UserError where there are fewer than two."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    names = tuple(
        sorted(
            path.name
            for path in folder.iterdir()
            if path.is_dir() and not path.name.startswith(".")
        )
    )
    if len(names) < 2:
        raise UserError(
            f"{folder}: found {len(names)} class folders; allowed: two or more, with the images "
            "of one class each"
        )
    return names


def list_images(root: Path, folder: Path, classes: tuple[str, ...]) -> SplitFiles:
    """Sorted image files under ``folder/<class>/``, at any depth, with labels by position in
    ``classes``. A link to nothing is among them: it cannot be read, and nobody is told otherwise.

    Raises UserError on class folders that differ from ``classes``, on a class without an image, and
    on links that lead out of ``root``.
    """
    if (names := class_names(folder)) != classes:
        lacking = set(classes) - set(names)
        unknown = set(names) - set(classes)
        raise UserError(
            f"{folder}: class folders differ; lacking: {_join_names(lacking)}; unknown: "
            f"{_join_names(unknown)}"
        )
    lists: list[list[Path]] = []
    empty: list[str] = []
    for name in classes:
        lists.append(sorted(_images_below(root, path_inside(root, folder / name))))
        if not lists[-1]:
            empty.append(name)
    if empty:
        raise UserError(
            f"{folder}: no image in class {', '.join(empty[:10])}; allowed endings: "
            f"{' '.join(sorted(SUFFIXES))}"
        )
    labels = np.repeat(np.arange(len(classes), dtype=np.int64), [len(paths) for paths in lists])
    return SplitFiles([path for paths in lists for path in paths], labels)


def _images_below(root: Path, folder: Path) -> Iterator[Path]:
    """Yield the image files at any depth; links to folders are not followed, those to files are."""
    for here, _, names in os.walk(folder, onerror=_refuse_folder):
        for name in names:
            if os.path.splitext(name)[1].lower() in SUFFIXES:
                path = Path(here, name)
                if path.is_symlink():  # all above it are folders of their own
                    path_inside(root, path)
                if path.is_file() or not path.exists():
                    yield path


def _refuse_folder(error: OSError) -> NoReturn:
    why = (error.strerror or str(error)).lower()
    raise UserError(f"{error.filename}: cannot be listed, {why}; correct that, or remove it")


def select_files(files: SplitFiles, rows: np.ndarray) -> SplitFiles:
    """The files at ``rows``, in that order."""
    return SplitFiles([files.paths[row] for row in rows], files.labels[rows])


def _join_names(names: set[str]) -> str:
    shown = sorted(names)
    if not shown:
        return "none"
    words = ", ".join(shown[:10])
    if len(shown) > 10:
        words += f" and {len(shown) - 10} more"
    return words


def preview_folders(
    name: str, root: Path, classes: Sequence[str], splits: Mapping[str, SplitFiles]
) -> dict[str, Any]:
    """Return ``counts`` and ``seen`` of a Preview, from the files of each split below ``root``.

    Raises UserError where a class has no image in a split.
    """
    counts = class_counts(name, classes, {split: part.labels for split, part in splits.items()})
    return {"counts": counts, "seen": [Path(folder) for folder, _, _ in os.walk(root)]}
