"""Digests of files."""

import hashlib
from pathlib import Path


def checksum(path: str | Path, algorithm: str = "sha256") -> str:
    """Hex digest of a file's content, read in blocks; ``algorithm`` is a name of hashlib (sha256,
    md5).
    """
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, algorithm).hexdigest()
