"""Decode many image files into one memory-mapped array, in parallel, and go on where a killed run
stopped.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from moecore.core.files import UserError, write_json
from moecore.data.files.decode import Unreadable, decode_image
from moecore.data.writer import Part

CHUNK = 1024


class Files(NamedTuple):
    """The image files of one split and their labels int64 (N,)."""

    paths: list[Path]
    labels: np.ndarray


class DecodeCache(NamedTuple):
    """Where decoded images are gathered: ``{split}.npy`` and ``{split}.json`` (how far it got) in
    ``folder``.
    """

    folder: Path
    size: int
    channels: int

    def decode(self, split: str, paths: list[Path]) -> tuple[Path, dict[int, str]]:
        """Decode all ``paths``: the array's path, uint8 (N, C, size, size), and {row: reason} of
        the unreadable ones.

        State is saved every 1,024 files; another file list, file length, size or number of channels
        starts afresh.
        """
        array = self.folder / f"{split}.npy"
        progress = self.folder / f"{split}.json"
        state = self._resume(array, progress, self._key(paths))
        shape = (len(paths), self.channels, self.size, self.size)
        mode = "r+" if state["done"] else "w+"
        out = np.lib.format.open_memmap(array, mode=mode, dtype=np.uint8, shape=shape)
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            for start in range(state["done"], len(paths), CHUNK):
                rows = range(start, min(start + CHUNK, len(paths)))
                reasons = pool.map(lambda row: self._fill(out, row, paths[row]), rows)
                state["failures"] |= {
                    str(row): reason for row, reason in zip(rows, reasons, strict=True) if reason
                }
                out.flush()
                write_json(progress, state | {"done": rows.stop})
        return array, {int(row): reason for row, reason in state["failures"].items()}

    def _fill(self, out: np.ndarray, row: int, path: Path) -> str | None:
        try:
            out[row] = decode_image(path, self.size, self.channels)
        except Unreadable as error:
            return str(error)
        return None

    def _resume(self, array: Path, progress: Path, key: str) -> dict[str, Any]:
        self.folder.mkdir(parents=True, exist_ok=True)
        if array.is_file() and progress.is_file():
            state = json.loads(progress.read_text(encoding="utf-8"))
            if state["key"] == key:
                return state
        return {"key": key, "done": 0, "failures": {}}

    def _key(self, paths: list[Path]) -> str:
        listing = "\n".join(f"{path} {path.stat().st_size}" for path in paths)
        return hashlib.sha256(f"{self.size} {self.channels}\n{listing}".encode()).hexdigest()


def decoded_parts(
    cache: DecodeCache, splits: Mapping[str, Files], on_error: Literal["stop", "skip"]
) -> dict[str, Part]:
    """Decode every split; the parts take the cache's arrays over.

    Raises UserError that lists every unreadable file with its reason, unless ``on_error`` is
    ``skip``: then they are left out.
    """
    decoded = {split: cache.decode(split, files.paths) for split, files in splits.items()}
    bad = [
        f"{splits[split].paths[row]}: {why}"
        for split, (_, reasons) in decoded.items()
        for row, why in sorted(reasons.items())
    ]
    if bad and on_error == "stop":
        found = f"{len(bad)} image files cannot be read"
        listed = "\n  ".join(bad)
        raise UserError(f"{found}; mend or remove them, or set `on_error: skip`:\n  {listed}")
    return {
        split: _part(splits[split], array, reasons) for split, (array, reasons) in decoded.items()
    }


def _part(files: Files, array: Path, reasons: dict[int, str]) -> Part:
    if not reasons:
        return Part(files.labels, array)
    kept = np.setdiff1d(np.arange(len(files.paths)), list(reasons))
    return Part(files.labels[kept], _rows(array, kept))


def _rows(array: Path, rows: np.ndarray) -> Iterator[np.ndarray]:
    images = np.load(array, mmap_mode="r", allow_pickle=False)
    for start in range(0, len(rows), CHUNK):
        yield images[rows[start : start + CHUNK]]
