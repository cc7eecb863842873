"""One driver in a project at a time, and its DVC processes, which end when it does."""

import fcntl
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moecore.core.files import UserError, room_for, whole_file
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
        who = json.dumps({"pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S")})
        with room_for(path, len(who)):
            file.truncate(0)
            file.write(who)
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


def lock_whole() -> None:
    """Let DVC of this process write its lock file whole or not at all.

    By itself it empties the file first, so that a full disk or a kill loses what all stages ran
    with.
    """
    from dvc.utils.serialize import _common

    def dump(path: str, data: Any, dumper: Callable[..., Any], **words: Any) -> None:
        words.pop("fs", None)  # the local one
        with whole_file(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
            dumper(data, file, **words)

    _common._dump_data = dump  # type: ignore[assignment]


if __name__ == "__main__":
    end_with_parent()
    from dvc.cli import main  # a second, that those who import this file do not need

    lock_whole()
    sys.exit(main(sys.argv[1:]))
