"""Entry of stage scripts: converts command-line arguments, and prints errors as one line."""

import inspect
import os
import signal
import sys
import time
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moecore.core.files import UserError, explain_file_errors, set_parent_death_signal, write_atomic
from moecore.core.source_layout import STAGES_PREFIX, refuse_other_checkout
from moecore.run.stage_inputs import allow_params_packages
from moecore.study.stages import STAGES, TRAINING_STAGES

SECONDS_DIR = Path(".state/seconds")  # a file per stage: duration of its last process, in s
SIGTERM_EXIT_CODE = 143  # exit code of processes that were ended by SIGTERM
MEETING_ENV = "MOECORE_MEETING"  # as in core/ranks.py, which imports torch
CONNECTION_LOST_TEXTS = (  # messages of gloo and NCCL
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "ncclRemoteError",
    "remote process exited",
)


def run_stage(function: Callable[..., None], arguments: list[str] | None = None) -> None:
    # ``def pretrain(method: str, seed: int)`` runs as ``python -m moecore.stages.pretrain vmoe 0``.
    # Exit codes: 1 for a UserError (printed without a traceback), 2 for wrong arguments. If the
    # parent (dvc) is killed, the stage ends too. Only stages that train may have several ranks.
    if arguments is None:
        arguments = sys.argv[1:]
    values = _convert_arguments(function, arguments)
    command = " ".join([function.__name__, *arguments])
    end_with_parent()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(SIGTERM_EXIT_CODE))
    try:
        modules = {STAGES[name].module for name in TRAINING_STAGES}
        if has_several_ranks() and function.__name__ not in modules:
            *first, last = TRAINING_STAGES
            shared = f"{', '.join(first)} and {last}, which train, may be shared"
            size = os.environ["WORLD_SIZE"]
            raise UserError(f"found {size} ranks; allowed of this stage: 1 ({shared})")
        refuse_other_checkout()
        with explain_file_errors():
            allow_params_packages()
            begun = time.monotonic()
            function(**values)
            if name := os.environ.get("DVC_STAGE"):
                write_atomic(SECONDS_DIR / name.split(":")[-1], f"{time.monotonic() - begun:.1f}\n")
    except UserError as error:
        prefix = "" if "\n" in str(error) else f"{command}: "
        print_error_once(f"{prefix}{error}")
        _exit(1)
    except Exception as error:
        if type(error).__name__ == "OutOfMemoryError":  # torch's; its line says what is free
            reason = str(error).strip().splitlines()[0]
            print_error_once(f"{command}: {reason}; allowed: fewer --jobs, or a smaller batch")
            _exit(1)
        is_dist_error = any(kind.__name__ == "DistError" for kind in type(error).__mro__)
        is_lost = is_dist_error or any(message in str(error) for message in CONNECTION_LOST_TEXTS)
        if not (has_several_ranks() and isinstance(error, RuntimeError) and is_lost):
            raise
        reason = "another rank has ended; what was trained is in the checkpoint"
        print_error_once(f"{command}: {reason}")
        _exit(SIGTERM_EXIT_CODE)


def _exit(code: int) -> None:
    """Exit with ``code``, and ignore SIGTERM from a launcher meanwhile."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if not has_several_ranks():
        sys.exit(code)
    # Skip the interpreter's shutdown: there torch's file store aborts if its file is gone, which
    # would hide the exit code.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def has_several_ranks() -> bool:
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def print_error_once(text: str) -> None:
    if has_several_ranks() and "RANK" in os.environ:
        from moecore.core import ranks  # imports torch

        ranks.print_failure_once(text)
    else:
        print(text, file=sys.stderr)


def end_with_parent() -> None:
    """Make the kernel send SIGTERM to this process when its parent dies (Linux only)."""
    parent = os.getppid()
    set_parent_death_signal()
    if os.getppid() != parent:  # the parent died in between
        sys.exit(SIGTERM_EXIT_CODE)


def _convert_arguments(function: Callable[..., None], arguments: list[str]) -> dict[str, Any]:
    names = list(inspect.signature(function).parameters)
    types = typing.get_type_hints(function)
    main = function.__module__ == "__main__"
    module = f"{STAGES_PREFIX}{function.__name__}" if main else function.__module__
    usage = " ".join(["usage: python -m", module, *map(str.upper, names)])
    if len(arguments) != len(names):
        _exit_with_usage(f"{usage} ({len(arguments)} given)")
    values: dict[str, Any] = {}
    for name, word in zip(names, arguments, strict=True):
        choices = typing.get_args(types.get(name))
        if choices and word not in choices:
            allowed = ", ".join(choices)
            _exit_with_usage(f"{usage}: {name.upper()}: found {word!r}; allowed: {allowed}")
        try:
            values[name] = int(word) if types.get(name) is int else word
        except ValueError:
            _exit_with_usage(f"{usage}: {name.upper()}: found {word!r}; allowed: an integer")
    return values


def _exit_with_usage(message: str) -> None:
    print(message, file=sys.stderr)
    sys.exit(2)
