"""MNIST's IDX format: magic (0, 0, type, dimensions), big-endian sizes, values."""

import gzip
import hashlib
import zlib
from pathlib import Path

import numpy as np

from moecore.core.files import UserError

GZIP = b"\x1f\x8b"


def read_idx(path: Path, dimensions: int, sha256: str) -> np.ndarray:
    """Read a uint8 IDX file, plain or gzip, as an array with ``dimensions`` axes.

    sha256: of the *decompressed* content, so that a plain and a packed copy have the same one.
    Raises UserError naming the file where it cannot be read or its content is another one.
    """
    try:
        content = path.read_bytes()
        if content.startswith(GZIP):
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}: cannot be read ({error}); fetch the file again") from error
    if (digest := hashlib.sha256(content).hexdigest()) != sha256:
        raise UserError(
            f"{path}: its content has sha256 {digest}; the published file has {sha256}. Fetch the "
            "file again"
        )
    shape = np.frombuffer(content, ">u4", dimensions, 4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions).reshape(shape)
