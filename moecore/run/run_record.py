"""Records the run of a stage in a folder, and resumes killed runs; MLflow only displays it.

``artifacts/history/<stage>/[phase/]<method>/<seed>/`` holds history.jsonl and tables (JSON). It is
published atomically at the end, also of a failed run. A killed run continues in a work folder that
is named by a hash of all inputs.
"""

import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from moecore.core import config, files
from moecore.run import history_file
from moecore.run.history_file import HISTORY_FILE, build_header, execution_subpath, read_lines
from moecore.run.stage_inputs import StageInputs, build_stage_inputs
from moecore.training.monitor import RoutingPoint


class Run:
    """The record of one run of a stage; its history.jsonl grows in ``folder``."""

    def __init__(
        self, folder: Path, path: str, header: dict, earlier: list[dict], inputs: StageInputs
    ) -> None:
        self.folder = folder
        self.inputs = inputs
        self.header = header
        self.measured = Path("artifacts/measured", f"{path}.json")
        self._earlier = earlier  # lines of a killed process, truncated at the first logged step
        self._lines = [] if earlier else [header]
        folder.mkdir(parents=True, exist_ok=True)
        self._rewrite([*earlier, *self._lines])
        if earlier:
            self._write(resumed=True, pid=os.getpid(), host=platform.node())

    @property
    def uid(self) -> str:
        return self.header["uid"]

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Append metrics at a step; ValueError unless it is after the last step of each metric."""
        # Points of a killed process at this step or later are removed.
        if self._earlier:
            earlier = history_file.lines_before_step(self._earlier, step)
            self._earlier = []
            self._rewrite([*earlier, *self._lines])
        repeated = [name for name in values if self._last.get(name, -1) >= step]
        if repeated:
            names = ", ".join(repeated)
            last = self._last[repeated[0]]
            raise ValueError(f"step {step} of {names} is not after step {last}, which is logged")
        self._last |= dict.fromkeys(values, step)
        numbers = {name: history_file.json_number(value) for name, value in values.items()}
        self._write(step=int(step), values=numbers)

    def log_routing(self, point: RoutingPoint) -> None:
        self.last_routing = point
        self._write(step=point.step, routing=point.model_dump(mode="json", exclude={"step"}))

    def write_result(self, result: config.Config) -> None:
        """Write the result to artifacts/measured, and its numbers to the history."""
        # Non-finite numbers become null. MLflow shows the numbers outside of lists.
        from moecore.measure.values import Found  # imports torch

        data = files.to_jsonable(result)
        files.write_json_sha256(self.measured, data)
        numbers = result.numbers() if isinstance(result, Found) else history_file.keep_numbers(data)
        self._write(summary=history_file.flatten_keys(numbers))

    def write_table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        file = f"tables/{name}.json"
        files.write_json(self.folder / file, files.to_jsonable(rows))
        self._write(file=file)

    def log_tag(self, name: str, value: Any) -> None:
        self._write(tags={name: files.to_jsonable(value)})

    def log_dataset(self, card: Mapping[str, Any]) -> None:
        self._write(dataset=files.to_jsonable(card))

    def log_model_folder(self, folder: str | Path) -> None:
        """Append the folder of the trained model, which MLflow copies."""
        self._write(model=str(folder))

    def log_end(self, status: str, error: str | None = None) -> None:
        """Append the last line: the status (FINISHED, FAILED or KILLED) and the seconds spent."""
        spent = history_file.spent_seconds([*read_lines(self.folder), history_file.read_clocks()])
        reason = {} if error is None else {"error": error}
        self._write(status=status, seconds=spent, **reason)

    def _write(self, **line: Any) -> None:
        line = {**history_file.read_clocks(), **line}
        self._lines.append(line)
        files.append_line(self.folder / HISTORY_FILE, history_file.encode_line(line))

    def _rewrite(self, lines: list[dict]) -> None:
        points = history_file.logged_points(lines)
        self._last = {name: step for step, _, values in points for name in values}
        routing = (point for _, point in history_file.routing_points(lines[::-1]))
        self.last_routing = next(routing, None)
        text = "".join(map(history_file.encode_line, lines))
        files.write_atomic(self.folder / HISTORY_FILE, text)


@contextmanager
def record_run(
    stage: str,
    params: config.Config | None = None,
    *,
    method: str | None = None,
    seed: int | None = None,
    phase: str | None = None,
    work: Path | None = None,  # of the stage's checkpoint: a killed process's history continues
    inputs: StageInputs | None = None,  # None: only the settings
) -> Iterator[Run]:
    """Record a run of a stage; publish its history to artifacts/history, even if it fails."""
    # An error ends the run as FAILED, an interrupt as KILLED; both are raised again. Edited inputs
    # are a UserError at the end.
    if inputs is None:
        inputs = StageInputs(params, (), method=method, data=phase)
    path = execution_subpath(stage, phase, method, seed)
    published = Path("artifacts/history", path)
    folder = (work or Path(".state/runs", path)) / "history"
    earlier = []
    if work is not None:
        earlier = [line for line in read_earlier_lines(folder, work) if "status" not in line]
    if not earlier:
        shutil.rmtree(folder, ignore_errors=True)
    header = (earlier or [build_header(stage, params, method=method, seed=seed, phase=phase)])[0]
    run = Run(folder, path, header, earlier, inputs)
    try:
        yield run
        inputs.refuse_all_edits()
    except BaseException as error:
        interrupted = isinstance(error, (KeyboardInterrupt, SystemExit))
        try:
            run.log_end("KILLED" if interrupted else "FAILED", f"{type(error).__name__}: {error}")
            _publish_history(folder, published)
        except files.FileAccessError as disk:
            if not isinstance(error, files.FileAccessError):  # a full disk is reported once
                print(disk, file=sys.stderr)
        raise
    run.log_end("FINISHED")
    _publish_history(folder, published)
    if work is None:  # else the caller removes it together with the checkpoint
        shutil.rmtree(folder)


def read_earlier_lines(folder: Path, work: Path) -> list[dict]:
    """Return the undamaged lines of a killed run's history, with a warning about damaged ones."""
    # Without its header a history is lost, but the training still continues from its checkpoint.
    path = folder / HISTORY_FILE
    lines = read_lines(folder)
    if lines and "uid" not in lines[0]:
        lines = []
    written = path.read_bytes().count(b"\n") if path.is_file() else 0
    has_checkpoint = any(work.glob("checkpoint.safetensors")) or any(work.glob("sharded.json"))
    if has_checkpoint and len(lines) < max(1, written):
        damage = f"{written - len(lines)} of {written} lines are damaged" if written else "is gone"
        result = "the training goes on from its checkpoint, with the remaining part of its curve"
        print(f"{path}: {damage}; {result}", file=sys.stderr)
    return lines


def _publish_history(folder: Path, published: Path) -> None:
    with files.atomic_folder(published) as temporary:
        shutil.copytree(folder, temporary, dirs_exist_ok=True)


@contextmanager
def hold_work_folder(item: str, key: str) -> Iterator[Path]:
    """Lock and yield ``.state/<stage run>/<input hash>``, for checkpoints; remove it on success."""
    # item: path of the execution, such as ``pretrain/vmoe/0``. key: a hash of all inputs, so that a
    # stage continues only work with the same inputs.
    home = Path(".state") / item
    busy = f"{home}: another process is at work on {item}; wait for it, or end it, and start again"
    with hold_lock(home / "lock", lambda: busy):
        work = home / key
        work.mkdir(exist_ok=True)
        yield work
        for old in [path for path in home.iterdir() if path.is_dir()]:
            # Renamed first: a kill in between leaves no incomplete folder to continue
            doomed = old.with_name(f".{old.name}.{os.getpid()}.removed")
            os.replace(old, doomed)
            shutil.rmtree(doomed)


@contextmanager
def record_resumable_run(
    stage: str,
    params: config.Config,
    inputs: Sequence[str | Path],
    *,
    phase: str | None = None,
    method: str | None = None,
    seed: int | None = None,
) -> Iterator[tuple[Run, Path]]:
    """Yield the record and the work folder of a stage that resumes after a kill."""
    item = {"phase": phase, "method": method, "seed": seed}
    hashed_inputs = build_stage_inputs(stage, params, inputs, phase, method)
    with (
        hold_work_folder(execution_subpath(stage, **item), hashed_inputs.combined_hash()) as work,
        record_run(stage, params, work=work, inputs=hashed_inputs, **item) as run,
    ):
        yield run, work


@contextmanager
def hold_lock(path: Path, describe_holder: Callable[[], str]) -> Iterator[None]:
    """Hold the lock file ``path``; if it is taken, UserError with ``describe_holder``'s text."""
    lock = FileLock(path, timeout=0)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise files.UserError(describe_holder()) from None
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise files.UserError(f"{path}: cannot be written, {why}; mend that") from error
    try:
        yield
    finally:
        lock.release()


SECONDS_BETWEEN_LINES = 10.0  # seconds between two lines in a log
SECONDS_BETWEEN_REDRAWS = 0.2
GPU_MEMORY_TAG = "runtime.card_gb"  # tag: GB of GPU memory that a training reserved
LINE_SECONDS_ENV = "MOECORE_LINE_SECONDS"  # overrides SECONDS_BETWEEN_LINES


class ProgressLines:
    """Prints progress to stderr, at most once per SECONDS_BETWEEN_LINES, and at the end."""

    def __init__(self, title: str, total: int) -> None:
        self.title = title
        self.total = total
        self.is_terminal = sys.stderr.isatty()
        self.wait = float(os.environ.get(LINE_SECONDS_ENV, SECONDS_BETWEEN_LINES))
        if self.is_terminal:
            self.wait = SECONDS_BETWEEN_REDRAWS
        self.begun = time.monotonic()
        self.printed = self.begun
        self.first: int | None = None
        self.last = ""
        self.note = ""  # shown below the line, until the next one

    def update(self, step: int, **values: float) -> None:
        now = time.monotonic()
        if self.first is None:  # the first step includes the warm-up: measure the rate after it
            self.first = step
            self.begun = now
        done = f"{step}/{self.total} ({step / max(1, self.total):.0%})"
        remaining = ""
        if step > self.first:
            seconds_per_step = (now - self.begun) / (step - self.first)
            remaining = f", {format_duration((self.total - step) * seconds_per_step)} left"
        note = f"\n  {self.note}" if self.note else ""
        shown = "".join(f", {name.replace('_', ' ')} {value:.4g}" for name, value in values.items())
        self.last = f"{self.title}: {done}{remaining}{shown}{note}"
        if now - self.printed >= self.wait:
            self.flush(now)

    def print_warning(self, line: str) -> None:
        if self.is_terminal:
            print(file=sys.stderr)
        print(f"{self.title}: {line}", file=sys.stderr, flush=True)

    def flush(self, now: float) -> None:
        if self.last and self.is_terminal:
            line = self.last.replace("\n", "; ")[: shutil.get_terminal_size().columns - 1]
            print(f"\r\x1b[2K{line}", end="", file=sys.stderr, flush=True)
        elif self.last:
            print(self.last, file=sys.stderr, flush=True)
        self.printed = now
        self.last = ""


@contextmanager
def printing_progress(title: str, total: int) -> Iterator[ProgressLines]:
    bar = ProgressLines(title, total)
    try:
        yield bar
    finally:
        bar.flush(time.monotonic())
        if bar.is_terminal:
            print(file=sys.stderr)


def format_duration(seconds: float) -> str:
    """Return seconds as text: ``1:02:03`` (h:mm:ss) or ``2:03`` (m:ss)."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{rest:02}"
    return f"{minutes}:{rest:02}"
