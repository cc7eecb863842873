"""Open a prepared folder: the arrays of a layout (moecore/data/layouts), and ``card.json``.

The card's ``task`` says what the labels are; they have the shape and dtype that the task stores
(see moecore/tasks). The card also has name, kind, channels, size, images and counts of each split,
mean and std of training images, seed, licence, source, sha256 of each file, and the settings that
made it.

Where the card has ``truth``, a number of kinds (known groups of tokens), images have an additional
channel that no model sees: n, from 1, at the pixels of a token of kind n. Such text has
``…_truth.npy``, uint8 (n,), and images (N, 2C, M): the words of all blocks, then their kinds.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import ValidationError

from moecore.core.files import UserError, file_checksum, read_json
from moecore.data.card import PREPARE_AGAIN, SPLITS, parse_card_task
from moecore.data.layouts.images import JpegImages, open_image_split
from moecore.data.layouts.text import open_text, open_tokens_with_kinds
from moecore.data.layouts.volumes import open_volumes
from moecore.data.volumes.participants import read_prepared_csv_rows
from moecore.tasks.base import Task

# by the number of axes of an item
OPENERS: dict[int, Callable[..., tuple]] = {1: open_text, 2: open_image_split, 3: open_volumes}
FIELDS = "name kind task channels size images counts mean std licence source files settings".split()
VERIFIED_BYTES = 2**28  # checksums of smaller data are verified at every opening, in ≤ 0.2 s


class Split(NamedTuple):
    """Images uint8 (N, C, H, W) or volumes float16 (N, 1, D, H, W), memory-mapped, and labels."""

    images: np.ndarray | JpegImages  # indexed by image
    labels: np.ndarray  # (N, …) as the task stores them
    people: np.ndarray | None = None  # (N,) int64, a number per participant; None: unknown

    def people_at(self, places: np.ndarray) -> np.ndarray | None:
        return None if self.people is None else self.people[places]


def evenly_spaced_indices(total: int, number: int | None) -> np.ndarray:
    return np.unique(np.linspace(0, total - 1, min(number or total, total)).astype(int))


class Prepared(NamedTuple):
    """An opened prepared folder: the content of card.json, and three splits."""

    card: dict[str, Any]
    train: Split
    validation: Split
    test: Split
    folder: Path = Path()

    @property
    def task(self) -> Task:
        """The task of the labels, from the card's entry ``task``."""
        return parse_card_task(self.card["task"])

    def regions(self, split: str) -> np.ndarray:
        """Return the shares × 255 of R tissues, uint8 (N, R, D, H, W); UserError if not stored."""
        if not self.card.get("regions"):
            raise UserError(
                f"{self.folder}: this data has no tissue maps; allowed: a cohort with maps "
                "(regions: wm, gm, csf)"
            )
        return np.load(self.folder / f"{split}_regions.npy", mmap_mode="r", allow_pickle=False)

    def subjects(self, split: str) -> list[dict[str, str]]:
        """Return the rows (column → text) of a split's subjects.csv; UserError if it is missing."""
        return read_prepared_csv_rows(self.folder / f"{split}_subjects.csv")

    def tokens(self, split: str) -> np.ndarray:
        """Return a text split's tokens, int32 (n,), memory-mapped."""
        return np.load(self.folder / f"{split}_tokens.npy", mmap_mode="r", allow_pickle=False)

    def tokens_with_kinds(self, split: str) -> np.ndarray:
        """Return a text's tokens, int32 (1, n); (2, n) if kinds (such as dialects) are stored."""
        return open_tokens_with_kinds(self.folder, self.card, split)

    @staticmethod
    def open(folder: str | Path, verify: bool = False) -> "Prepared":
        """Return an opened folder whose arrays have the shapes and dtypes that the card states.

        verify: also compare the sha256 of each file; always done for data up to VERIFIED_BYTES.
        Raises UserError naming the file, what the card says and what was found.
        """
        folder = Path(folder)
        card = read_json(folder / "card.json")
        if not isinstance(card, dict):
            raise UserError(f"{folder / 'card.json'}: holds no card; {PREPARE_AGAIN}")
        # ``size`` is a list of three for volumes, a list of one for text, a number for images.
        sizes = card.get("size")
        axes = len(sizes) if isinstance(sizes, list) else 2
        if missing := [key for key in FIELDS if key not in card]:
            raise UserError(f"{folder / 'card.json'}: lacks {', '.join(missing)}; {PREPARE_AGAIN}")
        try:
            task = parse_card_task(card["task"])
        except ValidationError as error:
            why = error.errors()[0]["msg"]
            raise UserError(f"{folder / 'card.json'}: task: {why}; {PREPARE_AGAIN}") from error
        splits = [Split(*OPENERS[axes](folder, card, task, split)) for split in SPLITS]
        paths = [folder / name for name in card["files"]]
        if verify or sum(path.stat().st_size for path in paths if path.is_file()) <= VERIFIED_BYTES:
            for path, expected in zip(paths, card["files"].values(), strict=True):
                if not path.is_file():
                    raise UserError(f"{path}: no such file; {PREPARE_AGAIN}")
                if (digest := file_checksum(path)) != expected:
                    raise UserError(
                        f"{path}: has sha256 {digest}; card.json says {expected}. "
                        f"{PREPARE_AGAIN.capitalize()}"
                    )
        return Prepared(card, *splits, folder=folder)
