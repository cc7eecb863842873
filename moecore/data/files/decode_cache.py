"""Decode many image files into one memory-mapped array, or into one file of smaller JPEG files, in
parallel, and go on where a killed run stopped.
"""

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np

from moecore.core.files import UserError, read_json, write_sealed
from moecore.data.files.decode import (
    PackedImage,
    Packing,
    UnreadableImage,
    decode_image,
    pack_image,
)
from moecore.data.npy import new_array, open_array
from moecore.data.workers import thread_count
from moecore.data.writer import JpegFile, SplitPart

CHUNK = 1024
Result = TypeVar("Result")


class SplitFiles(NamedTuple):
    """The image files of one split and their labels int64 (N,)."""

    paths: list[Path]
    labels: np.ndarray


class DecodeCache(NamedTuple):
    """Where decoded images are gathered: ``{split}.npy``, and ``{split}.json``, how far."""

    folder: Path
    size: int
    channels: int

    def decode(self, split: str, paths: list[Path]) -> tuple[Path, dict[int, str]]:
        """Decode all ``paths``: the array's path, uint8 (N, C, size, size), and {row: reason} of
        the unreadable ones.

        State is saved every 1,024 files, while the next ones are decoded; another file list, file
        length, size or number of channels starts afresh, and so does a damaged state or array.
        """
        array = self.folder / f"{split}.npy"
        progress = self.folder / f"{split}.json"
        shape = (len(paths), self.channels, self.size, self.size)
        state = self._resume(split, array, (shape, np.uint8), self._key(paths))
        out = new_array(array, np.uint8, shape, begun=state["done"] > 0)
        begun = range(state["done"], len(paths))
        for rows, reasons in _chunks_in_threads(
            begun, lambda row: self._fill(out, row, paths[row])
        ):
            state["failures"] |= {
                str(row): reason for row, reason in zip(rows, reasons, strict=True) if reason
            }
            out.flush()
            write_sealed(progress, state | {"done": rows.stop})
        return array, {int(row): reason for row, reason in state["failures"].items()}

    def pack(
        self, split: str, paths: list[Path], packing: Packing
    ) -> tuple[JpegFile, dict[int, str]]:
        """Encode all ``paths`` into ``{split}.bin``: the file, with nothing of the unreadable ones,
        and {row: reason} of those.

        State is saved as by ``decode``; another packing starts afresh too.
        """
        file = self.folder / f"{split}.bin"
        progress = self.folder / f"{split}.json"
        # length, height and width of each
        listed, shape = self.folder / f"{split}_files.npy", (len(paths), 3)
        key = f"{packing} {self._key(paths)}"
        state: dict[str, Any] = {"bytes": 0} | self._resume(split, listed, (shape, np.int64), key)
        table = new_array(listed, np.int64, shape, begun=state["done"] > 0)
        histogram = np.array(
            state.get("histogram", np.zeros((packing.channels, 256))), dtype=np.int64
        )
        begun = range(state["done"], len(paths))
        _append_content(file, state["bytes"], b"")
        for rows, packed in _chunks_in_threads(
            begun, lambda row: _pack_or_reason(paths[row], packing)
        ):
            contents = []
            for row, one in zip(rows, packed, strict=True):
                if isinstance(one, str):
                    state["failures"][str(row)] = one
                    table[row] = 0
                    continue
                contents.append(one.content)
                table[row] = (len(one.content), *one.extent)
                histogram += one.histogram
            content = b"".join(contents)
            state["bytes"] = _append_content(file, state["bytes"], content)
            table.flush()
            state |= {"done": rows.stop, "histogram": histogram.tolist()}
            write_sealed(progress, state)
        bad = {int(row): reason for row, reason in state["failures"].items()}
        whole = np.delete(table, sorted(bad), axis=0)
        return JpegFile(file, whole[:, 0], whole[:, 1:], histogram, packing), bad

    def _fill(self, out: np.ndarray, row: int, path: Path) -> str | None:
        try:
            out[row] = decode_image(path, self.size, self.channels)
        except UnreadableImage as error:
            return str(error)
        return None

    def _resume(
        self, split: str, array: Path, kind: tuple[tuple[int, ...], Any], key: str
    ) -> dict[str, Any]:
        """Return how far a killed run of the same ``key`` got, where all that it left is whole."""
        self.folder.mkdir(parents=True, exist_ok=True)
        fresh = {"key": key, "done": 0, "failures": {}}
        try:
            state = read_json(self.folder / f"{split}.json", sealed=True)
            open_array(array, *kind)
        except UserError:  # nothing there, or damaged: all of it can be made again
            return fresh
        file = self.folder / f"{split}.bin"
        kept = file.stat().st_size if file.is_file() else 0
        if state.get("key") != key or kept < state.get("bytes", 0):
            return fresh
        return state

    def _key(self, paths: list[Path]) -> str:
        listing = "\n".join(f"{path} {_file_length(path)}" for path in paths)
        text = f"{self.size} {self.channels}\n{listing}"
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
    """Pieces of ``rows`` with what ``work`` makes of each, by several threads; the next piece is
    begun before one is handed out, so that it is worked on while that is written.
    """
    pool = ThreadPoolExecutor(thread_count())
    begun: deque[tuple[range, Iterator[Result]]] = deque()
    try:
        for start in range(rows.start, rows.stop, CHUNK):
            piece = range(start, min(start + CHUNK, rows.stop))
            begun.append((piece, pool.map(work, piece)))
            if len(begun) > 1:
                yield begun.popleft()
        yield from begun
    finally:
        pool.shutdown(cancel_futures=True)


def _pack_or_reason(path: Path, packing: Packing) -> PackedImage | str:
    try:
        return pack_image(path, packing)
    except UnreadableImage as error:
        return str(error)


def decode_splits(
    cache: DecodeCache,
    splits: Mapping[str, SplitFiles],
    on_error: Literal["stop", "skip"],
    packing: Packing | None = None,
) -> dict[str, SplitPart]:
    """Decode every split; the parts take the cache's files over.

    packing: what the training images are stored as; None for arrays as those of the other splits.
    Raises UserError that lists every unreadable file with its reason, unless ``on_error`` is
    ``skip``: then they are left out.
    """
    decoded: dict[str, tuple[Path | JpegFile, dict[int, str]]] = {}
    for split, files in splits.items():
        if packing is not None and split == "train":
            decoded[split] = cache.pack(split, files.paths, packing)
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
    return {
        split: _split_part(splits[split], array, reasons)
        for split, (array, reasons) in decoded.items()
    }


def _split_part(files: SplitFiles, images: Path | JpegFile, reasons: dict[int, str]) -> SplitPart:
    if not reasons:
        return SplitPart(files.labels, images)
    kept = np.setdiff1d(np.arange(len(files.paths)), list(reasons))
    if isinstance(images, JpegFile):
        return SplitPart(files.labels[kept], images)
    return SplitPart(files.labels[kept], _stored_rows(images, kept))


def _stored_rows(array: Path, rows: np.ndarray) -> Iterator[np.ndarray]:
    images = np.load(array, mmap_mode="r", allow_pickle=False)
    for start in range(0, len(rows), CHUNK):
        yield images[rows[start : start + CHUNK]]
