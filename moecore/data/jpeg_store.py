"""Images kept whole, as JPEG files in one file, each decoded when it is asked for."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from moecore.core.files import UserError
from moecore.data.files.decode import UnreadableImage, decode_jpeg_to_pil, resize_centre_square
from moecore.data.stored_arrays import PREPARE_AGAIN, open_array
from moecore.data.thread_map import thread_count


def jpeg_store_file_names(split: str) -> list[str]:
    """Return the names of a split's JPEG files in one, and of its offsets."""
    return [f"{split}_images.bin", f"{split}_offsets.npy"]


@dataclass(frozen=True)
class JpegImages:
    """N images of different shapes, kept as JPEG files in one file.

    Looks like an array uint8 (N, C, S, S) of their centre squares; several indices give the same
    of fewer images, and nothing is decoded before ``numpy.asarray``. ``whole`` has all pixels.
    """

    path: Path
    content: np.ndarray  # uint8 (bytes,), memory-mapped
    places: np.ndarray  # int64 (N,): which of the file's images
    offsets: np.ndarray  # int64 (all + 1,): where each begins, and the last one ends
    size: int  # S
    channels: int
    dtype = np.dtype(np.uint8)
    ndim = 4

    @classmethod
    def open(cls, folder: Path, split: str, number: int, card: dict[str, Any]) -> "JpegImages":
        """Open those of a prepared folder; UserError where a length is not what offsets say."""
        path, offsets = (folder / name for name in jpeg_store_file_names(split))
        starts = np.array(open_array(offsets, (number + 1,), np.int64))
        size = path.stat().st_size if path.is_file() else 0
        if size != starts[-1]:
            raise UserError(f"{path}: expected {starts[-1]} bytes, found {size}; {PREPARE_AGAIN}")
        content = np.memmap(path, np.uint8, "r")
        return cls(path, content, np.arange(number), starts, card["size"], card["channels"])

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of the array that they look like."""
        return (len(self.places), self.channels, self.size, self.size)

    @property
    def nbytes(self) -> int:
        """Bytes of the array that they look like."""
        return int(np.prod(self.shape, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, key: Any) -> Any:
        """One centre square uint8 (C, S, S), or fewer images of the same kind."""
        if isinstance(key, (int, np.integer)):
            return self._square(self.places[key])
        return replace(self, places=self.places[key])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        squares = list(_decoding_threads(thread_count()).map(self._square, self.places))
        array = np.stack(squares) if squares else np.empty(self.shape, np.uint8)
        return array if dtype is None else array.astype(dtype, copy=False)

    def whole(self, rows: Sequence[int] | np.ndarray) -> list[np.ndarray]:
        """All pixels of the images at ``rows``, decoded in threads: uint8 (H, W, C) each.

        Raises UserError where one is damaged, naming the file and the image.
        """
        return list(_decoding_threads(thread_count()).map(self._pixels, self.places[rows]))

    def _pixels(self, place: int) -> np.ndarray:
        pixels = np.asarray(self._open_picture(place))
        return pixels.reshape(*pixels.shape[:2], self.channels)

    def _square(self, place: int) -> np.ndarray:
        return resize_centre_square(self._open_picture(place), self.size).transpose(2, 0, 1)

    def _open_picture(self, place: int) -> Image.Image:
        start, stop = self.offsets[place : place + 2]
        where = f"{self.path}: image {place} (bytes {start} to {stop})"
        try:
            image = decode_jpeg_to_pil(self.content[start:stop].tobytes(), self.channels)
        except UnreadableImage as error:
            raise UserError(f"{where} cannot be decoded: {error}; {PREPARE_AGAIN}") from error
        return image


@lru_cache(maxsize=1)
def _decoding_threads(number: int) -> ThreadPoolExecutor:
    """Threads that decode; kept, as every batch needs them."""
    return ThreadPoolExecutor(number, "jpeg")
