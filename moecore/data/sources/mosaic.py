"""Images with several labels: mosaics of another source's images, a substitute for JFT."""

import shutil
from abc import abstractmethod
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from moecore.core.files import UserError
from moecore.data.card import SPLITS, Card
from moecore.data.layouts.images import SplitToWrite, write_images
from moecore.data.prepared import Prepared, Split
from moecore.data.sources import base, digits, fashion_mnist
from moecore.tasks.multi_label import MultiLabel

CHUNK = 4096
STREAM = 4  # first random stream; lower ones belong to splits and few_shot
CellSource = Annotated[
    fashion_mnist.FashionMnist | digits.Digits,
    Field(discriminator="kind", description="Source of the cells; its splits stay separate"),
]


class CombinedImageSource(base.Source):
    """Base class of sources that combine images of another source, within each of its splits."""

    source: CellSource

    @abstractmethod
    def write_from(self, source: Prepared, folder: Path) -> dict[str, Any]:
        """Write arrays and card.json from the images of ``source``; return card.json's content."""

    def write(self, folder: Path) -> dict[str, Any]:
        scratch = folder / ".source"
        self.source.write(scratch)
        card = self.write_from(Prepared.open(scratch), folder)
        shutil.rmtree(scratch)
        return card


class Mosaic(CombinedImageSource):
    """Mosaics of ``grid`` × ``grid`` images of ``source``; labels are all classes that occur."""

    task: ClassVar[type[MultiLabel]] = MultiLabel

    kind: Literal["mosaic"] = "mosaic"
    grid: int = Field(2, ge=1, le=8, description="Cells along each side of a mosaic")
    train: int = Field(20000, ge=1, description="Number of mosaics for training")
    validation: int = Field(2000, ge=1, description="Number of mosaics for validation")
    test: int = Field(2000, ge=1, description="Number of mosaics for the test")
    seed: int = Field(0, ge=0, description="Draws the images of each mosaic")

    def describe(self) -> Card:
        source = self.source.describe()
        card = source._replace(
            name=f"{source.name}, mosaics of {self.grid}×{self.grid}",
            size=source.shape[0] * self.grid,
            task=MultiLabel(classes=source.classes or ()),
            counts={split: (getattr(self, split),) for split in SPLITS},
        )
        return card.add_check_problem(lambda: check_splits_fill_mosaic(source, self.grid**2))

    def write_from(self, source: Prepared, folder: Path) -> dict[str, Any]:
        classes = source.task.outputs
        parts = {name: self._part(getattr(source, name), name, classes) for name in SPLITS}
        return write_images(folder, self, self.describe(), parts)

    def _part(self, split: Split, name: str, classes: int) -> SplitToWrite:
        number = getattr(self, name)
        seed = [self.seed, STREAM + SPLITS.index(name)]
        cells = draw_mosaic_members(len(split.labels), number, self.grid**2, seed, name)
        images = np.asarray(split.images)
        chunks = (
            compose_mosaics(images[cells[start : start + CHUNK]], self.grid)
            for start in range(0, number, CHUNK)
        )
        return SplitToWrite(multi_hot_labels(split.labels[cells], classes), chunks)


def draw_mosaic_members(
    total: int, number: int, cells: int, seed: list[int], name: str = "split"
) -> np.ndarray:
    """Draw the indices, below ``total``, of each mosaic's images: int64 (number, cells)."""
    # Cut from random permutations: images are used equally often, and a larger number of mosaics
    # begins with the same ones.
    check_images_fill_mosaic(total, cells, name)
    random = np.random.default_rng(seed)
    per_order = total // cells
    orders = [
        random.permutation(total)[: per_order * cells].reshape(per_order, cells)
        for _ in range(-(-number // per_order))
    ]
    return np.concatenate(orders)[:number]


def check_splits_fill_mosaic(source: Card, cells: int) -> None:
    if source.problem is None:
        for split in SPLITS:
            check_images_fill_mosaic(source.image_counts[split], cells, split)


def check_images_fill_mosaic(total: int, cells: int, name: str) -> None:
    if total < cells:
        raise UserError(
            f"mosaic: a mosaic has {cells} cells, but {name} of the source has {total} images; "
            "allowed: a smaller grid, or more images"
        )


def compose_mosaics(images: np.ndarray, grid: int) -> np.ndarray:
    """Return mosaics (n, C, grid·h, grid·w) of images (n, grid², C, h, w), arranged row by row."""
    number, _, channels, height, width = images.shape
    cells = images.reshape(number, grid, grid, channels, height, width).transpose(0, 3, 1, 4, 2, 5)
    return cells.reshape(number, channels, grid * height, grid * width)


def multi_hot_labels(labels: np.ndarray, classes: int) -> np.ndarray:
    """Convert labels of cells (n, cells) to uint8 (n, K): 1 for every class that occurs."""
    hot = np.zeros((len(labels), classes), np.uint8)
    np.put_along_axis(hot, labels, 1, axis=1)
    return hot
