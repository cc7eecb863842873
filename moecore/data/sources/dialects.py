"""Images in dialects: data on which it matters who routes, and the right answer is known.

A dialect is a fixed change of an image and a fixed exchange of the classes' names, so that what is
learned of one says nothing of another. The images are real, the combinations are drawn.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field, ValidationInfo, field_validator

from moecore.core.files import UserError
from moecore.data.prepared import SPLITS, Prepared, Split
from moecore.data.sources.base import PlannedData, Source
from moecore.data.sources.dialects import Change, DialectChange, draw_change, has_colours
from moecore.data.sources.mosaic import (
    CellSource,
    check_images_fill_mosaic,
    compose_mosaics,
    draw_mosaic_members,
)
from moecore.data.writer import DatasetInfo, SplitToWrite, write_prepared
from moecore.tasks.cells import Cells
from moecore.tasks.class_task import ClassTask
from moecore.tasks.classification import Classification

CHUNK = 4096
STREAM = 8  # of the splits' random streams; those below are other sources'
NAMES = 11  # the stream of the exchanges of names
LEAST = 50  # training images, or paragraphs, of a dialect


class Dialects(Source):
    """Images of ``source``, each in one of D dialects; the label is what its dialect calls it.

    ``mosaic``: ``grid`` × ``grid`` cells, each in a dialect of its own; one is marked in a channel
    of its own, and its label is the mosaic's. ``cells``: the same without a mark, and every cell
    has its label. One more channel, which no model sees, says the dialect of every pixel.
    """

    task: ClassVar[type[Classification]] = Classification  # of the labels that ``prepare`` writes
    sided: ClassVar[bool] = True

    kind: Literal["dialects"] = "dialects"
    source: CellSource
    change: Change = Field("permutation", description="What a dialect does to an image")
    dialects: int = Field(12, ge=1, le=255, description="Number of dialects D")
    families: int | None = Field(
        None,
        ge=1,
        description="Number of families F, each of D / F dialects with adjacent numbers, which "
        "share names, a change, and half of the pixels' places; null: dialects share nothing",
    )
    form: Literal["image", "mosaic", "cells"] = Field(
        "image", description="One image; a mosaic with one marked cell; a label for every cell"
    )
    grid: int = Field(2, ge=1, le=8, description="Cells along each side of a mosaic")
    zipf: float = Field(
        0.0, ge=0, description="Dialect n occurs in proportion to n to the power of −this; 0: alike"
    )
    train: int = Field(60000, ge=1, description="Number of images for training")
    validation: int = Field(5000, ge=1, description="Number of images for validation")
    test: int = Field(10000, ge=1, description="Number of images for the test")
    seed: int = Field(0, ge=0, description="Draws dialects and combinations")

    @field_validator("families")
    @classmethod
    def _check_families(cls, families: int | None, settings: ValidationInfo) -> int | None:
        number = settings.data.get("dialects", families)
        if families and number % families:
            divisors = [str(part) for part in range(1, number + 1) if number % part == 0]
            allowed = f"null, or of {number} dialects {', '.join(divisors)}"
            raise ValueError(f"found {families}; allowed: {allowed}")
        return families

    @property
    def labels_task(self) -> type[ClassTask]:
        """Return the task of one label an image, or of one a cell."""
        return Cells if self.form == "cells" else Classification

    @property
    def side(self) -> int:
        """Images of the source along each side of an image."""
        return 1 if self.form == "image" else self.grid

    @property
    def cells(self) -> int:
        """Images of the source in one image."""
        return self.side**2

    @property
    def shares(self) -> np.ndarray:
        """Return ``zipf_shares`` of its dialects."""
        return zipf_shares(self.dialects, self.zipf)

    @property
    def title(self) -> str:
        """Return what the data is, in words, without the source's name."""
        form = f", mosaics of {self.grid}×{self.grid}" if self.side > 1 else ""
        families = f" of {self.families} families" if self.families else ""
        return f"in {self.dialects} dialects{families} ({self.change}){form}"

    def prepare(self, folder: Path) -> dict[str, Any]:
        """Write the prepared layout and return its card; UserError where the source lacks."""
        scratch = Path(folder) / ".source"
        self.source.prepare(scratch)
        source = Prepared.open(scratch)
        card = source.card
        change, words = self._vocabulary(card["channels"], card["size"], source.task.outputs)
        facts = DatasetInfo(
            f"{card['name']} {self.title}",
            self._task(source.task.classes),
            self._channels(card["channels"]),
            card["size"] * self.side,
            card["licence"],
            card["source"],
            self,
            truth=self.dialects,
        )
        parts = {name: self._part(getattr(source, name), name, change, words) for name in SPLITS}
        written = write_prepared(folder, facts, parts)
        shutil.rmtree(scratch)
        return written

    def preview(self) -> PlannedData:
        """Return what ``prepare`` would write, from what the source says of itself."""
        source = self.source.preview()
        classes = source.classes or ()
        known = source._replace(
            name=f"{source.name} {self.title}",
            channels=self._channels(source.channels),
            size=source.shape[0] * self.side,
            task=self._task(classes),
            counts={},
            truth=self.dialects,
        )
        if source.problem:
            return known
        return known.complete_with(lambda: self._expected(source))

    def _expected(self, source: PlannedData) -> dict[str, Any]:
        """Return how many images there will be; UserError where ``prepare`` would raise it."""
        self._vocabulary(source.channels, source.shape[0], len(source.classes or ()))
        for split in SPLITS:
            check_images_fill_mosaic(source.images[split], self.cells, split)
        return {"counts": {split: (getattr(self, split),) for split in SPLITS}}

    def _task(self, classes: tuple[str, ...]) -> ClassTask:
        if self.form == "cells":
            return Cells(classes=classes, grid=self.grid)
        return Classification(classes=classes)

    def _channels(self, channels: int) -> int:
        """Return how many channels a model sees of images that have so many."""
        return (3 if has_colours(self.change) else channels) + (self.form == "mosaic")

    def _vocabulary(
        self, channels: int, size: int, classes: int
    ) -> tuple[DialectChange, np.ndarray]:
        """Return what dialects do, and what each calls each class, int64 (D, K).

        Raises UserError where there are too many dialects, or too few images of one.
        """
        check_rarest_dialect(self.zipf, self.shares, self.train * self.cells)
        kinds = (self.dialects, size, self.seed, channels, self.families)
        change = draw_change(self.change, *kinds)
        random = np.random.default_rng([self.seed, NAMES])
        families = self.families or self.dialects
        words = np.stack([random.permutation(classes) for _ in range(families)])
        return change, words.repeat(self.dialects // families, axis=0)

    def _part(
        self, split: Split, name: str, change: DialectChange, words: np.ndarray
    ) -> SplitToWrite:
        number = getattr(self, name)
        seed = [self.seed, STREAM + SPLITS.index(name)]
        cells = draw_mosaic_members(len(split.labels), number, self.cells, seed, name)
        random = np.random.default_rng([*seed, 1])
        dialects = random.choice(self.dialects, size=cells.shape, p=self.shares)
        marked = random.integers(self.cells, size=number)
        labels = words[dialects, split.labels[cells]]
        if self.form != "cells":
            labels = labels[np.arange(number), marked]
        images = np.asarray(split.images)
        return SplitToWrite(labels, self._chunks(images, cells, dialects, marked, change))

    def _chunks(
        self,
        images: np.ndarray,
        cells: np.ndarray,
        dialects: np.ndarray,
        marked: np.ndarray,
        change: DialectChange,
    ) -> Iterator[np.ndarray]:
        """Yield the images: seen channels, the mark of a mosaic's cell, the truth."""
        for start in range(0, len(cells), CHUNK):
            part = slice(start, start + CHUNK)
            spoken = dialects[part].reshape(-1)
            seen = change.apply(images[cells[part]].reshape(-1, *images.shape[1:]), spoken)
            constant = [spoken + 1]
            if self.form == "mosaic":
                constant.insert(0, 255 * (np.arange(self.cells) == marked[part, None]).reshape(-1))
            planes = np.stack(constant, axis=1)[:, :, None, None].astype(np.uint8)
            planes = np.broadcast_to(planes, (*planes.shape[:2], *seen.shape[2:]))
            whole = np.concatenate([seen, planes], axis=1)
            yield compose_mosaics(whole.reshape(-1, self.cells, *whole.shape[1:]), self.side)


def zipf_shares(dialects: int, zipf: float) -> np.ndarray:
    """Return how often each dialect occurs, (D,), which add up to 1: n to the power of −zipf."""
    weights = np.arange(1.0, dialects + 1) ** -zipf
    return weights / weights.sum()


def check_rarest_dialect(zipf: float, shares: np.ndarray, items: int) -> None:
    """Raise UserError where fewer than LEAST of so many training items are of the last dialect."""
    fewest = shares[-1] * items
    if fewest < LEAST:
        problem = f"found {zipf}, which leaves about {fewest:.0f} of the last dialect"
        raise UserError(f"zipf: {problem} in training; allowed: {LEAST} or more of each")
