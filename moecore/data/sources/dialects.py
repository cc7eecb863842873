"""Images in dialects: data for which routing matters, and the right route is known.

A dialect is a fixed change of images and a fixed permutation of the class names, so that what is
learned of one dialect does not help with another. Images are real, their combinations drawn. Each
change has ``apply``, from images (n, C, S, S) to images (n, C', S, S); it is invertible.

n images uint8 (n, C, S, S); d (n,) the dialect of each, 0 to D − 1; F families of dialects.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from pydantic import Field, ValidationInfo, field_validator

from moecore.core.files import UserError, format_found_and_allowed
from moecore.data.card import SPLITS, Card
from moecore.data.layouts.images import SplitToWrite, write_images
from moecore.data.prepared import Prepared, Split
from moecore.data.sources import mosaic
from moecore.tasks import class_task, classification
from moecore.tasks.cells import Cells

Change = Literal["permutation", "texture", "colour", "shifted_colour", "rotation", "frequency"]
STRENGTH = 0.35  # weight of a texture; the image has the rest
FREQUENCIES = (0.9, 1.6)  # of textures, radians per pixel
DIRECTION_COUNT = 8
CHUNK = 4096
STREAM = 8  # first random stream of the splits; lower ones belong to other sources
NAMES_STREAM = 11  # random stream of the permutations of names
MIN_ITEMS_PER_DIALECT = 50  # expected training images, or paragraphs, of every dialect


class PixelPermutation(NamedTuple):
    """A change: each dialect applies a different permutation to the pixels."""

    orders: np.ndarray  # int64 (D, S·S)

    @classmethod
    def draw(cls, number: int, size: int, seed: int) -> "PixelPermutation":
        random = np.random.default_rng([seed, size])
        return cls(np.stack([random.permutation(size * size) for _ in range(number)]))

    def apply(self, images: np.ndarray, dialects: np.ndarray) -> np.ndarray:
        flat = images.reshape(*images.shape[:2], -1)
        order = self.orders[dialects][:, None]
        return np.take_along_axis(flat, order, axis=2).reshape(images.shape)


class Texture(NamedTuple):
    """A change: each dialect blends the image with a different wave pattern."""

    waves: np.ndarray  # uint8 (D, S, S), already scaled

    @classmethod
    def draw(cls, number: int, size: int, seed: int) -> "Texture":
        row, column = np.mgrid[:size, :size]
        phases = np.random.default_rng([seed, size]).uniform(0, 2 * np.pi, number)
        kinds = np.arange(number)
        angles = kinds % DIRECTION_COUNT * np.pi / DIRECTION_COUNT
        lengths = np.array(FREQUENCIES)[kinds // DIRECTION_COUNT % len(FREQUENCIES)]
        along = np.stack([column * np.cos(angle) + row * np.sin(angle) for angle in angles])
        waves = 0.5 + 0.5 * np.sin(lengths[:, None, None] * along + phases[:, None, None])
        return cls(np.rint(255 * STRENGTH * waves).astype(np.uint8))

    def apply(self, images: np.ndarray, dialects: np.ndarray) -> np.ndarray:
        return np.rint((1 - STRENGTH) * images).astype(np.uint8) + self.waves[dialects][:, None]


class Colour(NamedTuple):
    """A change: each dialect tints grey images with one hue, in three channels."""

    hues: np.ndarray  # float64 (D, 3), each with a maximum of 1

    @classmethod
    def draw(cls, number: int, size: int, seed: int) -> "Colour":
        return cls(colours_of_hues(np.arange(number) / number))

    def apply(self, images: np.ndarray, dialects: np.ndarray) -> np.ndarray:
        return np.rint(images * self.hues[dialects][:, :, None, None]).astype(np.uint8)


class ShiftedHueColour(Colour):
    """A change: each dialect tints grey images with hues halfway between those of ``Colour``."""

    @classmethod
    def draw(cls, number: int, size: int, seed: int) -> "ShiftedHueColour":
        return cls(colours_of_hues((np.arange(number) + 0.5) / number))


def colours_of_hues(shares: np.ndarray) -> np.ndarray:
    """Convert hues (D,), as shares of a turn from red, to RGB colours (D, 3) with maximum 1."""
    hues = 0.5 + 0.5 * np.cos((shares * 2 * np.pi)[:, None] - np.arange(3) * 2 * np.pi / 3)
    return hues / hues.max(axis=1, keepdims=True)


class Rotation(NamedTuple):
    """A change: each dialect rotates by quarter turns; from the fifth on, greys are inverted."""

    @classmethod
    def draw(cls, number: int, size: int, seed: int) -> "Rotation":
        """Return the change, which has no parameters; it has 8 variants."""
        return cls()

    def apply(self, images: np.ndarray, dialects: np.ndarray) -> np.ndarray:
        turned = images.copy()
        for quarter in range(1, 4):
            chosen = dialects % 4 == quarter
            turned[chosen] = np.rot90(images[chosen], quarter, axes=(2, 3))
        return np.where((dialects >= 4)[:, None, None, None], 255 - turned, turned)


class WalshProduct(NamedTuple):
    """A change: each dialect multiplies pixels − 127.5 by a different Walsh function (±1)."""

    negative: np.ndarray  # bool (D, S, S), where the function is −1

    @classmethod
    def draw(cls, number: int, size: int, seed: int) -> "WalshProduct":
        # The Walsh coefficient of sequence k becomes that of k XOR the dialect's: the coarse bands,
        # which hold most of an image, move to the dialect's bands.
        bits = (size - 1).bit_length()
        functions = np.random.default_rng([seed, size]).choice(4**bits, number, replace=False)
        rows = functions[:, None] >> bits
        columns = functions[:, None] % 2**bits
        positions = np.arange(size)
        down, across = (np.bitwise_count(part & positions) % 2 == 1 for part in (rows, columns))
        return cls(down[:, :, None] ^ across[:, None])

    def apply(self, images: np.ndarray, dialects: np.ndarray) -> np.ndarray:
        return np.where(self.negative[dialects][:, None], 255 - images, images)


class SharedAndOwnChange(NamedTuple):
    """A change shared by a family of dialects; each dialect then permutes every second pixel."""

    shared: "DialectChange"  # of F families
    permutation: PixelPermutation  # of D dialects; the white fields of a chessboard stay
    members: int  # dialects per family, D / F

    @classmethod
    def draw(
        cls, shared: "DialectChange", families: int, number: int, size: int, seed: int
    ) -> "SharedAndOwnChange":
        """Return ``shared`` with a drawn permutation for each of ``number`` dialects."""
        random = np.random.default_rng([seed, size, 1])
        orders = np.tile(np.arange(size * size), (number, 1))
        black = np.flatnonzero(np.indices((size, size)).sum(axis=0) % 2)
        orders[:, black] = random.permuted(orders[:, black], axis=1)
        return cls(shared, PixelPermutation(orders), number // families)

    def apply(self, images: np.ndarray, dialects: np.ndarray) -> np.ndarray:
        return self.permutation.apply(self.shared.apply(images, dialects // self.members), dialects)


DialectChange = PixelPermutation | Texture | Colour | Rotation | WalshProduct | SharedAndOwnChange
CHANGES: dict[str, Any] = {
    "permutation": PixelPermutation,
    "texture": Texture,
    "colour": Colour,
    "shifted_colour": ShiftedHueColour,
    "rotation": Rotation,
    "frequency": WalshProduct,
}
MAX_HUES = 24
MAX_DIALECTS = {  # numbers of different dialects
    "texture": DIRECTION_COUNT * len(FREQUENCIES),
    "colour": MAX_HUES,
    "shifted_colour": MAX_HUES,
    "rotation": 8,
}


def draw_change(
    change: Change, number: int, size: int, seed: int, channels: int, families: int | None = None
) -> DialectChange:
    """Draw a change; UserError for too few variants, or if a colour change gets colour images."""
    kinds = families or number
    limits = {**MAX_DIALECTS, "frequency": 4 ** (size - 1).bit_length()}
    limit = limits.get(change, kinds)
    if kinds > limit:
        key = "families" if families else "dialects"
        raise UserError.at(key, found=kinds, allowed=f"at most {limit} of {change}")
    if is_colour_change(change) and channels != 1:
        of_images = f"{change}, of images of {channels} channels"
        raise UserError.at("change", found=of_images, allowed="grey")
    shared = CHANGES[change].draw(kinds, size, seed)
    if families is None:
        return shared
    return SharedAndOwnChange.draw(shared, families, number, size, seed)


def is_colour_change(change: Change) -> bool:
    return issubclass(CHANGES[change], Colour)


class Dialects(mosaic.CombinedImageSource):
    """Images of ``source``, each in one of D dialects: changed pixels, and a permutation of labels.

    ``mosaic``: ``grid`` × ``grid`` cells in separate dialects; a channel marks one cell, whose
    label is the mosaic's. ``cells``: without a mark, every cell has a label. An additional channel,
    which models do not see, has the dialect of every pixel.
    """

    task: ClassVar[type[classification.Classification]] = classification.Classification
    sided: ClassVar[bool] = True

    kind: Literal["dialects"] = "dialects"
    change: Change = Field("permutation", description="What a dialect does to an image")
    dialects: int = Field(12, ge=1, le=255, description="Number of dialects D")
    families: int | None = Field(
        None,
        ge=1,
        description="Number of families F of D / F dialects with adjacent numbers, which share "
        "names, a change, and half of the pixels' places; null: dialects share nothing",
    )
    form: Literal["image", "mosaic", "cells"] = Field(
        "image", description="One image; a mosaic with one marked cell, or with a label per cell"
    )
    grid: int = Field(2, ge=1, le=8, description="Cells along each side of a mosaic")
    zipf: float = Field(0.0, ge=0, description="Dialect n occurs ∝ n^−zipf; 0: equally often")
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
            raise ValueError(format_found_and_allowed(found=families, allowed=allowed))
        return families

    @property
    def labels_task(self) -> type[class_task.ClassTask]:
        return Cells if self.form == "cells" else classification.Classification

    @property
    def cells_per_side(self) -> int:
        """Number of the source's images along each side of an image."""
        return 1 if self.form == "image" else self.grid

    @property
    def cells(self) -> int:
        """Number of the source's images in one image."""
        return self.cells_per_side**2

    @property
    def title(self) -> str:
        """Title of the data, without the source's name."""
        form = f", mosaics of {self.grid}×{self.grid}" if self.cells_per_side > 1 else ""
        families = f" of {self.families} families" if self.families else ""
        return f"in {self.dialects} dialects{families} ({self.change}){form}"

    def describe(self) -> Card:
        source = self.source.describe()
        classes = source.classes or ()
        task: class_task.ClassTask = classification.Classification(classes=classes)
        if self.form == "cells":
            task = Cells(classes=classes, grid=self.grid)
        card = source._replace(
            name=f"{source.name} {self.title}",
            channels=(3 if is_colour_change(self.change) else source.channels)
            + (self.form == "mosaic"),
            size=source.shape[0] * self.cells_per_side,
            task=task,
            counts={},
            truth=self.dialects,
        )

        def count() -> dict[str, Any]:
            if source.problem is not None:
                return {}
            self._dialects(source.channels, source.shape[0], len(classes))
            mosaic.check_splits_fill_mosaic(source, self.cells)
            return {"counts": {split: (getattr(self, split),) for split in SPLITS}}

        return card.fill_or_set_problem(count)

    def write_from(self, source: Prepared, folder: Path) -> dict[str, Any]:
        card = source.card
        change, names = self._dialects(card["channels"], card["size"], source.task.outputs)
        parts = {name: self._part(getattr(source, name), name, change, names) for name in SPLITS}
        return write_images(folder, self, self.describe(), parts)

    def _dialects(self, channels: int, size: int, classes: int) -> tuple[DialectChange, np.ndarray]:
        """Draw the dialects' change, and the label of each class in each dialect, int64 (D, K)."""
        shares = zipf_shares(self.dialects, self.zipf)
        check_rarest_dialect(self.zipf, shares, self.train * self.cells)
        change = draw_change(self.change, self.dialects, size, self.seed, channels, self.families)
        random = np.random.default_rng([self.seed, NAMES_STREAM])
        families = self.families or self.dialects
        names = np.stack([random.permutation(classes) for _ in range(families)])
        return change, names.repeat(self.dialects // families, axis=0)

    def _part(
        self, split: Split, name: str, change: DialectChange, names: np.ndarray
    ) -> SplitToWrite:
        number = getattr(self, name)
        seed = [self.seed, STREAM + SPLITS.index(name)]
        cells = mosaic.draw_mosaic_members(len(split.labels), number, self.cells, seed, name)
        random = np.random.default_rng([*seed, 1])
        shares = zipf_shares(self.dialects, self.zipf)
        dialects = random.choice(self.dialects, size=cells.shape, p=shares)
        marked = random.integers(self.cells, size=number)
        labels = names[dialects, split.labels[cells]]
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
        """Yield chunks uint8 (n, C, H, W); channels: pixels, mark of a cell, dialect from 1."""
        for start in range(0, len(cells), CHUNK):
            part = slice(start, start + CHUNK)
            dialect_of_cell = dialects[part].reshape(-1)
            plain = images[cells[part]].reshape(-1, *images.shape[1:])
            pixels = change.apply(plain, dialect_of_cell)
            constants = [dialect_of_cell + 1]
            if self.form == "mosaic":
                constants.insert(0, 255 * (np.arange(self.cells) == marked[part, None]).reshape(-1))
            planes = np.stack(constants, axis=1)[:, :, None, None].astype(np.uint8)
            planes = np.broadcast_to(planes, (*planes.shape[:2], *pixels.shape[2:]))
            stacked = np.concatenate([pixels, planes], axis=1)
            stacked = stacked.reshape(-1, self.cells, *stacked.shape[1:])
            yield mosaic.compose_mosaics(stacked, self.cells_per_side)


def zipf_shares(dialects: int, zipf: float) -> np.ndarray:
    """Return the shares of D dialects, (D,): ∝ n^−zipf for n = 1 … D, with sum 1."""
    weights = np.arange(1.0, dialects + 1) ** -zipf
    return weights / weights.sum()


def check_rarest_dialect(zipf: float, shares: np.ndarray, items: int) -> None:
    expected = shares[-1] * items
    if expected < MIN_ITEMS_PER_DIALECT:
        raise UserError.at(
            "zipf",
            found=f"{zipf}, which leaves about {expected:.0f} of the last dialect in training",
            allowed=f"{MIN_ITEMS_PER_DIALECT} or more of each",
        )
