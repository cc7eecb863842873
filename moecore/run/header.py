"""The first line of a history: what was executed, with which settings, by which code, where."""

import hashlib
import json
import os
import platform
import subprocess
import sys
import time
import uuid
from typing import Any

from moecore.core.config import Config
from moecore.core.plain import plain
from moecore.run.history_file import flatten

SOURCES = ("*.py", "*params.yaml", "*dvc.yaml")  # a change of these makes a run "dirty"


def new_header(stage: str, params: Config | None, **item: Any) -> dict[str, Any]:
    """The header of a new execution, with an id of its own; ``item``: phase, method and seed."""
    settings = {}
    if params is not None:
        settings = plain(params)
    canonical = json.dumps([stage, item, settings], sort_keys=True)
    return {
        "uid": uuid.uuid4().hex,
        "stage": stage,
        "dvc_stage": os.environ.get("DVC_STAGE"),
        **item,
        "params": flatten(settings),
        "params_hash": hashlib.sha256(canonical.encode()).hexdigest()[:16],
        **_code(),
        "command": " ".join(sys.argv),
        "host": platform.node(),
        "pid": os.getpid(),
        "python": platform.python_version(),
        "t": round(time.time(), 3),
    }


def item(stage: str, phase: str | None, method: str | None, seed: int | None) -> str:
    """The path of an execution in artifacts/history and artifacts/measured."""
    return "/".join(str(part) for part in (stage, phase, method, seed) if part is not None)


def _code() -> dict[str, Any]:
    """The commit, and whether sources or settings differ from it; null outside a repository."""
    commit = _git("rev-parse", "HEAD")
    status = _git("status", "--porcelain", "--untracked-files=no", "--", *SOURCES)
    if commit is None or status is None:
        return {"commit": None, "dirty": None}
    return {"commit": commit, "dirty": status != ""}


def _git(*words: str) -> str | None:
    """What git prints; None where it is missing, too slow, or there is no repository."""
    try:
        done = subprocess.run(["git", *words], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:
        return None
    return done.stdout.strip()
