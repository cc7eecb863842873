"""Arrays as short text, for results that hold many small numbers."""

import base64
import zlib

import numpy as np


def packed(*arrays: np.ndarray) -> str:
    """Base64 of the zlib-compressed bytes of the arrays, one after another, little endian."""
    data = b"".join(_bytes(array) for array in arrays)
    return base64.b64encode(zlib.compress(data, 9)).decode()


def unpacked(text: str) -> bytes:
    """The bytes of ``packed``."""
    return zlib.decompress(base64.b64decode(text))


def _bytes(array: np.ndarray) -> bytes:
    return np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<")).tobytes()
