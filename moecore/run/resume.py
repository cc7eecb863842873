"""Continue killed stages, in a work folder named by a hash of all inputs."""

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from moecore.core.config import Config
from moecore.core.files import KeptParts, UserError
from moecore.run.history_file import execution_subpath
from moecore.run.inputs import read_stage_inputs
from moecore.run.run_record import Run, record_run


@contextmanager
def hold_work_folder(item: str, key: str) -> Iterator[Path]:
    """Yield the folder ``.state/<item>/<key>`` for checkpoints and history; removed after success.

    key: a hash of all inputs, so that a stage continues only work with the same inputs. Raises
    UserError if another process holds the folder.
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
    """Rename and remove a folder: a kill in between leaves no incomplete folder to continue."""
    doomed = folder.with_name(f".{folder.name}.{os.getpid()}.removed")
    os.replace(folder, doomed)
    shutil.rmtree(doomed)


@contextmanager
def record_resumable(
    stage: str,
    params: Config,
    inputs: Sequence[str | Path],
    *,
    phase: str | None = None,
    method: str | None = None,
    seed: int | None = None,
) -> Iterator[tuple[Run, Path]]:
    """Yield the record and the work folder of a stage that continues a killed process."""
    item = {"phase": phase, "method": method, "seed": seed}
    read = read_stage_inputs(stage, params, inputs, phase, method)
    with (
        hold_work_folder(execution_subpath(stage, **item), read.key()) as work,
        record_run(stage, params, work=work, inputs=read, **item) as run,
    ):
        yield run, work


@contextmanager
def record_measurement(
    stage: str, params: Config, phase: str, method: str, seed: int
) -> Iterator[tuple[Run, KeptParts]]:
    """Yield the record of a measurement, and its parts, which survive a kill."""
    inputs = [Path("artifacts/data", phase), Path("artifacts", phase, method, str(seed))]
    item = {"phase": phase, "method": method, "seed": seed}
    with record_resumable(stage, params, inputs, **item) as (run, work):
        yield run, KeptParts(work, run.inputs)


@contextmanager
def hold_lock(path: Path, describe_holder: Callable[[], str]) -> Iterator[None]:
    """Hold the lock file ``path``; UserError with ``describe_holder()`` if another process does."""
    lock = FileLock(path, timeout=0)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise UserError(describe_holder()) from None
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise UserError(f"{path}: cannot be written, {why}; mend that") from error
    try:
        yield
    finally:
        lock.release()
