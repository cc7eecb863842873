"""What every calibrator says of itself."""

from abc import ABC, abstractmethod

from moecore.core.part_families import Part
from moecore.tasks.base import Task


class Calibrator(Part, ABC):
    """A calibrator of predictions, a family of parts."""

    @classmethod
    @abstractmethod
    def calibrates(cls, task: Task) -> bool:
        """Return whether it knows predictions of this task."""

    @property
    def needs_out_of_fold(self) -> bool:
        """Return whether it is fitted to what the stage ``out_of_fold`` predicts."""
        return False
