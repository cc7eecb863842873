"""Where a training stage keeps what survives a kill: a git-ignored folder named by all that the result depends on."""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from moecore.config import Config
from moecore.files import StageError
from moecore.sources import ROOT, closure, fingerprint, part_files


@contextmanager
def work_folder(item: str, params: Config, inputs: Sequence[str | Path], script: str | Path) -> Iterator[Path]:
    """A folder ``.state/<item>/<key>`` for checkpoint and history, the same after a kill, removed after success.

    key: hash of the params, the inputs (files and folders of artifacts) and the source files of the stage, so what was
    begun with other settings, data or code is never continued. Raises StageError where another process holds the folder.
    """
    key = _key(params, inputs, script)
    home = Path(".state") / item
    home.mkdir(parents=True, exist_ok=True)
    with open(home / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StageError(f"{home}: another process is at work on {item}; wait for it, or end it, and start again") from None
        work = home / key
        work.mkdir(exist_ok=True)
        yield work
        for old in [path for path in home.iterdir() if path.is_dir()]:
            _remove(old)


def _key(params: Config, inputs: Sequence[str | Path], script: str | Path) -> str:
    files = sorted(file for path in inputs for file in _described(Path(path)))
    hashes = {str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    settings = params.model_dump(mode="json")
    code = fingerprint(closure(Path(script).resolve().relative_to(ROOT)) | part_files(settings))
    text = json.dumps([settings, hashes, code], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _described(path: Path) -> list[Path]:
    """The files that identify an artifact: prepared data by its card, which holds the hash of each array; else every file."""
    if not path.exists():
        raise StageError(f"{path}: does not exist; run `dvc repro`, which makes it first")
    if path.is_file():
        return [path]
    if (path / "card.json").is_file():
        return [path / "card.json"]
    return [file for file in path.rglob("*") if file.is_file()]


def _remove(folder: Path) -> None:
    """Rename first: a kill in the middle leaves no half-deleted folder that would be taken for one to continue."""
    doomed = folder.with_name(f".{folder.name}.{os.getpid()}.removed")
    os.replace(folder, doomed)
    shutil.rmtree(doomed)
