"""What folders of images say before an image is decoded: their counts, and a header a class."""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moecore.core.files import UserError
from moecore.data.files.decode import SUFFIXES, header_problem
from moecore.data.files.decode_cache import Files
from moecore.data.preview import class_counts


def look_at_folders(
    name: str, root: Path, classes: Sequence[str], splits: Mapping[str, Files], on_error: str
) -> dict[str, Any]:
    """``counts``, ``seen`` and ``note`` of a Preview, from the files of each split below ``root``.

    Opens the header of the first image of each class. Raises UserError where one is no image and
    ``on_error`` is "stop", or where a class has no image in a split.
    """
    bad = [f"{path}: {why}" for path in _firsts(splits) if (why := header_problem(path))]
    if bad and on_error == "stop":
        found = f"{len(bad)} of the first image files of each class cannot be read"
        listed = "; ".join(bad[:5])
        raise UserError(f"{found}: {listed}; mend or remove them, or set `on_error: skip`")
    counts = class_counts(name, classes, {split: part.labels for split, part in splits.items()})
    folders, others = _walked(root)
    return {"counts": counts, "seen": folders, "note": _passed_over(others)}


def _firsts(splits: Mapping[str, Files]) -> list[Path]:
    """The first file of each class, by its path."""
    first: dict[int, Path] = {}
    for files in splits.values():
        classes, rows = np.unique(files.labels, return_index=True)
        for label, row in zip(classes.tolist(), rows.tolist(), strict=True):
            first[label] = min(first.get(label, files.paths[row]), files.paths[row])
    return list(first.values())


def _walked(root: Path) -> tuple[list[Path], Counter[str]]:
    """All folders from ``root`` on, and how many files have an ending that no image has."""
    folders = []
    others: Counter[str] = Counter()
    for folder, _, names in os.walk(root):
        folders.append(Path(folder))
        for name in names:
            ending = os.path.splitext(name)[1].lower()
            if ending not in SUFFIXES and not name.startswith("."):
                others[ending or "no ending"] += 1
    return folders, others


def _passed_over(others: Counter[str]) -> str | None:
    if not others:
        return None
    listed = ", ".join(f"{number} {ending}" for ending, number in others.most_common(5))
    return f"files that are no images are passed over ({listed})"
