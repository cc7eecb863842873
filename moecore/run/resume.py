"""Where a stage keeps what survives a kill: a folder named by all that the result depends on."""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moecore.core.config import Config
from moecore.core.files import UserError, sealed_object, verify_and_remove_seal, write_whole
from moecore.run.history_file import append_line, execution_subpath, whole_lines
from moecore.run.inputs import StageInputs, read_stage_inputs
from moecore.run.progress import ProgressBar, ProgressLines
from moecore.run.resume import hold_lock
from moecore.run.run_record import Run, record_run


@contextmanager
def hold_work_folder(item: str, key: str) -> Iterator[Path]:
    """A folder ``.state/<item>/<key>`` for checkpoint and history, removed after success.

    key: a hash of all that the result depends on, so a stage goes on only with what was begun with
    the same. Raises UserError where another process holds the folder.
    """
    home = Path(".state") / item
    busy = f"{home}: another process is at work on {item}; wait for it, or end it, and start again"
    with hold_lock(home / "lock", lambda: busy):
        work = home / key
        work.mkdir(exist_ok=True)
        yield work
        for old in [path for path in home.iterdir() if path.is_dir()]:
            _remove_folder(old)


def _remove_folder(folder: Path) -> None:
    """Rename first: a kill in the middle leaves no half of a folder, which would be continued."""
    doomed = folder.with_name(f".{folder.name}.{os.getpid()}.removed")
    os.replace(folder, doomed)
    shutil.rmtree(doomed)


class KeptParts:
    """Parts by key in ``folder``/kept.jsonl, which lives as long as the work folder (resume.py).

    From the first line on that is torn or damaged they are computed again.
    """

    def __init__(self, folder: Path, inputs: StageInputs | None = None) -> None:
        """inputs: compared before a part is kept; None: never."""
        self.folder = Path(folder)
        self.inputs = inputs
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
            part = compute()
            if self.inputs is not None:
                self.inputs.refuse_edited_code()
            line = json.dumps(sealed_object({"key": name, "part": part})) + "\n"
            append_line(self.path, line, sync=True)
            if self.inputs is not None:
                self.inputs.refuse_edited_settings()
            self.parts[name] = json.loads(line)["part"]
        if self.bar is not None:
            self.bar.update(len(self.parts))
        return self.parts[name]


@contextmanager
def record_resumable(
    stage: str,
    params: Config,
    script: str | Path,
    inputs: Sequence[str | Path],
    *,
    phase: str | None = None,
    method: str | None = None,
    seed: int | None = None,
) -> Iterator[tuple[Run, Path]]:
    """Record a stage that goes on where a killed process of the same inputs was.

    Yields its record and its work folder, which is removed after success.
    """
    item = {"phase": phase, "method": method, "seed": seed}
    read = read_stage_inputs(stage, params, script, inputs, phase, method)
    with (
        hold_work_folder(execution_subpath(stage, **item), read.key()) as work,
        record_run(stage, params, work=work, inputs=read, **item) as run,
    ):
        yield run, work


@contextmanager
def record_measurement(
    stage: str, params: Config, script: str | Path, phase: str, method: str, seed: int
) -> Iterator[tuple[Run, KeptParts]]:
    """Record a measurement of a trained model; the parts of a killed one are kept."""
    inputs = [Path("artifacts/data", phase), Path("artifacts", phase, method, str(seed))]
    item = {"phase": phase, "method": method, "seed": seed}
    with record_resumable(stage, params, script, inputs, **item) as (run, work):
        yield run, KeptParts(work, run.inputs)
