"""MNIST's IDX format: magic (0, 0, type, dimensions), big-endian sizes, values."""

import gzip
import hashlib
import zlib
from pathlib import Path

import numpy as np

from moecore.core.files import UserError

GZIP = b"\x1f\x8b"
MAX_BYTES = 2**26  # unpacked; the largest published file has 47 million


def read_idx(path: Path, dimensions: int, sha256: str) -> np.ndarray:
    """Read a uint8 IDX file, plain or gzip, as an array with ``dimensions`` axes.

    sha256: of the *decompressed* content, so that a plain and a packed copy have the same one.
    Raises UserError naming the file where it cannot be read or its content is another one.
    """
    try:
        with open(path, "rb") as file:
            is_packed = file.read(2) == GZIP
            file.seek(0)
            content = (gzip.GzipFile(fileobj=file) if is_packed else file).read(MAX_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}: cannot be read ({error}); fetch the file again") from error
    if len(content) > MAX_BYTES:
        raise UserError(f"{path}: found more than {MAX_BYTES:,} bytes; fetch the file again")
    if (digest := hashlib.sha256(content).hexdigest()) != sha256:
        raise UserError(
            f"{path}: its content has sha256 {digest}; the published file has {sha256}. Fetch the "
            "file again"
        )
    shape = np.frombuffer(content, ">u4", dimensions, 4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions).reshape(shape)
