"""The IDX format of MNIST and its kin: magic (0, 0, type, dimensions), big-endian sizes, then the
values.
"""

import gzip
import hashlib
import zlib
from pathlib import Path

import numpy as np

from moecore.core.files import UserError

UBYTE = 0x08
GZIP = b"\x1f\x8b"


def read_idx(path: str | Path, dimensions: int, sha256: str | None = None) -> np.ndarray:
    """Read a uint8 IDX file, plain or gzip (told by its first bytes), as an array with
    ``dimensions`` axes.

    sha256: of the *decompressed* content, so that a plain and a packed copy have the same one.
    Raises UserError naming the file, what was found and what is allowed: missing or damaged file,
    other magic or dimensions, other length than the header promises, other checksum.
    """
    content = _content(Path(path))
    shape = _shape(Path(path), content, dimensions)
    offset = 4 + 4 * dimensions
    expected = int(np.prod(shape, dtype=np.int64))
    if len(content) != offset + expected:
        raise UserError(
            f"{path}: expected {offset + expected} bytes (sizes {shape} in its header), found "
            f"{len(content)}; fetch the file again"
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
    path = Path(path)
    length = 4 + 4 * dimensions
    try:
        with open(path, "rb") as handle:
            packed = handle.read(2) == GZIP
        with gzip.open(path) if packed else open(path, "rb") as handle:
            head = handle.read(length)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{path}: damaged gzip file ({error}); fetch the file again") from error
    return _shape(path, head, dimensions)


def _content(path: Path) -> bytes:
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    if raw[:2] != GZIP:
        return raw
    try:
        return gzip.decompress(raw)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(
            f"{path}: damaged or truncated gzip file of {len(raw)} bytes ({error}); fetch the "
            "file again"
        ) from error


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
