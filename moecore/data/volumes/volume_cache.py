"""Read volumes once: what was made of each subject's files is kept under the files' digests and the
settings.
"""

import hashlib
import json
import zlib
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from moecore.core.files import (
    UserError,
    checksum,
    read_json,
    whole_file,
    write_json,
    write_sealed,
)
from moecore.data.arrays import save_array
from moecore.data.volumes.volumes import Stored, SubjectFiles

BLOCK = 1 << 20
VERSION = 1  # raise it where reading a subject gives other values than before


class VolumeCache:
    """``<key>.image.npy`` float16, ``<key>.regions.npy`` uint8 and ``<key>.json``, the checksums of
    both, in a folder; files of other settings stay, the folder may be deleted at any time.

    Digests are kept in ``files.json`` beside size and time of change, so that an unchanged file is
    not even read for its digest.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.folder = folder
        self.settings = settings
        self.index = folder / "files.json"
        self.lock = Lock()
        folder.mkdir(parents=True, exist_ok=True)
        if self.index.is_file():
            self.known: dict[str, list] = read_json(self.index)
            if not isinstance(self.known, dict):
                raise UserError(f"{self.index}: holds no digests; delete it, it is made again")
        else:
            self.known = {}

    def key(self, files: SubjectFiles) -> str:
        """Digest of the content of a subject's files and of the settings."""
        paths: list[tuple[str, Path | None]] = [
            ("t1", files.t1),
            ("mask", files.mask),
            *(files.maps or {}).items(),
            ("dseg", files.dseg),
        ]
        digests = {name: self._digest(path) for name, path in paths if path}
        return hashlib.sha256(
            json.dumps([VERSION, self.settings, digests], sort_keys=True).encode()
        ).hexdigest()

    def load(self, key: str) -> Stored | None:
        """What was kept under a key, memory-mapped; None where nothing was, or where a byte of it
        is another one: what is prepared would then be wrong, and its card call it right.
        """
        image, regions = self._paths(key)
        try:
            sums = read_json(self._sums(key), sealed=True)
        except UserError:  # damaged, or not there: killed before, or kept when none were written
            return None
        if sums != {"image": _sum(image), "regions": _sum(regions)}:
            return None
        return Stored(_kept(image), _kept(regions) if regions.is_file() else None)

    def save(self, key: str, made: Stored) -> None:
        """Keep a subject; its checksums come last, so that their being there means that all is."""
        image, regions = self._paths(key)
        for path, values in ((regions, made.regions), (image, made.image)):
            if values is not None:
                with self.lock, whole_file(path, values.nbytes) as temporary:
                    save_array(temporary, values)
        if made.regions is None:
            regions.unlink(missing_ok=True)
        with self.lock:
            write_sealed(self._sums(key), {"image": _sum(image), "regions": _sum(regions)})

    def remember(self) -> None:
        """Write the digests down, for the next run."""
        write_json(self.index, self.known)

    def _digest(self, path: Path) -> str:
        state = path.stat()
        name = str(path.resolve())
        stamp = [state.st_size, state.st_mtime_ns]
        match self.known.get(name):
            case [int(size), int(changed), str(digest)] if [size, changed] == stamp:
                return digest
        # new, changed, or no entry that was ever written
        digest = checksum(path)
        self.known[name] = [*stamp, digest]
        return digest

    def _paths(self, key: str) -> tuple[Path, Path]:
        return self.folder / f"{key}.image.npy", self.folder / f"{key}.regions.npy"

    def _sums(self, key: str) -> Path:
        return self.folder / f"{key}.json"


def _sum(path: Path) -> int | None:
    """CRC-32 of a file, header and all; None where there is none."""
    if not path.is_file():
        return None
    found = 0
    with open(path, "rb") as handle:
        while block := handle.read(BLOCK):
            found = zlib.crc32(block, found)
    return found


def _kept(path: Path) -> np.ndarray:
    return np.load(path, mmap_mode="r", allow_pickle=False)
