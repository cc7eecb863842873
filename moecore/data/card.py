"""The card (facts) of a data set, stored as card.json, and reading and writing of .npy arrays."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, Self

import numpy as np

from moecore.core.config import Config
from moecore.core.files import UserError, file_checksum, write_json_sha256
from moecore.tasks.base import Task

SPLITS = ("train", "validation", "test")
PREPARE_AGAIN = "run the stage `prepare` again"


class Card(NamedTuple):
    """Facts of a data set that are known before it is written; card.json adds statistics."""

    name: str  # as the page and MLflow show it
    channels: int  # that models read
    size: int | tuple[int, int, int] | tuple[int]  # pixels along each axis, or tokens of text
    task: Task | None  # None: its classes are not known yet
    licence: str = ""  # of the data
    source: str = ""  # publication or address
    # split → number of images per class, or one number where an image has no single class
    counts: Mapping[str, tuple[int, ...]] = {}  # {}: not counted yet
    regions: tuple[str, ...] | None = None  # tissues of volumes; None: not known
    truth: int = 0  # number of known groups (kinds) of tokens, in an additional channel; 0: none
    short_side: int | None = None  # pixels, of uncropped training images; None: all are squares
    more: Mapping[str, Any] = {}  # additional entries of card.json
    note: str | None = None  # shown by `moecore check`, such as a download that will happen
    problem: str | None = None  # why the data cannot be written

    @property
    def image_counts(self) -> dict[str, int]:
        """Split → number of images."""
        return {split: sum(numbers) for split, numbers in self.counts.items()}

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Names of the classes: () where labels are not classes, None if unknown."""
        return None if self.task is None else tuple(self.task.classes)

    @property
    def shape(self) -> tuple[int, ...]:
        """Size of an item along each axis: (H, W), (D, H, W), or (M,) tokens of a text."""
        if isinstance(self.size, int):
            return (self.size, self.size)
        return tuple(self.size)

    @property
    def stored_channels(self) -> int:
        return self.channels + bool(self.truth)

    def fill_or_set_problem(self, read_fields: Callable[[], Mapping[str, Any]]) -> Self:
        """Return a copy with ``read_fields()`` as fields, or with its UserError as ``problem``."""
        try:
            return self._replace(**read_fields())
        except UserError as error:
            return self._replace(problem=str(error))

    def add_check_problem(self, check: Callable[[], object]) -> Self:
        """Return the card, or a copy with ``problem`` if ``check()`` raises a UserError."""
        try:
            check()
        except UserError as error:
            return self._replace(problem=str(error))
        return self

    def check_has_no_problem(self) -> Self:
        """Return the card itself. Raises UserError with the text of ``problem`` if it has one."""
        if self.problem is not None:
            raise UserError(self.problem)
        return self


def build_card_from_dict(card: Mapping[str, Any]) -> Card:
    """Convert a parsed card.json to a Card; KeyError, ValidationError for other versions' files."""
    size = card["size"]
    task = parse_card_task(card["task"])
    counts = {split: tuple(numbers.values()) for split, numbers in card["counts"].items()}
    if task.needs_classes("one_class"):
        counts = {split: (number,) for split, number in card["images"].items()}
    return Card(
        card["name"],
        card["channels"],
        size if isinstance(size, int) else tuple(size),
        task,
        counts=counts,
        regions=tuple(card.get("regions") or ()),
        truth=card.get("truth", 0),
        short_side=card.get("jpeg", {}).get("side"),
    )


def parse_card_task(settings: Any) -> Task:
    """Build the task from the entry ``task`` of card.json. Raises pydantic.ValidationError."""
    return Task.model_validate(settings)


def count_by_split_and_class(
    name: str, task: Task, labels: Mapping[str, np.ndarray]
) -> dict[str, tuple[int, ...]]:
    """Return split → images per class, from split → labels; UserError if a split lacks a class."""
    counts = {split: tuple(task.counts(part)) for split, part in labels.items()}
    for split, numbers in counts.items():
        named_counts = zip(task.classes, numbers, strict=True)
        if empty := [class_name for class_name, number in named_counts if not number]:
            raise UserError(
                f"{name}: no image in {split} of class {', '.join(empty[:10])}; "
                "every class needs one in every split (see validation, limits)"
            )
    return counts


def write_card(
    folder: Path, settings: Config, card: Card, files: list[str], **measured: Any
) -> dict[str, Any]:
    """Write card.json, with ``measured`` and checksums of ``files`` in ``folder``; return it."""
    values = settings.model_dump(mode="json")
    truth = {"truth": card.truth} if card.truth else {}
    content = {
        "name": card.name,
        "kind": values["kind"],
        "task": card.task.model_dump(mode="json") if card.task else None,
        "channels": card.channels,
        "size": card.size if isinstance(card.size, int) else list(card.size),
        **truth,
        **measured,
        **card.more,
        "licence": card.licence,
        "source": card.source,
        "files": {name: file_checksum(folder / name) for name in files},
        "settings": values,
    }
    write_json_sha256(folder / "card.json", content)
    return content


def open_array(path: Path, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Memory-map a .npy file; UserError unless it has this shape and dtype."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; {PREPARE_AGAIN}") from None
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"{path}: not a whole .npy file ({error}); {PREPARE_AGAIN}") from error
    if array.shape != shape or array.dtype != dtype:
        raise UserError(
            f"{path}: holds {array.dtype} {array.shape}; card.json says {np.dtype(dtype)} {shape}. "
            f"{PREPARE_AGAIN.capitalize()}"
        )
    return array


def save_array(path: Path, values: np.ndarray) -> None:
    with open(path, "wb") as file:
        # Given a real file, numpy writes through the C library, whose errors have no reason.
        writer: Any = SimpleNamespace(write=file.write)
        np.save(writer, values, allow_pickle=False)


def new_memmap(path: Path, dtype: Any, shape: tuple[int, ...], begun: bool = False) -> np.memmap:
    """Create a memory-mapped .npy file to fill; with ``begun``, continue an existing one."""
    array = np.lib.format.open_memmap(path, mode="r+" if begun else "w+", dtype=dtype, shape=shape)
    # Filling a sparse file on a full disk kills the process (SIGBUS): take the space now.
    if hasattr(os, "posix_fallocate"):  # not on macOS
        with open(path, "r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    return array


def open_labels(folder: Path, task: Task, split: str, number: int) -> np.ndarray:
    return np.array(open_array(folder / f"{split}_labels.npy", *task.storage_format(number)))
