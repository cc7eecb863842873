"""Arrays on disk: checks of .npy files without loading them, and images kept as JPEG files."""

import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from tokenize import TokenError
from types import SimpleNamespace
from typing import Any

import numpy as np
from PIL import Image

from moecore.core.files import UserError, room_for
from moecore.data.files.decode import Unreadable, square, unpack_image
from moecore.data.workers import workers

AGAIN = "run the stage `prepare` again"


def check_array(path: Path, shape: tuple[int, ...], dtype: Any) -> None:
    """Raise UserError, naming the file, unless it is a whole .npy file with this shape and
    dtype.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file; run the stage `prepare` again")
    try:
        with open(path, "rb") as handle:
            if (version := np.lib.format.read_magic(handle)) != (1, 0):
                raise ValueError(f"version {version[0]}.{version[1]}, not 1.0")
            found, _, kind = np.lib.format.read_array_header_1_0(handle)
            expected = handle.tell() + math.prod(found) * kind.itemsize
    except (ValueError, TokenError, OverflowError, MemoryError, RecursionError) as error:
        why = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise UserError(
            f"{path}: not a whole .npy file ({path.stat().st_size} bytes: {why}); run the "
            "stage `prepare` again"
        ) from error
    if (size := path.stat().st_size) != expected:
        raise UserError(
            f"{path}: expected {expected} bytes, found {size}; run the stage `prepare` again"
        )
    if found != shape or kind != dtype:
        raise UserError(
            f"{path}: holds {kind} {found}; card.json says {np.dtype(dtype)} {shape}. Run the "
            "stage `prepare` again"
        )


def save_array(path: Path, values: np.ndarray) -> None:
    """``numpy.save`` to exactly this path; raises FullDisk where there is no room."""
    with room_for(path, values.nbytes), open(path, "wb") as file:
        # of a file, numpy writes through the C library, and its error does not say what is wrong
        plain: Any = SimpleNamespace(write=file.write)
        np.save(plain, values, allow_pickle=False)


def new_array(path: Path, dtype: Any, shape: tuple[int, ...], begun: bool = False) -> np.memmap:
    """A memory-mapped .npy file to fill; one that was begun goes on.

    Its space is taken now: of a sparse file, a full disk would kill the process where it is filled
    (SIGBUS). Raises FullDisk where there is none; nothing of a new file is left then.
    """
    size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    with room_for(path, size):
        try:
            mode = "r+" if begun else "w+"
            found = np.lib.format.open_memmap(path, mode=mode, dtype=dtype, shape=shape)
            _reserve(path)
        except OSError:
            if not begun:
                path.unlink(missing_ok=True)
            raise
    return found


def _reserve(path: Path) -> None:
    """Take the space of all of a file's bytes."""
    if hasattr(os, "posix_fallocate"):  # not on macOS
        with open(path, "r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)


def jpeg_files(split: str) -> list[str]:
    """Names of a split's JPEG files in one, of its offsets and of its heights and widths."""
    return [f"{split}_images.bin", f"{split}_offsets.npy", f"{split}_extents.npy"]


@dataclass(frozen=True)
class Jpegs:
    """N images kept as JPEG files in one file, each decoded when it is asked for.

    Looks like an array uint8 (N, C, S, S) of their centre squares; several indices give the same
    of fewer images, and nothing is decoded before ``numpy.asarray``. ``whole`` has all pixels.
    """

    path: Path
    content: np.ndarray  # uint8 (bytes,), memory-mapped
    places: np.ndarray  # int64 (N,): which of the file's images
    offsets: np.ndarray  # int64 (all + 1,): where each begins, and the last one ends
    extents: np.ndarray  # int64 (all, 2): height and width
    size: int  # S
    channels: int
    uneven: bool  # whether the images have different shapes
    dtype = np.dtype(np.uint8)
    ndim = 4

    @classmethod
    def open(cls, folder: Path, split: str, number: int, card: dict[str, Any]) -> "Jpegs":
        """Of a prepared folder. Raises UserError naming the file where its length is not what the
        offsets say.
        """
        path, offsets, extents = (folder / name for name in jpeg_files(split))
        check_array(offsets, (number + 1,), np.int64)
        check_array(extents, (number, 2), np.int64)
        starts = np.load(offsets, allow_pickle=False)
        expected = int(starts[-1])
        if not path.is_file():
            raise UserError(f"{path}: no such file; {AGAIN}")
        if (found := path.stat().st_size) != expected:
            raise UserError(f"{path}: expected {expected} bytes, found {found}; {AGAIN}")
        return cls(
            path,
            np.memmap(path, np.uint8, "r"),
            np.arange(number),
            starts,
            np.load(extents, allow_pickle=False),
            card["size"],
            card["channels"],
            card["jpeg"]["whole"],
        )

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of the array that they look like."""
        return (len(self.places), self.channels, self.size, self.size)

    @property
    def nbytes(self) -> int:
        """Of the array that they look like."""
        return int(np.prod(self.shape, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, key: Any) -> Any:
        """One centre square uint8 (C, S, S), or fewer images of the same kind."""
        if isinstance(key, (int, np.integer)):
            return self._square(self.places[key])
        return replace(self, places=self.places[key])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        squares = list(_threads(workers()).map(self._square, self.places))
        found = np.stack(squares) if squares else np.empty(self.shape, np.uint8)
        return found if dtype is None else found.astype(dtype, copy=False)

    def whole(self, rows: Sequence[int] | np.ndarray) -> list[np.ndarray]:
        """All pixels of the images at ``rows``, decoded in threads: uint8 (H, W, C) each.

        Raises UserError where one is damaged, naming the file and the image.
        """
        return list(_threads(workers()).map(self._pixels, self.places[rows]))

    def _pixels(self, place: int) -> np.ndarray:
        pixels = np.asarray(self._opened(place))
        return pixels.reshape(*pixels.shape[:2], self.channels)

    def _square(self, place: int) -> np.ndarray:
        return square(self._opened(place), self.size).transpose(2, 0, 1)

    def _opened(self, place: int) -> Image.Image:
        start, stop = self.offsets[place : place + 2]
        where = f"{self.path}: image {place} (bytes {start} to {stop})"
        try:
            image = unpack_image(self.content[start:stop].tobytes(), self.channels)
        except Unreadable as error:
            raise UserError(f"{where} cannot be decoded: {error}; {AGAIN}") from error
        if (image.height, image.width) != (said := tuple(self.extents[place].tolist())):
            found = f"has {image.height} × {image.width} pixels"
            raise UserError(f"{where} {found}, its extents say {said[0]} × {said[1]}; {AGAIN}")
        return image


@lru_cache(maxsize=1)
def _threads(number: int) -> ThreadPoolExecutor:
    """Threads that decode; kept, as every batch needs them."""
    return ThreadPoolExecutor(number, "jpeg")
