"""What a data set is: known before any file is written, and said by ``card.json`` afterwards."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from moecore.core.config import Config
from moecore.core.files import UserError, file_checksum, write_sealed
from moecore.tasks.base import Task

SPLITS = ("train", "validation", "test")


class Card(NamedTuple):
    """What a source knows of its data from settings, tables and headers.

    ``card.json`` says it, too, with what only the written files tell: moments and checksums.
    """

    name: str
    channels: int
    size: int | tuple[int, int, int] | tuple[int]
    task: Task | None  # None: its classes are not known yet
    licence: str = ""
    source: str = ""
    # split → images of each class, or the one number of all where labels are no single classes
    counts: Mapping[str, tuple[int, ...]] = {}  # {}: not known yet
    regions: tuple[str, ...] | None = None  # tissues of volumes; None: not known
    truth: int = 0  # kinds of tokens that one more channel names
    short_side: int | None = None  # of training images that are kept whole; None: squares of size
    more: Mapping[str, Any] = {}  # further entries of card.json
    note: str | None = None  # what is worth knowing and no problem, such as a download
    problem: str | None = None  # why the data cannot be written

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

    @property
    def stored_channels(self) -> int:
        """Channels of an image as it is written."""
        return self.channels + bool(self.truth)

    def complete_with(self, look: Callable[[], Mapping[str, Any]]) -> Self:
        """Return it with the fields that ``look`` gives; a UserError is its ``problem``."""
        try:
            return self._replace(**look())
        except UserError as error:
            return self._replace(problem=str(error))

    def without_problem(self) -> Self:
        """Return it; raise its problem as a UserError."""
        if self.problem is not None:
            raise UserError(self.problem)
        return self


def card_of_written_data(card: Mapping[str, Any]) -> Card:
    """Return the card of data that are written; card: the content of card.json.

    Raises KeyError or pydantic.ValidationError where the card is of other code than this.
    """
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
    """The task that a card's ``task`` describes. Raises pydantic.ValidationError."""
    return Task.model_validate(settings)


def count_classes(
    name: str, task: Task, labels: Mapping[str, np.ndarray]
) -> dict[str, tuple[int, ...]]:
    """Images of each class in each split; labels: split → (N, …), as the task stores them.

    Raises UserError where a class has none in a split.
    """
    counts = {split: tuple(task.counts(part)) for split, part in labels.items()}
    for split, numbers in counts.items():
        words = zip(task.classes, numbers, strict=True)
        if empty := [word for word, number in words if not number]:
            missing = f"no image in {split} of class {', '.join(empty[:10])}"
            allowed = "every class needs one in every split (see validation, limits)"
            raise UserError(f"{name}: {missing}; {allowed}")
    return counts


def write_card(
    folder: Path, settings: Config, card: Card, files: list[str], **measured: Any
) -> dict[str, Any]:
    """Write card.json and return its content.

    settings: of the source; files: names in ``folder``; measured: what the written files tell.
    """
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
    write_sealed(folder / "card.json", content)
    return content
