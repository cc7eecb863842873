"""Detect changes of the raw data folders since ``prepare``: names and sizes of files."""

import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from moecore.core.files import candidate_raw_folders


class FolderFingerprint(NamedTuple):
    """Number, bytes and sha256 (of names and sizes) of all files that are not hidden."""

    folder: str
    files: int
    bytes: int
    sha256: str


def fingerprint_folder(folder: Path) -> FolderFingerprint:
    listing = sorted(_files_below(str(folder)))
    digest = hashlib.sha256()
    for name, size in listing:
        digest.update(f"{name}\0{size}\n".encode(errors="surrogateescape"))
    total = sum(size for _, size in listing)
    return FolderFingerprint(str(folder), len(listing), total, digest.hexdigest())


def fingerprint_raw_folders(source: Any) -> list[FolderFingerprint]:
    source = getattr(source, "source", source)
    root = getattr(source, "root", None)
    if root is None:
        return []
    # Unlike ``Path.resolve``, realpath accepts a loop of links.
    folders = {os.path.realpath(folder): folder for folder in reversed(candidate_raw_folders(root))}
    return [fingerprint_folder(folder) for folder in folders.values() if folder.is_dir()]


def describe_folder_change(before: Mapping[str, Any]) -> str | None:
    """Describe how a folder differs from its fingerprint ``before``; None if equal or deleted."""
    folder = Path(before["folder"])
    if not folder.is_dir():  # what was prepared from it may be all that is needed
        return None
    now = fingerprint_folder(folder)
    if now.sha256 == before["sha256"]:
        return None
    return (
        f"{folder}: found {now.files:,} files of {now.bytes:,} bytes; "
        f"`prepare` saw {before['files']:,} of {before['bytes']:,}"
    )


def _files_below(root: str) -> Iterator[tuple[str, int]]:
    """Yield path below ``root`` and bytes of each file; links to folders are not followed."""
    folders = [root]
    while folders:
        try:
            entries = list(os.scandir(folders.pop()))
        except OSError:  # `prepare` says which folder cannot be listed, and why
            continue
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir(follow_symlinks=False):
                folders.append(entry.path)
            elif entry.is_file():
                yield entry.path[len(root) :], entry.stat().st_size
