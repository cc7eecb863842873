"""The file ``history.jsonl`` of a run: one JSON object per line, readable after any kill.

The first line is the header. Other lines have exactly one of ``values`` or ``routing`` (both with
``step``), ``summary``, ``tags``, ``dataset``, ``model``, ``file`` or ``resumed``; the last line has
``status``. All have ``t``, seconds since 1970, and ``clock``, seconds of a monotonic clock, whose
differences within one process are durations.

From ``ExecutionHistory`` on: the histories of a study on disk, and which are up to date.
"""

import hashlib
import json
import math
import os
import platform
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import chain, pairwise
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

import psutil
import yaml

from moecore.core import config, source_layout
from moecore.core.files import UserError, parse_intact_lines, to_jsonable
from moecore.study.yaml_document import load_yaml_document
from moecore.training.monitor import RoutingPoint

GIT_SECONDS = 10.0  # longest wait for git when a run starts
SOURCE_PATTERNS = ("*.py", "*params.yaml", "*dvc.yaml")  # a change of these makes a run "dirty"
HISTORY_FOLDERS = ("artifacts/history", ".state")  # published, and of current runs


def build_header(stage: str, params: config.Config | None, **item: Any) -> dict[str, Any]:
    settings = {} if params is None else to_jsonable(params)
    canonical = json.dumps([stage, item, settings], sort_keys=True)
    return {
        "uid": uuid.uuid4().hex,
        "stage": stage,
        "dvc_stage": os.environ.get("DVC_STAGE"),
        **item,
        "params": flatten_keys(settings),
        "params_hash": hashlib.sha256(canonical.encode()).hexdigest()[:16],
        **_code_state(),
        "command": " ".join(sys.argv),
        "host": platform.node(),
        "pid": os.getpid(),
        "python": platform.python_version(),
        "versions": source_layout.package_versions(source_layout.allowed_packages()),
        **read_clocks(),
    }


def read_clocks() -> dict[str, float]:
    return {"t": round(time.time(), 3), "clock": round(time.monotonic(), 3)}


def execution_subpath(stage: str, phase: str | None, method: str | None, seed: int | None) -> str:
    """Return a run's path below artifacts/history: ``stage/phase/method/seed``, omitting None."""
    return "/".join(str(part) for part in (stage, phase, method, seed) if part is not None)


def _code_state() -> dict[str, Any]:
    """Return the git commit, and "dirty": whether sources differ from it; both None without git."""
    # A study's run folder is a git repository without code.
    project = source_layout.project_of_run_folder(Path())
    status_command = ("status", "--porcelain", "--untracked-files=no", "--", *SOURCE_PATTERNS)
    commit = source_layout.run_git(project, "rev-parse", "HEAD", timeout=GIT_SECONDS)
    status = source_layout.run_git(project, *status_command, timeout=GIT_SECONDS)
    if commit is None or status is None:
        return {"commit": None, "dirty": None}
    return {"commit": commit, "dirty": status != ""}


HISTORY_FILE = "history.jsonl"
NUMBER_TYPES = (int, float)
TEXT_OR_NONE = (str, NoneType)
TYPES_BY_KEY: dict[str, Any] = {
    **dict.fromkeys(("t", "clock", "seconds"), NUMBER_TYPES),
    **dict.fromkeys(("values", "routing", "summary", "tags", "dataset", "params"), dict),
    **dict.fromkeys(("uid", "stage", "host", "status", "model", "file"), str),
    **dict.fromkeys(("dvc_stage", "phase", "method"), TEXT_OR_NONE),
    **dict.fromkeys(("step", "pid"), int),
    "seed": (int, NoneType),
}
KEYS_REQUIRED_WITH = {  # key → other keys of its line
    "uid": ("stage", "dvc_stage", "phase", "method", "seed", "params", "host", "pid"),
    **dict.fromkeys(("values", "routing"), ("step",)),
    "pid": ("host",),
    "status": ("seconds",),
}
MAX_TIME = 1e12  # seconds since 1970; also refuses non-finite numbers


def is_history_line(line: Any) -> bool:
    if not isinstance(line, dict) or "t" not in line:
        return False
    for key, value in line.items():
        if not isinstance(value, TYPES_BY_KEY.get(key, object)):
            return False
        if any(required not in line for required in KEYS_REQUIRED_WITH.get(key, ())):
            return False
    if not abs(line["t"]) < MAX_TIME:
        return False
    try:
        tuple(logged_points([line]))
        tuple(routing_points([line]))
    except (TypeError, ValueError, OverflowError):
        return False
    return True


class HistoryReader:
    """Reads a history.jsonl that still grows; each ``read`` parses only the new lines."""

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder, HISTORY_FILE)
        self._forget()

    def read(self) -> list[dict]:
        """Return all complete lines, oldest first; [] without a history."""
        # The list is the same object as before if lines were only added, else a new one.
        try:
            with open(self.path, "rb") as handle:
                # A resumed run truncates its history at the checkpoint. If the last line is still
                # in its place, so are all earlier lines, as every line has a different time.
                handle.seek(self._size - len(self._last))
                if handle.read(len(self._last)) != self._last:
                    self._forget()
                    handle.seek(0)
                for line, value in parse_intact_lines(handle.read(), is_history_line):
                    self.lines.append(value)
                    self._size += len(line)
                    self._last = line
        except (FileNotFoundError, NotADirectoryError):
            self._forget()
        except OSError as error:
            why = (error.strerror or str(error)).lower()
            raise UserError(f"{self.path}: cannot be read, {why}; delete it") from None
        return self.lines

    def _forget(self) -> None:
        self.lines: list[dict] = []
        self._size = 0  # bytes of the lines
        self._last = b""  # the last line


def read_lines(folder: str | Path) -> list[dict]:
    return HistoryReader(folder).read()


def lines_before_step(lines: list[dict], step: int) -> list[dict]:
    for index, line in enumerate(lines):
        if line.get("step", -1) >= step or "status" in line:
            return lines[:index]
    return lines


def spent_seconds(lines: list[dict]) -> float:
    """Return the seconds that a run computed, without pauses between a kill and its resume."""
    spans = []
    for line, after in pairwise(lines):
        if "resumed" not in after:  # earlier versions had no ``clock``
            name = "clock" if "clock" in line and "clock" in after else "t"
            spans.append(after[name] - line[name])
    return round(sum(spans, 0.0), 3)


def encode_line(line: Mapping[str, Any]) -> str:
    return json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n"


def logged_points(lines: list[dict]) -> Iterator[tuple[int, float, dict[str, float]]]:
    """Yield (step, seconds since 1970, name → value) of every line with values."""
    for line in lines:
        if "values" in line:
            values = {name: float(value) for name, value in line["values"].items()}
            yield line["step"], line["t"], values


def routing_points(lines: list[dict]) -> Iterator[tuple[float, RoutingPoint]]:
    """Yield (seconds since 1970, point) of every line with routing statistics."""
    for line in lines:
        if "routing" in line:
            yield line["t"], RoutingPoint.model_validate({"step": line["step"], **line["routing"]})


def json_number(value: Any) -> float | str:
    value = float(value)
    return value if math.isfinite(value) else str(value)


def flatten_keys(value: Any, prefix: str = "") -> dict[str, Any]:
    """Return dotted key → value of nested mappings; lists of mappings are numbered from 0."""
    if isinstance(value, list) and any(isinstance(inner, (Mapping, list)) for inner in value):
        value = {str(index): inner for index, inner in enumerate(value)}
    if not isinstance(value, Mapping):
        return {prefix: value}
    flat = {}
    for key, inner in value.items():
        flat |= flatten_keys(inner, f"{prefix}.{key}" if prefix else str(key))
    return flat


def keep_numbers(value: Mapping[str, Any]) -> dict[str, Any]:
    numbers = {}
    for name, inner in value.items():
        if isinstance(inner, Mapping):
            inner = keep_numbers(inner)
        if isinstance(inner, (int, float, dict)) and inner != {}:
            numbers[name] = inner
    return numbers


def read_dvc_locks(folder: Path = Path()) -> dict[str, dict[str, Any]]:
    """Return stage → its entry in the dvc.lock files of a project; UserError if one is damaged."""
    # The rules of YAML 1.1 do no harm here; libyaml is 3 times as fast as ruamel's loader.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    stages: dict[str, dict[str, Any]] = {}
    for lock in source_layout.list_dvc_files(folder, "dvc.lock"):
        try:
            if (content := yaml.load(lock.read_text(encoding="utf-8"), Loader=loader)) is None:
                raise ValueError("empty, as after a `dvc repro` that was killed while it wrote")
            for name, entry in content.get("stages", {}).items():
                files = [file for key in ("deps", "outs") for file in entry.get(key, ())]
                if not all("path" in file for file in files):
                    raise TypeError(f"a file of {name} without its path")
                stages[name] = entry
        except (yaml.YAMLError, ValueError, TypeError, AttributeError, RecursionError) as error:
            why = (str(error) or type(error).__name__).splitlines()[0]
            mend = "delete it: what ran here is then taken from DVC's cache; or restore a committed"
            raise UserError(f"{lock}: is not as DVC writes it ({why}); {mend} one") from error
    return stages


class ExecutionHistory(NamedTuple):
    folder: Path
    lines: list[dict]

    @property
    def header(self) -> dict[str, Any]:
        return self.lines[0]

    @property
    def subpath(self) -> str:
        """The run's path below artifacts/history and artifacts/measured."""
        names = ("stage", "phase", "method", "seed")
        return execution_subpath(*(self.header[name] for name in names))

    @property
    def has_ended(self) -> bool:
        return "status" in self.lines[-1]

    def run_state(self) -> tuple[str, float]:
        """Return (MLflow status, last line's seconds since 1970); KILLED if the process is gone."""
        end = self.lines[-1]
        if self.has_ended:
            return end["status"], end["t"]
        writer = next(line for line in reversed(self.lines) if "pid" in line)
        is_running = is_process_running(writer["host"], writer["pid"], writer["t"])
        return "RUNNING" if is_running else "KILLED", end["t"]


def is_process_running(host: str, pid: int, at: float) -> bool:
    """Return whether a process seen ``at`` s since 1970 still runs; True if on another host."""
    # The system reuses process numbers: a process that began later is another one.
    if host != platform.node():
        return True
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and process.create_time() <= at + 1
    except psutil.NoSuchProcess:
        return False


def read_histories(study: Path, readers: dict[Path, HistoryReader]) -> dict[str, ExecutionHistory]:
    """Return uid → newest history of each run of a study, finished or still growing."""
    # readers: by folder, reused between calls; new readers are added.
    newest: dict[str, ExecutionHistory] = {}
    for place, inner, files in chain.from_iterable(os.walk(study / top) for top in HISTORY_FOLDERS):
        # Skip folders that are being written or removed
        inner[:] = sorted(name for name in inner if not name.endswith((".part", ".removed")))
        if HISTORY_FILE not in files:
            continue
        inner.clear()
        folder = Path(place)
        lines = readers.setdefault(folder, HistoryReader(folder)).read()
        if lines and "uid" in lines[0]:
            newest_so_far = newest.setdefault(lines[0]["uid"], ExecutionHistory(folder, lines))
            if lines[-1]["t"] > newest_so_far.lines[-1]["t"]:
                newest[lines[0]["uid"]] = ExecutionHistory(folder, lines)
    return newest


def list_locked_outputs(study: Path) -> frozenset[str] | None:
    locks = source_layout.list_dvc_files(study, "dvc.lock")
    newest = max((lock.stat().st_mtime_ns for lock in locks), default=None)
    if newest is None:
        return None
    return _read_locked_outputs(study, newest)


@cache
def _read_locked_outputs(study: Path, written: int) -> frozenset[str]:
    outs = [out for stage in read_dvc_locks(study).values() for out in stage.get("outs", ())]
    return frozenset(out["path"] for out in outs)


def allow_packages_and_list_methods(study: Path) -> list[str]:
    """Allow imports of the packages that a params.yaml lists; return ``run.methods``, or []."""
    # Without a readable file there are none: `moecore check` reports its errors.
    source_layout.allow_packages((), ())
    try:
        document = load_yaml_document(study / "params.yaml")
        source_layout.allow_packages(document.packages, document.folders)
        return list(document.data["run"]["methods"])
    except (UserError, KeyError, TypeError):
        return []
