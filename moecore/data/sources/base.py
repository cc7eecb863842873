"""What every data source says of itself."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

from moecore.core.config import Part
from moecore.data.sources.base import PlannedData
from moecore.tasks.base import Task


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
