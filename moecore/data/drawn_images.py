"""Data sets of vectors that are drawn by a rule of theory and stored as grey images.

n images of S × S pixels, K classes, D kinds of which each image is one.
"""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from pydantic import Field

from moecore.data.card import SPLITS, Card
from moecore.data.layouts.images import SplitToWrite, write_images
from moecore.data.sources.base import Source
from moecore.tasks.classification import Classification

RULE = 0  # the stream of what all splits share; theirs follow
LICENCE = "none needed: drawn numbers"


class DrawnImages(NamedTuple):
    """Values (n, S, S), of which the grey images hold −1 to 1; labels and kinds from 0, (n,)."""

    values: np.ndarray
    labels: np.ndarray
    kinds: np.ndarray


class DrawnSource(Source, ABC):
    """Grey images 128 + 127·value, clipped; one more channel, unseen by models, says the kind."""

    task: ClassVar[type[Classification]] = Classification
    sided: ClassVar[bool] = True  # a mirrored vector is another one
    paper: ClassVar[str]

    train: int = Field(16000, ge=1, description="Number of images for training")
    validation: int = Field(4000, ge=1, description="Number of images for validation")
    test: int = Field(10000, ge=1, description="Number of images for the test")
    seed: int = Field(0, ge=0, description="Draws the rule and the images")

    @property
    @abstractmethod
    def title(self) -> str:
        """Return what the data is, in words."""

    @property
    @abstractmethod
    def side(self) -> int:
        """Pixels along each side of an image."""

    @property
    @abstractmethod
    def kinds(self) -> int:
        """Number of kinds D."""

    @property
    @abstractmethod
    def classes(self) -> tuple[str, ...]:
        """Return the names of the classes."""

    @abstractmethod
    def draw_rule(self, random: np.random.Generator) -> Any:
        """Return what all splits share; UserError where there is none of such settings."""

    @abstractmethod
    def draw_images(self, rule: Any, number: int, random: np.random.Generator) -> DrawnImages:
        """Return so many images."""

    def describe(self) -> Card:
        """Return what ``write`` would write; no image is drawn."""
        task = Classification(classes=self.classes)
        counts = {split: (getattr(self, split),) for split in SPLITS}
        card = Card(
            self.title, 1, self.side, task, LICENCE, self.paper, counts=counts, truth=self.kinds
        )

        def draw() -> dict[str, Any]:
            self._rule()
            return {}

        return card.complete_with(draw)

    def write(self, folder: Path) -> dict[str, Any]:
        """Write the prepared layout and return its card; UserError where no rule is possible."""
        rule = self._rule()
        parts = {}
        for stream, name in enumerate(SPLITS, RULE + 1):
            random = np.random.default_rng([self.seed, stream])
            drawn = self.draw_images(rule, getattr(self, name), random)
            grey = np.rint(128 + 127 * drawn.values.clip(-1, 1))
            truth = np.broadcast_to(drawn.kinds[:, None, None] + 1, grey.shape)
            images = np.stack([grey, truth], axis=1).astype(np.uint8)
            parts[name] = SplitToWrite(drawn.labels, [images])
        return write_images(folder, self, self.describe(), parts)

    def _rule(self) -> Any:
        return self.draw_rule(np.random.default_rng([self.seed, RULE]))
