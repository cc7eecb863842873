"""What tasks have in common whose answers are classes, of an image or of each of its cells."""

import numpy as np
from pydantic import Field
from torch import Tensor

from moecore.core.files import UserError
from moecore.tasks.base import Score, Task


class ClassTask(Task):
    """Labels are of K classes, and the mean score is an accuracy."""

    classes: tuple[str, ...] = Field(min_length=2, description="names, in the order of the labels")

    @property
    def outputs(self) -> int:
        return len(self.classes)

    @property
    def answers(self) -> tuple[str, ...]:
        return self.classes

    @property
    def score(self) -> Score:
        return Score("accuracy", "accuracy", "", "share", "higher")

    @property
    def history_name(self) -> str:
        return "accuracy"

    def mean_score(self, prediction: Tensor, labels: Tensor) -> float:
        return float(self.scores(prediction, labels).float().mean())

    def baseline_score(self, labels: Tensor) -> float:
        """Chance: one in K."""
        return 1 / self.outputs

    def counts(self, labels: np.ndarray) -> list[int]:
        """Return how many images or cells have each class; −1 is no class."""
        return np.bincount(labels[labels >= 0], minlength=self.outputs).tolist()

    def check(self, labels: np.ndarray, what: str) -> None:
        """Raise UserError unless the labels are classes, 0 … K−1."""
        if labels.size and not 0 <= labels.min() <= labels.max() < self.outputs:
            problem = f"run from {labels.min()} to {labels.max()}"
            raise UserError(f"{what} {problem}; allowed: 0 to {self.outputs - 1}")
