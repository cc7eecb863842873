"""Folders of images, one folder a class."""

from pathlib import Path

import numpy as np

from moecore.core.files import UserError
from moecore.data.files.decode import SUFFIXES
from moecore.data.files.decode_cache import Files


def class_names(folder: Path) -> tuple[str, ...]:
    """Sorted names of the class folders; UserError where there are fewer than two."""
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


def list_images(folder: Path, classes: tuple[str, ...]) -> Files:
    """Sorted image files under ``folder/<class>/``, at any depth, with labels by position in
    ``classes``.

    Raises UserError on class folders that differ from ``classes``, and on a class without an image.
    """
    if (found := class_names(folder)) != classes:
        lacking = set(classes) - set(found)
        unknown = set(found) - set(classes)
        raise UserError(
            f"{folder}: class folders differ; lacking: {_names(lacking)}; unknown: "
            f"{_names(unknown)}"
        )
    lists = [
        sorted(
            path
            for path in (folder / name).rglob("*")
            if path.suffix.lower() in SUFFIXES and path.is_file()
        )
        for name in classes
    ]
    if empty := [name for name, paths in zip(classes, lists, strict=True) if not paths]:
        raise UserError(
            f"{folder}: no image in class {', '.join(empty)}; allowed endings: "
            f"{' '.join(sorted(SUFFIXES))}"
        )
    labels = np.repeat(np.arange(len(classes), dtype=np.int64), [len(paths) for paths in lists])
    return Files([path for paths in lists for path in paths], labels)


def subset(files: Files, rows: np.ndarray) -> Files:
    """The files at ``rows``, in that order."""
    return Files([files.paths[row] for row in rows], files.labels[rows])


def _names(names: set[str]) -> str:
    shown = sorted(names)
    if not shown:
        return "none"
    words = ", ".join(shown[:10])
    if len(shown) > 10:
        words += f" and {len(shown) - 10} more"
    return words
