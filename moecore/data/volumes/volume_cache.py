"""Read volumes once: what was made of each subject's files is kept."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moecore.core.files import whole_file
from moecore.data.volumes.volume_preparation import VolumeWithTissueShares

VERSION = 2  # raise it where reading a subject gives other values than before


class VolumeCache(NamedTuple):
    """One .npz file per subject, named after the settings and path, size and time of change of the
    subject's files; those of other settings stay, the folder may be deleted at any time.
    """

    folder: Path
    settings: dict[str, Any]

    def subject_path(self, files: Mapping[str, Path]) -> Path:
        """Return where a subject is kept."""
        states = {name: (path, path.stat()) for name, path in files.items()}
        stamps = {
            name: [str(path.resolve()), state.st_size, state.st_mtime_ns]
            for name, (path, state) in states.items()
        }
        words = json.dumps([VERSION, self.settings, stamps], sort_keys=True)
        return self.folder / f"{hashlib.sha256(words.encode()).hexdigest()}.npz"


def load_cached_volume(path: Path) -> VolumeWithTissueShares:
    """Return what was kept."""
    with np.load(path, allow_pickle=False) as kept:
        return VolumeWithTissueShares(kept["image"], kept.get("regions"))


def save_cached_volume(path: Path, made: VolumeWithTissueShares) -> None:
    """Keep a subject."""
    arrays = {name: values for name, values in made._asdict().items() if values is not None}
    with whole_file(path) as temporary, open(temporary, "wb") as file:
        np.savez(file, **arrays)
