"""The live mirror: a process beside a running stage that can neither fail nor slow it."""

import os
import time
from pathlib import Path

from moecore.history_file import NAME
from moecore.tracking.mirror import Mirror, read
from moecore.tracking.process import runs
from moecore.tracking.store import connect, experiment, experiment_name, uri

EVERY = 5.0  # seconds
FAILURES = 2  # the second one in a row ends the mirror


def follow(working: Path, published: Path, parent: int) -> None:
    """Mirror a history until it ends or its process is gone. Gives up when the store fails twice, with one line in the stage's log."""
    os.nice(19)
    mirror, failures, seen = None, 0, None
    while failures < FAILURES:
        ending = not runs(parent)
        lines, folder = read(working, published)
        ending |= not lines or "status" in lines[-1]
        state = _state(folder)
        try:
            if lines and (state != seen or ending):
                mirror = mirror or Mirror(connect(), _experiment(), lines)
                mirror.update(lines, folder)
            seen, failures = state, 0
        except Exception as error:  # whatever a store does, the stage goes on
            failures += 1
            if failures == FAILURES:
                _say(working, error)
        if ending and not failures:
            return
        time.sleep(1 if failures else EVERY)


def _experiment() -> str:
    return experiment(connect(), experiment_name(Path.cwd()))


def _state(folder: Path) -> tuple[int, int] | None:
    try:
        stat = (folder / NAME).stat()
    except FileNotFoundError:
        return None
    return stat.st_size, stat.st_mtime_ns


def _say(working: Path, error: Exception) -> None:
    """The stage prints this file when it ends."""
    reason = str(error).strip().split("\n")[0][:300] or type(error).__name__
    if working.parent.is_dir():
        text = f"tracking: {uri()}: gave up ({reason}); the run is complete on disk, `python -m moecore.tracking sync` imports it later\n"
        (working.parent / "tracking.log").write_text(text, encoding="utf-8")
