"""The IDX format of MNIST and its kin: magic (0, 0, type, dimensions), big-endian sizes, then the
values.
"""

import gzip
import hashlib
import math
import zlib
from pathlib import Path

import numpy as np

from moecore.core.files import UserError

UBYTE = 0x08
GZIP = b"\x1f\x8b"
BLOCK = 1 << 20  # bytes that are read at a time: no more is taken than there is


def read_idx(path: str | Path, dimensions: int, sha256: str | None = None) -> np.ndarray:
    """Read a uint8 IDX file, plain or gzip (told by its first bytes), as an array with
    ``dimensions`` axes.

    sha256: of the *decompressed* content, so that a plain and a packed copy have the same one.
    Raises UserError naming the file, what was found and what is allowed: missing or damaged file,
    other magic or dimensions, other length than the header promises, other checksum.
    """
    shape = idx_shape(path, dimensions)
    offset = 4 + 4 * dimensions
    expected = offset + math.prod(shape)
    content = _read(Path(path), expected + 1)  # one more: what is longer is noticed, and not read
    if len(content) != expected:
        found = f"{len(content)}" if len(content) < expected else "more"
        raise UserError(
            f"{path}: expected {expected} bytes (sizes {shape} in its header), found {found}; "
            "fetch the file again"
        )
    if sha256 is not None and (found := hashlib.sha256(content).hexdigest()) != sha256:
        raise UserError(
            f"{path}: its content has sha256 {found}; the published file has {sha256}. Fetch the "
            "file again"
        )
    return np.frombuffer(content, np.uint8, offset=offset).reshape(shape)


def idx_shape(path: str | Path, dimensions: int) -> tuple[int, ...]:
    """The sizes that an IDX file, plain or gzip, promises in its header; its values are not read.

    Raises UserError as ``read_idx`` does for a file that is missing or has another header.
    """
    return _shape(Path(path), _read(Path(path), 4 + 4 * dimensions), dimensions)


def _read(path: Path, most: int) -> bytes:
    """The first ``most`` bytes of what a file holds, unpacked: a small one may unpack to all of
    the memory.
    """
    found = bytearray()
    try:
        with open(path, "rb") as handle:
            packed = handle.read(2) == GZIP
        with gzip.open(path) if packed else open(path, "rb") as handle:
            while block := handle.read(min(BLOCK, most - len(found))):
                found += block
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(
            f"{path}: damaged or truncated gzip file of {path.stat().st_size} bytes ({error}); "
            "fetch the file again"
        ) from error
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise UserError(f"{path}: cannot be read, {why}") from None
    return bytes(found)


def _shape(path: Path, content: bytes, dimensions: int) -> tuple[int, ...]:
    allowed = bytes((0, 0, UBYTE, dimensions))
    if content[:4] != allowed:
        found = content[:4].hex(" ") or "nothing"
        raise UserError(
            f"{path}: starts with {found}; allowed: {allowed.hex(' ')} (IDX, uint8, {dimensions} "
            "dimensions)"
        )
    if len(content) < 4 + 4 * dimensions:
        raise UserError(
            f"{path}: expected a header of {4 + 4 * dimensions} bytes, found {len(content)}; "
            "fetch the file again"
        )
    return tuple(int(n) for n in np.frombuffer(content, ">u4", dimensions, 4))
