"""One driver in a project at a time, and its DVC processes, which end when it does."""

import json
import os
import runpy
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moecore.core.files import write_json
from moecore.run.resume import hold_lock
from moecore.run.stage_entry import end_with_parent

LOCK = Path(".state/driver.lock")  # held by the process that runs the stages
HOLDER = "driver.json"  # beside it: which process that is, since when


@contextmanager
def hold_project(path: Path = LOCK) -> Iterator[None]:
    """Hold the project while its stages are run.

    Raises UserError that says who does, since when, and what to do.
    """
    holder = path.with_name(HOLDER)
    with hold_lock(path, lambda: f"{path.parent}: {describe_driver(holder)}"):
        write_json(holder, {"pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S")})
        yield


def describe_driver(holder: Path) -> str:
    """Return who runs the stages, and what to do."""
    mend = "wait for it, or end it and start again"
    try:
        driver = json.loads(holder.read_text(encoding="utf-8"))
        who = f"process {driver['pid']} has been running the stages of this folder since "
        return f"{who}{driver['since']}; {mend} (`kill {driver['pid']}`)"
    except (OSError, ValueError, KeyError, TypeError):  # it has not written its name yet
        return f"another process is running the stages of this folder; {mend}"


def dvc_command(*words: str) -> list[str]:
    """Return the command line of a DVC process that ends with the one that starts it."""
    return [sys.executable, "-m", "moecore.pipeline.project", *words]


if __name__ == "__main__":
    end_with_parent()
    runpy.run_module("dvc", run_name="__main__", alter_sys=True)
