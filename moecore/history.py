"""The record of a run: a folder that the stage writes, and the truth that MLflow only mirrors.

``artifacts/history/<stage>/[phase/]<method>/<seed>/`` holds history.jsonl, figures (PNG), tables (JSON) and texts. It grows
in a git-ignored working folder and is published whole at the end, whatever the end was.
"""

import hashlib
import importlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Timer
from typing import Any

from moecore.config import Config
from moecore.files import StageError, whole_file, whole_folder, write_json
from moecore.history_file import NAME, before, encode, flatten, number, plain, points, read_lines, scalars, seconds

FOLLOW_AFTER = 30.0  # seconds: shorter stages are imported by `tracking sync`, as starting MLflow takes a process 5 s of a core


class Run:
    """What a stage reports to; ``record`` makes it. ``folder`` holds the history while the stage runs."""

    def __init__(self, folder: Path, item: str, header: dict, earlier: list[dict]) -> None:
        self.folder, self.header = folder, header
        self.results, self.measured = Path("results", f"{item}.json"), Path("artifacts/measured", f"{item}.json")
        self._earlier, self._lines = earlier, [] if earlier else [header]
        folder.mkdir(parents=True, exist_ok=True)
        self._rewrite([*earlier, *self._lines])
        if earlier:
            self._write(resumed=True, pid=os.getpid(), host=platform.node())

    @property
    def uid(self) -> str:
        return self.header["uid"]

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """One point per name, at a step that grows; points that a killed process logged from this step on are dropped first.

        Raises ValueError where a name was already logged at this step or a later one.
        """
        if self._earlier:
            kept, self._earlier = before(self._earlier, step), []
            self._rewrite([*kept, *self._lines])
        if twice := [name for name in values if self._last.get(name, -1) >= step]:
            raise ValueError(f"step {step} of {', '.join(twice)} is not after step {self._last[twice[0]]}, which is logged")
        self._last |= dict.fromkeys(values, step)
        self._write(step=int(step), values={name: number(value) for name, value in values.items()})

    def summary(self, values: Mapping[str, Any]) -> None:
        """What the run found, nested as wished (not-finite numbers as null).

        All of it goes to artifacts/measured/<stage>/…json, for the report; the numbers outside of lists go to
        results/<stage>/…json, which git keeps and ``dvc metrics`` shows.
        """
        values = plain(values)
        write_json(self.measured, values)
        write_json(self.results, scalars(values))
        self._write(summary=flatten(scalars(values)))

    def draw(self, figure: str, *data: Any) -> None:
        """The figure that moecore.report.figures draws of ``data``, as figures/<figure>.png.

        Imported by name: a drawing is no input of a result, so a changed figure makes no trained model stale.
        """
        self.figure(figure, getattr(importlib.import_module("moecore.report.figures"), figure)(*data))

    def figure(self, name: str, figure: Any) -> None:
        """A matplotlib figure as figures/<name>.png."""
        with self._file("figures", name, "png") as path:
            figure.savefig(path, format="png", dpi=150, bbox_inches="tight")

    def table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Rows as tables/<name>.json."""
        with self._file("tables", name, "json") as path:
            path.write_text(json.dumps(plain(rows), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    def text(self, name: str, text: str) -> None:
        """A text as texts/<name>.txt."""
        with self._file("texts", name, "txt") as path:
            path.write_text(text, encoding="utf-8")

    def tag(self, name: str, value: Any) -> None:
        """A property of this execution, such as the device."""
        self._write(tags={name: plain(value)})

    def dataset(self, card: Mapping[str, Any]) -> None:
        """The card of the prepared data that the run reads."""
        self._write(dataset=plain(card))

    def model(self, folder: str | Path) -> None:
        """The folder of the trained model; MLflow gets a copy with its signature."""
        self._write(model=str(folder))

    def end(self, status: str, error: str | None = None) -> None:
        lines = read_lines(self.folder)
        now = time.time()
        spent = seconds([*lines, {"t": now}])
        self._write(status=status, seconds=spent, **({"error": error} if error else {}))

    @contextmanager
    def _file(self, group: str, name: str, ending: str) -> Iterator[Path]:
        path = self.folder / group / f"{name}.{ending}"
        with whole_file(path) as temporary:
            yield temporary
        self._write(file=f"{group}/{name}.{ending}")

    def _write(self, **line: Any) -> None:
        line = {"t": round(time.time(), 3), **line}
        self._lines.append(line)
        try:
            with open(self.folder / NAME, "a", encoding="utf-8") as handle:
                handle.write(encode(line))
        except OSError as error:
            raise StageError(f"{self.folder / NAME}: could not be written, {error.strerror.lower()}") from error

    def _rewrite(self, lines: list[dict]) -> None:
        self._last = {name: step for step, _, values in points(lines) for name in values}
        with whole_file(self.folder / NAME) as temporary:
            temporary.write_text("".join(map(encode, lines)), encoding="utf-8")


@contextmanager
def record(
    stage: str, params: Config | None = None, *, method: str | None = None, seed: int | None = None, phase: str | None = None, work: Path | None = None
) -> Iterator[Run]:
    """Record one execution of a stage; the Run is published to artifacts/history/ when the block ends, however it ends.

    work: the folder of the stage's checkpoint, which outlives the process. A history of a killed process found there goes on under
    its own id; what it logged after the checkpoint is dropped at the first point that is logged again. Without ``work`` the run
    starts afresh. An error ends the run as FAILED, an interrupt as KILLED, and is raised again.
    """
    item = "/".join(str(part) for part in (stage, phase, method, seed) if part is not None)
    published, folder = Path("artifacts/history") / item, (work or Path(".state/runs") / item) / "history"
    earlier = [line for line in read_lines(folder) if "status" not in line] if work else []
    header = earlier[0] if earlier else _header(stage, params, method=method, seed=seed, phase=phase)
    if not earlier:
        shutil.rmtree(folder, ignore_errors=True)
    run = Run(folder, item, header, earlier)
    follower = _follow_later(folder, published)
    try:
        yield run
    except BaseException as error:
        interrupted = isinstance(error, (KeyboardInterrupt, SystemExit))
        run.end("KILLED" if interrupted else "FAILED", f"{type(error).__name__}: {error}")
        _publish(folder, published)
        raise
    else:
        run.end("FINISHED")
        _publish(folder, published)
        if work is None:  # a given folder is removed by its owner, together with the checkpoint
            shutil.rmtree(folder)
    finally:
        follower.cancel()
        _tell(folder.parent / "tracking.log")


def _tell(log: Path) -> None:
    """Print the one line that a mirror leaves when it gives up."""
    if log.is_file():
        print(log.read_text(encoding="utf-8").strip(), file=sys.stderr)
        log.unlink()


def _publish(folder: Path, published: Path) -> None:
    with whole_folder(published) as temporary:
        shutil.copytree(folder, temporary, dirs_exist_ok=True)


def _header(stage: str, params: Config | None, **item: Any) -> dict:
    settings = plain(params) if params is not None else {}
    canonical = json.dumps([stage, item, settings], sort_keys=True)
    return {
        "uid": uuid.uuid4().hex, "stage": stage, "dvc_stage": os.environ.get("DVC_STAGE"), **item,
        "params": flatten(settings), "params_hash": hashlib.sha256(canonical.encode()).hexdigest()[:16],
        **_git(), "command": " ".join(sys.argv), "host": platform.node(), "pid": os.getpid(), "python": platform.python_version(),
        "t": round(time.time(), 3),
    }  # fmt: skip


def _git() -> dict[str, Any]:
    """The commit, and whether a tracked source or settings file differs from it; both null outside a repository."""
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10)
        paths = ["*.py", "*params.yaml", "*dvc.yaml"]
        status = subprocess.run(["git", "status", "--porcelain", "--untracked-files=no", "--", *paths], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return {"commit": None, "dirty": None}
    return {"commit": commit.stdout.strip(), "dirty": bool(status.stdout.strip())} if commit.returncode == 0 else {"commit": None, "dirty": None}


def _follow_later(folder: Path, published: Path) -> Timer:
    """Start the mirror into MLflow as a process of its own, once the stage has lived for a while."""

    def follow() -> None:
        command = [sys.executable, "-m", "moecore.tracking", "follow", str(folder), str(published), "--parent", str(os.getpid())]
        silent = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        subprocess.Popen(command, start_new_session=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}, **silent)

    timer = Timer(float(os.environ.get("MOECORE_FOLLOW_AFTER", FOLLOW_AFTER)), follow)
    timer.daemon = True
    if os.environ.get("MOECORE_TRACKING", "on") != "off":
        timer.start()
    return timer
