"""Whether the folders of raw data are still those that were prepared: names and sizes of files."""

import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from moecore.core.files import candidate_folders


class FolderFingerprint(NamedTuple):
    """A folder of raw data: how many files lie in it, at any depth, and their bytes.

    sha256: of their sorted names and sizes. Hidden files do not count; contents are not read.
    """

    folder: str
    files: int
    bytes: int
    sha256: str


def fingerprint_folder(folder: Path) -> FolderFingerprint:
    """Count a folder's files: about two seconds for a million of them."""
    listing = sorted(_files_below(str(folder)))
    digest = hashlib.sha256()
    for name, size in listing:
        digest.update(f"{name}\0{size}\n".encode(errors="surrogateescape"))
    total = sum(size for _, size in listing)
    return FolderFingerprint(str(folder), len(listing), total, digest.hexdigest())


def scan_raw_folders(source: Any) -> list[FolderFingerprint]:
    """Scan the folders of a source's ``root`` that are there; of a mosaic, those of its source."""
    source = getattr(source, "source", source)
    root = getattr(source, "root", None)
    if root is None:
        return []
    # of a loop of links, too, which ``Path.resolve`` refuses
    there = {os.path.realpath(folder): folder for folder in reversed(candidate_folders(root))}
    return [fingerprint_folder(folder) for folder in there.values() if folder.is_dir()]


def describe_change(before: Mapping[str, Any]) -> str | None:
    """Return in words how a folder differs from its fingerprint, or None where it does not.

    A folder that is gone does not differ: what was prepared from it may be all that is needed.
    """
    folder = Path(before["folder"])
    if not folder.is_dir():
        return None
    now = fingerprint_folder(folder)
    if now.sha256 == before["sha256"]:
        return None
    counted = f"found {now.files:,} files of {now.bytes:,} bytes"
    return f"{folder}: {counted}; `prepare` saw {before['files']:,} of {before['bytes']:,}"


def _files_below(root: str) -> Iterator[tuple[str, int]]:
    """Path below ``root`` and bytes of each file; links to folders are not followed."""
    waiting = [root]
    while waiting:
        try:
            entries = list(os.scandir(waiting.pop()))
        except OSError:  # `prepare` says which folder cannot be listed, and why
            continue
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir(follow_symlinks=False):
                waiting.append(entry.path)
            elif entry.is_file():
                yield entry.path[len(root) :], entry.stat().st_size
