"""Decode many image files in parallel, and go on where a killed run stopped."""

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np

from moecore.core.files import UserError, read_json, write_sealed
from moecore.data.files.decode import (
    JpegWithHistogram,
    UnreadableImage,
    decode_image,
    recompress_image,
)
from moecore.data.stored_arrays import new_array, open_array
from moecore.data.thread_map import map_in_threads
from moecore.data.writer import PackedJpegFile, SplitToWrite

CHUNK = 1024
Result = TypeVar("Result")


class LabelledFiles(NamedTuple):
    """The image files of one split and their labels int64 (N,)."""

    paths: list[Path]
    labels: np.ndarray


class DecodeCache(NamedTuple):
    """Where decoded images are gathered: ``{split}.npy``, and ``{split}.json``, how far."""

    folder: Path
    size: int
    channels: int

    def decode(self, split: str, paths: list[Path]) -> tuple[Path, dict[int, str]]:
        """Decode all ``paths``: path of uint8 (N, C, size, size), {row: reason} of the unreadable.

        State is saved every 1,024 files; another file list, file length, size or number of channels
        starts afresh, and so does a damaged state or array.
        """
        array = self.folder / f"{split}.npy"
        shape = (len(paths), self.channels, self.size, self.size)
        state = self._resume(split, array, shape, np.uint8, _key(f"{self.size}", self, paths))
        out = new_array(array, np.uint8, shape, begun=state["done"] > 0)

        def decode_row(row: int) -> str | None:
            try:
                out[row] = decode_image(paths[row], self.size, self.channels)
            except UnreadableImage as error:
                return str(error)
            return None

        for rows, reasons in _chunks_in_threads(range(state["done"], len(paths)), decode_row):
            state["failures"] |= {
                str(row): reason for row, reason in zip(rows, reasons, strict=True) if reason
            }
            out.flush()
            write_sealed(self.folder / f"{split}.json", state | {"done": rows.stop})
        return array, {int(row): reason for row, reason in state["failures"].items()}

    def pack(
        self, split: str, paths: list[Path], short_side: int
    ) -> tuple[PackedJpegFile, dict[int, str]]:
        """Encode all ``paths`` into ``{split}.bin``; also {row: reason} of the unreadable ones.

        State is saved as by ``decode``; another short side starts afresh too.
        """
        file = self.folder / f"{split}.bin"
        listed, shape = self.folder / f"{split}_lengths.npy", (len(paths),)
        key = _key(f"whole {short_side}", self, paths)
        state: dict[str, Any] = {"bytes": 0} | self._resume(split, listed, shape, np.int64, key)
        lengths = new_array(listed, np.int64, shape, begun=state["done"] > 0)
        histogram = np.array(state.get("histogram", np.zeros((self.channels, 256))), np.int64)
        _append_content(file, state["bytes"], b"")

        def pack_row(row: int) -> JpegWithHistogram | str:
            try:
                return recompress_image(paths[row], short_side, self.channels)
            except UnreadableImage as error:
                return str(error)

        for rows, packed in _chunks_in_threads(range(state["done"], len(paths)), pack_row):
            contents = []
            for row, one in zip(rows, packed, strict=True):
                if isinstance(one, str):
                    state["failures"][str(row)] = one
                    lengths[row] = 0
                    continue
                contents.append(one.content)
                lengths[row] = len(one.content)
                histogram += one.histogram
            state["bytes"] = _append_content(file, state["bytes"], b"".join(contents))
            lengths.flush()
            state |= {"done": rows.stop, "histogram": histogram.tolist()}
            write_sealed(self.folder / f"{split}.json", state)
        bad = {int(row): reason for row, reason in state["failures"].items()}
        return PackedJpegFile(file, np.delete(lengths, sorted(bad)), histogram, short_side), bad

    def _resume(
        self, split: str, array: Path, shape: tuple[int, ...], dtype: type, key: str
    ) -> dict[str, Any]:
        """Return how far a killed run of the same ``key`` got, where all that it left is whole."""
        self.folder.mkdir(parents=True, exist_ok=True)
        fresh = {"key": key, "done": 0, "failures": {}}
        try:
            state = read_json(self.folder / f"{split}.json", sealed=True)
            open_array(array, shape, dtype)
        except UserError:  # nothing there, or damaged: all of it can be made again
            return fresh
        file = self.folder / f"{split}.bin"
        kept = file.stat().st_size if file.is_file() else 0
        if state.get("key") != key or kept < state.get("bytes", 0):
            return fresh
        return state


def _key(form: str, cache: DecodeCache, paths: list[Path]) -> str:
    """Digest of what is made, of which files, and of their lengths."""
    listing = "\n".join(f"{path} {_file_length(path)}" for path in paths)
    text = f"{form} {cache.channels}\n{listing}"
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()


def _file_length(path: Path) -> int:
    """Bytes of a file; -1 of a link to nothing, which decoding complains of."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return -1


def _append_content(file: Path, start: int, content: bytes) -> int:
    """Write to the disk what comes after ``start`` bytes of a file, and return where it ends."""
    with open(file, "ab") as out:
        out.truncate(start)  # what a killed run wrote and never said
        out.write(content)
        out.flush()
        os.fsync(out.fileno())
    return start + len(content)


def _chunks_in_threads(
    rows: range, work: Callable[[int], Result]
) -> Iterator[tuple[range, Iterator[Result]]]:
    """Pieces of ``rows`` with what ``work`` makes of each, by several threads."""
    results = map_in_threads(work, rows)
    for start in range(rows.start, rows.stop, CHUNK):
        piece = range(start, min(start + CHUNK, rows.stop))
        yield piece, islice(results, len(piece))


def decode_splits(
    cache: DecodeCache,
    splits: Mapping[str, LabelledFiles],
    on_error: Literal["stop", "skip"],
    short_side: int | None = None,
) -> dict[str, SplitToWrite]:
    """Decode every split; the parts take the cache's files over.

    short_side: of the training images where they are kept whole, as JPEG files; None for an array
    as those of the other splits. Raises UserError that lists every unreadable file with its reason,
    unless ``on_error`` is ``skip``: then they are left out.
    """
    decoded: dict[str, tuple[Path | PackedJpegFile, dict[int, str]]] = {}
    for split, files in splits.items():
        if short_side is not None and split == "train":
            decoded[split] = cache.pack(split, files.paths, short_side)
        else:
            decoded[split] = cache.decode(split, files.paths)
    bad = [
        f"{splits[split].paths[row]}: {why}"
        for split, (_, reasons) in decoded.items()
        for row, why in sorted(reasons.items())
    ]
    if bad and on_error == "stop":
        count = f"{len(bad)} image files cannot be read"
        listed = "\n  ".join(bad)
        raise UserError(f"{count}; repair or remove them, or set `on_error: skip`:\n  {listed}")
    parts = {}
    for split, (images, reasons) in decoded.items():
        kept = np.setdiff1d(np.arange(len(splits[split].paths)), list(reasons))
        rows = _stored_rows(images, kept) if reasons and isinstance(images, Path) else images
        parts[split] = SplitToWrite(splits[split].labels[kept], rows)
    return parts


def _stored_rows(array: Path, rows: np.ndarray) -> Iterator[np.ndarray]:
    images = np.load(array, mmap_mode="r", allow_pickle=False)
    for start in range(0, len(rows), CHUNK):
        yield images[rows[start : start + CHUNK]]
