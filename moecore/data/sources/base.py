"""Base classes of data sources: of all sources, and of random vectors with a known rule."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from moecore.core.config import Part
from moecore.core.files import UserError
from moecore.data.card import SPLITS, Card
from moecore.data.layouts.images import SplitToWrite, write_images
from moecore.tasks.base import Task
from moecore.tasks.classification import Classification

OLD_METHODS = ("prepare", "preview")  # of sources before version 0.3


class Source(Part, ABC):
    """Settings of a data set: where its raw data are and how they are prepared."""

    task: ClassVar[type[Task]]  # of the labels that ``write`` writes
    volumes: ClassVar[bool] = False  # images of three axes
    sided: ClassVar[bool] = False  # labels or captions depend on left and right: no flips

    def __init_subclass__(cls, **options: Any) -> None:
        """Raise UserError for a class with a method in OLD_METHODS, which is no longer called."""
        super().__init_subclass__(**options)
        if old := [name for name in OLD_METHODS if name in vars(cls)]:
            allowed = "describe, write (CHANGELOG.md, 0.3.0)"
            raise UserError.at(cls.__name__, found=", ".join(old), allowed=allowed)

    @abstractmethod
    def describe(self) -> Card:
        """Return the card of the data without writing them, from settings, tables and headers."""
        # Quick: no image is read. Anything wrong becomes the card's ``problem``.

    @abstractmethod
    def write(self, folder: Path) -> dict[str, Any]:
        """Write arrays and card.json (see moecore/data/layouts); return the content of card.json.

        Raises UserError where the raw data are missing or unusable.
        """

    @property
    def labels_task(self) -> type[Task]:
        """Class of the labels' task; overridden where it depends on the settings."""
        return self.task


RULE_STREAM = 0  # random stream of the rule, which all splits share; the splits' streams follow
LICENCE = "none needed: drawn numbers"


DrawnImages = tuple[np.ndarray, np.ndarray, np.ndarray]  # values (n, S, S), labels and kinds (n,)


class DrawnSource(Source, ABC):
    """Base class of sources of random grey images, each of a known kind that models do not see."""

    task: ClassVar[type[Classification]] = Classification
    sided: ClassVar[bool] = True  # a mirrored vector is a different vector

    train: int = Field(16000, ge=1, description="Number of images for training")
    validation: int = Field(4000, ge=1, description="Number of images for validation")
    test: int = Field(10000, ge=1, description="Number of images for the test")
    seed: int = Field(0, ge=0, description="Draws the rule and the images")

    @property
    @abstractmethod
    def uncounted_card(self) -> Card:
        """The card without counts; ``truth`` is the number of groups (kinds) of images."""

    @abstractmethod
    def draw_rule(self, random: np.random.Generator) -> Any:
        """Draw the parameters that all splits share. Raises UserError for impossible settings."""

    @abstractmethod
    def draw_images(self, rule: Any, number: int, random: np.random.Generator) -> DrawnImages:
        """Draw values (number, S, S), labels and kinds (number,) by ``rule`` of ``draw_rule``."""

    def describe(self) -> Card:
        counts = {split: (getattr(self, split),) for split in SPLITS}
        return self.uncounted_card._replace(counts=counts).add_check_problem(self._seeded_rule)

    def write(self, folder: Path) -> dict[str, Any]:
        rule = self._seeded_rule()
        parts = {}
        for stream, name in enumerate(SPLITS, RULE_STREAM + 1):
            random = np.random.default_rng([self.seed, stream])
            values, labels, kinds = self.draw_images(rule, getattr(self, name), random)
            grey = np.rint(128 + 127 * values.clip(-1, 1))
            truth = np.broadcast_to(kinds[:, None, None] + 1, grey.shape)
            parts[name] = SplitToWrite(labels, [np.stack([grey, truth], axis=1).astype(np.uint8)])
        return write_images(folder, self, self.describe(), parts)

    def _seeded_rule(self) -> Any:
        return self.draw_rule(np.random.default_rng([self.seed, RULE_STREAM]))
