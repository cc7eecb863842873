"""What a data source offers, and the preview of the data that it would write."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from moecore.core.config import Part
from moecore.core.files import UserError
from moecore.tasks.base import Task


class PlannedData(NamedTuple):
    """The data that ``prepare`` would write, as far as it is known without reading images."""

    name: str
    channels: int
    size: int | tuple[int, int, int] | tuple[int]
    task: Task | None  # None: its classes are not known yet
    # split → images of each class, or the one number of all where labels are no single classes
    counts: Mapping[str, tuple[int, ...]] = {}  # {}: not known yet
    regions: tuple[str, ...] | None = None  # tissues of volumes; None: not known
    truth: int = 0  # kinds of tokens that one more channel names
    short_side: int | None = None  # of training images that are kept whole; None: squares of size
    note: str | None = None  # what is worth knowing and no problem, such as a download
    problem: str | None = None  # why ``prepare`` would fail

    @property
    def images(self) -> dict[str, int]:
        """Images of each split."""
        return {split: sum(numbers) for split, numbers in self.counts.items()}

    @property
    def classes(self) -> tuple[str, ...] | None:
        """The names of the classes; () where labels are no classes, None where not known yet."""
        if self.task is None:
            return None
        return tuple(self.task.classes)

    @property
    def shape(self) -> tuple[int, ...]:
        """Pixels along each axis."""
        if isinstance(self.size, int):
            return (self.size, self.size)
        return tuple(self.size)

    def complete_with(self, look: Callable[[], Mapping[str, Any]]) -> "PlannedData":
        """Return it with the fields that ``look`` gives; a UserError is its ``problem``."""
        try:
            return self._replace(**look())
        except UserError as error:
            return self._replace(problem=str(error))


def planned_data_from_card(card: Mapping[str, Any]) -> PlannedData:
    """Return the preview of data that ``prepare`` has written.

    Raises KeyError or pydantic.ValidationError where the card is of other code than this.
    """
    size = card["size"]
    task = parse_card_task(card["task"])
    counts = {split: tuple(numbers.values()) for split, numbers in card["counts"].items()}
    if task.needs_classes("one_class"):
        counts = {split: (number,) for split, number in card["images"].items()}
    return PlannedData(
        card["name"],
        card["channels"],
        size if isinstance(size, int) else tuple(size),
        task,
        counts,
        tuple(card.get("regions") or ()),
        card.get("truth", 0),
        card.get("jpeg", {}).get("side"),
    )


def class_counts(
    name: str, classes: Sequence[str], labels: Mapping[str, np.ndarray]
) -> dict[str, tuple[int, ...]]:
    """Images of each class in each split; labels: split → int (N,).

    Raises UserError where a class has none in a split, as writing them would.
    """
    counts = {
        split: tuple(np.bincount(part, minlength=len(classes)).tolist())
        for split, part in labels.items()
    }
    for split, numbers in counts.items():
        if empty := [word for word, number in zip(classes, numbers, strict=True) if not number]:
            missing = f"no image in {split} of class {', '.join(empty[:10])}"
            allowed = "every class needs one in every split (see validation, limits)"
            raise UserError(f"{name}: {missing}; {allowed}")
    return counts


def parse_card_task(settings: Any) -> Task:
    """The task that a card's ``task`` describes. Raises pydantic.ValidationError."""
    return Task.model_validate(settings)


class Source(Part, ABC):
    """A data set, a family of parts: where its raw data lie and how they are prepared."""

    task: ClassVar[type[Task]]  # of the labels that ``prepare`` writes
    volumes: ClassVar[bool] = False  # images of three axes
    sided: ClassVar[bool] = False  # labels or captions say left and right: no flips

    @abstractmethod
    def prepare(self, folder: Path) -> dict[str, Any]:
        """Write the prepared layout (moecore/data/prepared.py) and return its card; UserError where
        the raw data do not allow it.
        """

    @property
    def labels_task(self) -> type[Task]:
        """Return the task of the labels, where it depends on the settings."""
        return self.task

    def preview(self) -> PlannedData | None:
        """Return what ``prepare`` would write, as far as headers tell; None where nothing does."""
        return None
