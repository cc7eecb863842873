"""How every stage starts: arguments by the function's signature, the whole of params.yaml checked, errors in one clear line."""

import ctypes
import hashlib
import importlib
import inspect
import os
import signal
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moecore.files import StageError, whole_file
from moecore.sources import ROOT

PR_SET_PDEATHSIG = 1


def run_stage(function: Callable[..., None], arguments: list[str] | None = None) -> None:
    """Call ``function`` with the command line's words, converted by its annotations; never returns after an error.

    ``def pretrain(method: str, seed: int)`` runs as ``python -m stages.pretrain vmoe 0``. Exit codes: 1 for a StageError
    (its text is printed, without a traceback), 2 for wrong arguments. If the parent (dvc) is killed, the stage ends too.
    """
    words = sys.argv[1:] if arguments is None else arguments
    values = _converted(function, words)
    end_with_parent()
    signal.signal(signal.SIGTERM, _terminate)
    try:
        check_once(Path(os.environ.get("MOECORE_PARAMS", "params.yaml")))
        function(**values)
    except StageError as error:
        print(f"{' '.join([function.__name__, *words])}: {error}" if "\n" not in str(error) else error, file=sys.stderr)
        sys.exit(1)


def check_once(path: Path) -> None:
    """Check the whole of params.yaml, unless this very file was found in order by this very code before (2 s saved)."""
    code = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for folder in ("moecore", "stages") for file in sorted((ROOT / folder).rglob("*.py"))]
    text = path.read_bytes() if path.exists() else b""
    key = hashlib.sha256(repr((str(path), text, code)).encode()).hexdigest()
    known = Path(".state/checked")
    if known.exists() and known.read_text(encoding="utf-8") == key:
        return
    # By name: checking decides whether a stage runs, never what it computes, so it is none of the stage's sources.
    importlib.import_module("moecore.study").check(path)
    with whole_file(known) as temporary:
        temporary.write_text(key, encoding="utf-8")


def end_with_parent() -> None:
    """On Linux: SIGTERM when the parent dies, so that ``kill -9`` on dvc leaves no trainer behind. Elsewhere nothing."""
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:  # it died in between
        sys.exit(143)


def _terminate(*_: Any) -> None:
    sys.exit(143)


def _converted(function: Callable[..., None], words: list[str]) -> dict[str, Any]:
    names, types = list(inspect.signature(function).parameters), typing.get_type_hints(function)
    usage = " ".join(["usage: python -m", f"{function.__module__ if function.__module__ != '__main__' else 'stages.' + function.__name__}", *map(str.upper, names)])
    if len(words) != len(names):
        _refuse(f"{usage} ({len(words)} given)")
    values = {}
    for name, word in zip(names, words, strict=True):
        choices = typing.get_args(types.get(name))
        if choices and word not in choices:
            _refuse(f"{usage}: {name.upper()}: found {word!r}; allowed: {', '.join(choices)}")
        try:
            values[name] = int(word) if types.get(name) is int else word
        except ValueError:
            _refuse(f"{usage}: {name.upper()}: found {word!r}; allowed: an integer")
    return values


def _refuse(message: str) -> None:
    print(message, file=sys.stderr)
    sys.exit(2)
