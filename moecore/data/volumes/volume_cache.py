"""Read volumes once: what was made of each subject's files is kept under the files' digests and the
settings.
"""

import hashlib
import json
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from moecore.core.files import file_checksum, read_json, whole_file, write_json
from moecore.data.npy import save_array
from moecore.data.volumes.volumes import StoredVolume, SubjectFiles

VERSION = 1  # raise it where reading a subject gives other values than before


class VolumeCache:
    """``<key>.image.npy`` float16 and ``<key>.regions.npy`` uint8 in a folder; files of other
    settings stay, the folder may be deleted at any time.

    Digests are kept in ``files.json`` beside size and time of change, so that an unchanged file is
    not even read for its digest.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.folder = folder
        self.settings = settings
        self.index = folder / "files.json"
        self.lock = Lock()
        folder.mkdir(parents=True, exist_ok=True)
        self.known: dict[str, list] = read_json(self.index) if self.index.is_file() else {}

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

    def load(self, key: str) -> StoredVolume | None:
        """Return what was kept under a key, memory-mapped; None where nothing whole was."""
        image, regions = self._paths(key)
        try:
            shares = _map_array(regions) if regions.is_file() else None
            return StoredVolume(_map_array(image), shares)
        except (OSError, ValueError, EOFError):
            return None

    def save(self, key: str, made: StoredVolume) -> None:
        """Keep a subject; the image comes last, so that its being there means that all is."""
        image, regions = self._paths(key)
        for path, values in ((regions, made.regions), (image, made.image)):
            if values is not None:
                with self.lock, whole_file(path) as temporary:
                    save_array(temporary, values)

    def remember(self) -> None:
        """Write the digests down, for the next run."""
        write_json(self.index, self.known)

    def _digest(self, path: Path) -> str:
        state = path.stat()
        name = str(path.resolve())
        stamp = [state.st_size, state.st_mtime_ns]
        if name not in self.known or self.known[name][:2] != stamp:
            self.known[name] = [*stamp, file_checksum(path)]
        return self.known[name][2]

    def _paths(self, key: str) -> tuple[Path, Path]:
        return self.folder / f"{key}.image.npy", self.folder / f"{key}.regions.npy"


def _map_array(path: Path) -> np.ndarray:
    return np.load(path, mmap_mode="r", allow_pickle=False)
