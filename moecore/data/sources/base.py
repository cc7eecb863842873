"""The base class of data sources."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

from moecore.core.config import Part
from moecore.core.files import UserError
from moecore.data.card import Card
from moecore.tasks.base import Task

OLD_METHODS = ("prepare", "preview")  # of sources before version 0.3


class Source(Part, ABC):
    """Settings of a data set: where its raw data are and how they are prepared."""

    task: ClassVar[type[Task]]  # of the labels that ``write`` writes
    volumes: ClassVar[bool] = False  # images of three axes
    sided: ClassVar[bool] = False  # labels or captions depend on left and right: no flips

    def __init_subclass__(cls, **options: Any) -> None:
        """Raise UserError for a class with the methods of earlier versions, OLD_METHODS."""
        super().__init_subclass__(**options)
        if old := [name for name in OLD_METHODS if name in vars(cls)]:
            raise UserError.at(
                cls.__name__,
                found=", ".join(old),
                allowed="describe, write (CHANGELOG.md, 0.3.0, says how)",
            )

    @abstractmethod
    def describe(self) -> Card:
        """Return the card of the data without writing them, from settings, tables and headers.

        Quick: no image is read. Anything wrong becomes the card's ``problem``.
        """

    @abstractmethod
    def write(self, folder: Path) -> dict[str, Any]:
        """Write arrays and card.json (see moecore/data/layouts); return the content of card.json.

        Raises UserError where the raw data are missing or unusable.
        """

    @property
    def labels_task(self) -> type[Task]:
        """Class of the labels' task; overridden where it depends on the settings."""
        return self.task
