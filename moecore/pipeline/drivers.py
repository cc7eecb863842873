"""One driver in a project at a time, and its DVC processes, which end when it does."""

import fcntl
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moecore.core.files import UserError
from moecore.run.stage import end_with_parent

HELD = Path(".state/driver.json")  # who drives, since when


@contextmanager
def alone(path: Path = HELD) -> Iterator[None]:
    """Hold the project while its stages are run.

    Raises UserError that says who does, since when, and what to do.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{path.parent}: {_who(path)}") from None
        file.truncate(0)
        file.write(json.dumps({"pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}))
        file.flush()
        yield


def _who(path: Path) -> str:
    mend = "wait for it, or end it and start again"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        who = f"process {found['pid']} has been running the stages of this folder since "
        return f"{who}{found['since']}; {mend} (`kill {found['pid']}`)"
    except (ValueError, KeyError, TypeError):  # it has not written its name yet
        return f"another process is running the stages of this folder; {mend}"


def dvc(*words: str) -> list[str]:
    """The command line of a DVC process that ends with the one that starts it."""
    return [sys.executable, "-m", "moecore.pipeline.drivers", *words]


if __name__ == "__main__":
    end_with_parent()
    from dvc.cli import main  # a second, that those who import this file do not need

    sys.exit(main(sys.argv[1:]))
