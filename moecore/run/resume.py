"""Where a stage keeps what survives a kill: a folder named by all that the result depends on."""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moecore.core.config import Config
from moecore.core.files import UserError, is_whole, sealed_object, write_whole
from moecore.core.sources import CODE
from moecore.run.history import Run, record
from moecore.run.history_file import append_line
from moecore.study.reading.params import params_keys

KINDS = ("measure", "methods", "sections")  # folders of artifacts/code/, beside `stages`


@contextmanager
def work_folder(
    item: str, params: Config, inputs: Sequence[str | Path], script: str | Path
) -> Iterator[Path]:
    """A folder ``.state/<item>/<key>`` for checkpoint and history, removed after success.

    key: hash of the params, the inputs (files and folders of artifacts) and the code, as the stage
    ``code`` found it, so what was begun with other settings, data or code is never continued.
    Raises UserError where another process holds the folder, or the stage ``code`` has not run.
    """
    key = _key(params, [*inputs, *code_of(item, params, script)])
    home = Path(".state") / item
    try:
        home.mkdir(parents=True, exist_ok=True)
        opened = open(home / "lock", "w")
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise UserError(f"{home / 'lock'}: cannot be written, {why}; mend that") from error
    with opened as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{home}: another process is at work on {item}; "
                "wait for it, or end it, and start again"
            ) from None
        work = home / key
        work.mkdir(exist_ok=True)
        yield work
        for old in [path for path in home.iterdir() if path.is_dir()]:
            _remove(old)


def code_of(item: str, params: Config, script: str | Path) -> list[Path]:
    """The files of artifacts/code/ that a stage depends on.

    They are those of its script, and of all methods, measurements and sections that item and params
    name. Raises UserError where the script has none.
    """
    hashes = CODE / "stages" / f"{Path(script).stem}.json"
    if not hashes.is_file():
        raise UserError(f"{hashes}: no such file; run `python -m stages.code`, which writes it")
    sections = [key.split(".")[0] for key in params_keys(type(params)).values()]
    names = dict.fromkeys([*item.split("/"), *sections])
    named = [CODE / kind / f"{name}.json" for name in names for kind in KINDS]
    return [hashes, *(file for file in named if file.is_file())]


def _key(params: Config, inputs: Sequence[str | Path]) -> str:
    files = sorted(file for path in inputs for file in _described(Path(path)))
    hashes = {str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    text = json.dumps([params.model_dump(mode="json"), hashes], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _described(path: Path) -> list[Path]:
    """The files that identify an artifact: all of them.

    Of prepared data the card, which holds the hash of each array.
    """
    if not path.exists():
        raise UserError(f"{path}: does not exist; run `dvc repro`, which makes it first")
    if path.is_file():
        return [path]
    if (path / "card.json").is_file():
        return [path / "card.json"]
    return [file for file in path.rglob("*") if file.is_file()]


def _remove(folder: Path) -> None:
    """Rename first: a kill in the middle leaves no half of a folder, which would be continued."""
    doomed = folder.with_name(f".{folder.name}.{os.getpid()}.removed")
    os.replace(folder, doomed)
    shutil.rmtree(doomed)


class Kept:
    """Parts by key in ``folder``/kept.jsonl, which lives as long as the work folder (resume.py).

    A line that a kill cut off is dropped. Raises UserError, naming file and line, where a whole
    line is not a part.
    """

    def __init__(self, folder: Path) -> None:
        self.path = Path(folder) / "kept.jsonl"
        self.parts: dict[str, Any] = {}
        try:
            lines = self.path.read_bytes().splitlines(keepends=True) if self.path.exists() else []
        except OSError as error:
            why = (error.strerror or str(error)).lower()
            mend = "remove it, and the stage starts again"
            raise UserError(f"{self.path}: cannot be read, {why}; {mend}") from error
        if lines and not lines[-1].endswith(b"\n"):
            lines.pop()
            write_whole(self.path, b"".join(lines))
        for number, line in enumerate(lines, 1):
            self._add(line, number)

    def part(self, name: str, compute: Callable[[], Any]) -> Any:
        """The part kept under ``name``, or what ``compute`` returns, which is on the disk first.

        Either way it has been JSON, so a resumed stage ends with the same bits as any other.
        """
        if name not in self.parts:
            line = json.dumps(sealed_object({"key": name, "part": compute()})) + "\n"
            append_line(self.path, line, sync=True)
            self.parts[name] = json.loads(line)["part"]
        return self.parts[name]

    def _add(self, line: bytes, number: int) -> None:
        try:
            found = json.loads(line)
            if not is_whole(found):
                raise ValueError("another content than was written")
            self.parts[found["key"]] = found["part"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise UserError(
                f"{self.path}:{number}: damaged, not a part as it was kept; "
                "remove the file, and the stage starts again"
            ) from None


@contextmanager
def resumable(
    stage: str, params: Config, script: str | Path, phase: str, method: str, seed: int
) -> Iterator[tuple[Run, Kept]]:
    """``record`` for a measuring stage, with the parts of a killed one.

    They are taken up where model, data, settings and code are the same.
    """
    item = f"{stage}/{phase}/{method}/{seed}"
    inputs = [Path("artifacts/data") / phase, Path("artifacts") / phase / method / str(seed)]
    with (
        work_folder(item, params, inputs, script) as work,
        record(stage, params, phase=phase, method=method, seed=seed) as run,
    ):
        yield run, Kept(work)
