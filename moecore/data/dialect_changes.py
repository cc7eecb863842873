"""Dialects: fixed changes of images, each known by its number, that a model must learn one by one.

n images uint8 (n, C, S, S); d (n,) the dialect of each, 0 to D − 1; F families, each of as many
dialects with adjacent numbers. A function of the seed.
"""

from typing import Literal, NamedTuple, Protocol

import numpy as np

from moecore.core.files import UserError

Change = Literal["permutation", "texture", "colour", "shifted_colour", "rotation", "frequency"]
STRENGTH = 0.35  # of a texture, against the image's
WAVES = (0.9, 1.6)  # of textures, radians per pixel
DIRECTIONS = 8


class DialectChange(Protocol):
    """What a dialect does to an image, and how it is undone."""

    def apply(self, images: np.ndarray, dialects: np.ndarray) -> np.ndarray:
        """Return images uint8 (n, C', S, S) of their dialects."""
        ...

    def undo(self, images: np.ndarray, dialects: np.ndarray) -> np.ndarray:
        """Return the images (n, C, S, S) that ``apply`` was given."""
        ...


class Permutation(NamedTuple):
    """Each dialect has its own order of the pixels."""

    orders: np.ndarray  # int64 (D, S·S)

    @classmethod
    def draw(cls, number: int, size: int, seed: int) -> "Permutation":
        """Return the orders of so many dialects."""
        random = np.random.default_rng([seed, size])
        return cls(np.stack([random.permutation(size * size) for _ in range(number)]))

    def apply(self, images: np.ndarray, dialects: np.ndarray) -> np.ndarray:
        return _take_pixels(images, self.orders[dialects])

    def undo(self, images: np.ndarray, dialects: np.ndarray) -> np.ndarray:
        return _take_pixels(images, self.orders.argsort(axis=1)[dialects])


class Texture(NamedTuple):
    """Each dialect lays its own waves over the image, which becomes fainter."""

    waves: np.ndarray  # uint8 (D, S, S), at their strength

    @classmethod
    def draw(cls, number: int, size: int, seed: int) -> "Texture":
        """Return the textures of so many dialects: directions, then lengths, then phases differ."""
        row, column = np.mgrid[:size, :size]
        phases = np.random.default_rng([seed, size]).uniform(0, 2 * np.pi, number)
        kinds = np.arange(number)
        angles = kinds % DIRECTIONS * np.pi / DIRECTIONS
        lengths = np.array(WAVES)[kinds // DIRECTIONS % len(WAVES)]
        along = np.stack([column * np.cos(angle) + row * np.sin(angle) for angle in angles])
        waves = 0.5 + 0.5 * np.sin(lengths[:, None, None] * along + phases[:, None, None])
        return cls(np.rint(255 * STRENGTH * waves).astype(np.uint8))

    def apply(self, images: np.ndarray, dialects: np.ndarray) -> np.ndarray:
        faint = np.rint((1 - STRENGTH) * images).astype(np.uint8)
        return faint + self.waves[dialects][:, None]

    def undo(self, images: np.ndarray, dialects: np.ndarray) -> np.ndarray:
        faint = images - self.waves[dialects][:, None]
        return np.rint(faint / (1 - STRENGTH)).astype(np.uint8)


class Colour(NamedTuple):
    """Each dialect paints grey images in a hue of its own, in three channels."""

    hues: np.ndarray  # float64 (D, 3), of which the largest is 1

    @classmethod
    def draw(cls, number: int, size: int, seed: int) -> "Colour":
        """Return hues that lie equally far from each other on the colour circle."""
        return cls(colours_of_hues(np.arange(number) / number))

    def apply(self, images: np.ndarray, dialects: np.ndarray) -> np.ndarray:
        return np.rint(images * self.hues[dialects][:, :, None, None]).astype(np.uint8)

    def undo(self, images: np.ndarray, dialects: np.ndarray) -> np.ndarray:
        return images.max(axis=1, keepdims=True)


class ShiftedColour(Colour):
    """The same with other hues: each lies halfway between two of ``colour``."""

    @classmethod
    def draw(cls, number: int, size: int, seed: int) -> "ShiftedColour":
        """Return hues that lie equally far from each other on the colour circle."""
        return cls(colours_of_hues((np.arange(number) + 0.5) / number))


def colours_of_hues(shares: np.ndarray) -> np.ndarray:
    """Return the hues (D, 3) at shares (D,) of a turn from red; the largest of each is 1."""
    thirds = np.arange(3) * 2 * np.pi / 3
    hues = 0.5 + 0.5 * np.cos((shares * 2 * np.pi)[:, None] - thirds)
    return hues / hues.max(axis=1, keepdims=True)


class Rotation(NamedTuple):
    """Each dialect turns the image by quarters; from the fifth on it also inverts the greys."""

    @classmethod
    def draw(cls, number: int, size: int, seed: int) -> "Rotation":
        """Return the change of at most 8 dialects."""
        return cls()

    def apply(self, images: np.ndarray, dialects: np.ndarray) -> np.ndarray:
        return _invert(_turn(images, dialects % 4), dialects >= 4)

    def undo(self, images: np.ndarray, dialects: np.ndarray) -> np.ndarray:
        return _turn(_invert(images, dialects >= 4), -dialects % 4)


class WalshProduct(NamedTuple):
    """Each dialect multiplies the image by a Walsh function of its own, 127.5 counted as 0.

    So the image's Walsh coefficient of sequence k becomes that of k XOR the dialect's own: the
    coarse bands, in which most of an image lies, are exchanged for the dialect's.
    """

    negative: np.ndarray  # bool (D, S, S), where the function is −1

    @classmethod
    def draw(cls, number: int, size: int, seed: int) -> "WalshProduct":
        """Return the functions of so many dialects, no two alike."""
        bits = (size - 1).bit_length()
        random = np.random.default_rng([seed, size])
        functions = random.choice(4**bits, number, replace=False)
        rows, columns = functions[:, None] >> bits, functions[:, None] % 2**bits
        place = np.arange(size)
        down, across = (np.bitwise_count(part & place) % 2 == 1 for part in (rows, columns))
        return cls(down[:, :, None] ^ across[:, None])

    def apply(self, images: np.ndarray, dialects: np.ndarray) -> np.ndarray:
        return np.where(self.negative[dialects][:, None], 255 - images, images)

    def undo(self, images: np.ndarray, dialects: np.ndarray) -> np.ndarray:
        return self.apply(images, dialects)


class FamilyChange(NamedTuple):
    """Each family shares a change; each dialect then has its own order of every other pixel."""

    shared: DialectChange  # of F
    own: Permutation  # of D; the white fields of a chessboard stay
    members: int  # D / F

    @classmethod
    def draw(
        cls, shared: DialectChange, families: int, number: int, size: int, seed: int
    ) -> "FamilyChange":
        """Return the orders of so many dialects beside what their families share."""
        random = np.random.default_rng([seed, size, 1])
        orders = np.tile(np.arange(size * size), (number, 1))
        black = np.flatnonzero(np.indices((size, size)).sum(axis=0) % 2)
        orders[:, black] = random.permuted(orders[:, black], axis=1)
        return cls(shared, Permutation(orders), number // families)

    def apply(self, images: np.ndarray, dialects: np.ndarray) -> np.ndarray:
        return self.own.apply(self.shared.apply(images, dialects // self.members), dialects)

    def undo(self, images: np.ndarray, dialects: np.ndarray) -> np.ndarray:
        return self.shared.undo(self.own.undo(images, dialects), dialects // self.members)


CHANGES = {
    "permutation": Permutation,
    "texture": Texture,
    "colour": Colour,
    "shifted_colour": ShiftedColour,
    "rotation": Rotation,
    "frequency": WalshProduct,
}
HUES = 24
MOST = {  # dialects that differ
    "texture": DIRECTIONS * len(WAVES),
    "colour": HUES,
    "shifted_colour": HUES,
    "rotation": 8,
}


def draw_change(
    change: Change, number: int, size: int, seed: int, channels: int, families: int | None = None
) -> DialectChange:
    """Return what so many dialects do to images of ``size``² pixels; families: F, a divisor.

    Raises UserError for more changes than there are, and for colours of images that have some.
    """
    kinds = families or number
    most = {**MOST, "frequency": 4 ** (size - 1).bit_length()}.get(change, kinds)
    if kinds > most:
        key = "families" if families else "dialects"
        raise UserError(f"{key}: found {kinds}; allowed: at most {most} of {change}")
    if has_colours(change) and channels != 1:
        raise UserError(f"change: found {change}, of images of {channels} channels; allowed: grey")
    drawn = CHANGES[change].draw(kinds, size, seed)
    return FamilyChange.draw(drawn, families, number, size, seed) if families else drawn


def has_colours(change: Change) -> bool:
    """Return whether the change makes three channels of one."""
    return issubclass(CHANGES[change], Colour)


def _take_pixels(images: np.ndarray, order: np.ndarray) -> np.ndarray:
    flat = images.reshape(*images.shape[:2], -1)
    return np.take_along_axis(flat, order[:, None], axis=2).reshape(images.shape)


def _turn(images: np.ndarray, quarters: np.ndarray) -> np.ndarray:
    out = images.copy()
    for quarter in range(1, 4):
        out[quarters == quarter] = np.rot90(images[quarters == quarter], quarter, axes=(2, 3))
    return out


def _invert(images: np.ndarray, which: np.ndarray) -> np.ndarray:
    return np.where(which[:, None, None, None], 255 - images, images)
