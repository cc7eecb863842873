"""Where a stage keeps what survives a kill: a folder named by all that the result depends on."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moecore.core.config import Config
from moecore.core.files import UserError, sealed_object, verify_and_remove_seal, write_whole
from moecore.core.source_layout import CODE
from moecore.run.history_file import append_line, whole_lines
from moecore.run.inputs import hash_inputs
from moecore.run.locks import hold_lock
from moecore.run.progress import ProgressBar, ProgressLines
from moecore.run.run_record import Run, record_run
from moecore.study.reading.stage_params import params_keys_by_field

CODE_KINDS = ("measure", "methods", "sections")  # folders of artifacts/code/, beside `stages`


@contextmanager
def hold_work_folder(
    item: str, params: Config, inputs: Sequence[str | Path], script: str | Path
) -> Iterator[Path]:
    """A folder ``.state/<item>/<key>`` for checkpoint and history, removed after success.

    key: hash of the params, the inputs (files and folders of artifacts) and the code, so nothing
    goes on that was begun with others. Raises UserError where another process holds the folder.
    """
    key = _work_key(params, [*inputs, *stage_hash_files(item, params, script)])
    home = Path(".state") / item
    busy = f"{home}: another process is at work on {item}; wait for it, or end it, and start again"
    with hold_lock(home / "lock", lambda: busy):
        work = home / key
        work.mkdir(exist_ok=True)
        yield work
        for old in [path for path in home.iterdir() if path.is_dir()]:
            _remove_folder(old)


def stage_hash_files(item: str, params: Config, script: str | Path) -> list[Path]:
    """Return the files of artifacts/code/ of a stage's script, and of all methods, measurements and
    sections that item and params name. Raises UserError where the script has none.
    """
    hashes = CODE / "stages" / f"{Path(script).stem}.json"
    if not hashes.is_file():
        raise UserError(
            f"{hashes}: no such file; run `python -m moecore.stages.code`, which writes it"
        )
    sections = [key.split(".")[0] for key in params_keys_by_field(type(params)).values()]
    names = dict.fromkeys([*item.split("/"), *sections])
    named = [CODE / kind / f"{name}.json" for name in names for kind in CODE_KINDS]
    return [hashes, *(file for file in named if file.is_file())]


def _work_key(params: Config, inputs: Sequence[str | Path]) -> str:
    text = json.dumps([params.model_dump(mode="json"), hash_inputs(inputs)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _remove_folder(folder: Path) -> None:
    """Rename first: a kill in the middle leaves no half of a folder, which would be continued."""
    doomed = folder.with_name(f".{folder.name}.{os.getpid()}.removed")
    os.replace(folder, doomed)
    shutil.rmtree(doomed)


class KeptParts:
    """Parts by key in ``folder``/kept.jsonl, which lives as long as the work folder (resume.py).

    From the first line on that is torn or damaged they are computed again.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self.path = self.folder / "kept.jsonl"
        self.bar: ProgressBar | ProgressLines | None = None
        try:
            content = self.path.read_bytes() if self.path.exists() else b""
        except OSError as error:
            why = (error.strerror or str(error)).lower()
            mend = "remove it, and the stage starts again"
            raise UserError(f"{self.path}: cannot be read, {why}; {mend}") from error
        lines = list(whole_lines(content, verify_and_remove_seal))
        self.parts: dict[str, Any] = {part["key"]: part["part"] for _, part in lines}
        whole = b"".join(line for line, _ in lines)
        if whole != content:
            write_whole(self.path, whole)

    def show_progress(self, bar: ProgressBar | ProgressLines) -> None:
        """Have ``bar`` told of every part from now on."""
        self.bar = bar

    def part(self, name: str, compute: Callable[[], Any]) -> Any:
        """The part kept under ``name``, or what ``compute`` returns, once it is on the disk.

        Either way it has been JSON, so a resumed stage ends with the same bits.
        """
        if name not in self.parts:
            line = json.dumps(sealed_object({"key": name, "part": compute()})) + "\n"
            append_line(self.path, line, sync=True)
            self.parts[name] = json.loads(line)["part"]
        if self.bar is not None:
            self.bar.update(len(self.parts))
        return self.parts[name]


@contextmanager
def record_resumable(
    stage: str, params: Config, script: str | Path, phase: str, method: str, seed: int
) -> Iterator[tuple[Run, KeptParts]]:
    """Record a measuring stage; parts of a killed one of the same inputs are taken up."""
    item = f"{stage}/{phase}/{method}/{seed}"
    inputs = [Path("artifacts/data") / phase, Path("artifacts") / phase / method / str(seed)]
    files = [*inputs, *stage_hash_files(item, params, script)]
    with (
        hold_work_folder(item, params, inputs, script) as work,
        record_run(stage, params, phase=phase, method=method, seed=seed, inputs=files) as run,
    ):
        yield run, KeptParts(work)
