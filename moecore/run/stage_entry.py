"""How every stage starts: arguments by signature, errors in one clear line."""

import inspect
import os
import signal
import sys
import typing
from collections.abc import Callable
from typing import Any

from moecore.core.files import UserError, explain_file_errors
from moecore.core.operating_system import set_parent_death_signal
from moecore.core.source_layout import STAGE_MODULES, refuse_other_checkout
from moecore.run.inputs import allow_params_packages
from moecore.study.stages import STAGES, TRAINING_STAGES

ENDED_CODE = 143  # the exit code of what was ended from outside
MEETING = "MOECORE_MEETING"  # as in core/ranks.py, which imports torch
# gloo's and NCCL's words
CONNECTION_LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "ncclRemoteError",
    "remote process exited",
)


def run_stage(function: Callable[..., None], arguments: list[str] | None = None) -> None:
    """Call ``function`` with the words of the command line, converted by its annotations.

    ``def pretrain(method: str, seed: int)`` runs as ``python -m moecore.stages.pretrain vmoe 0``.
    Exit codes: 1 for a UserError (printed without a traceback), 2 for wrong arguments. If the
    parent (dvc) is killed, the stage ends too. Several ranks may share a stage that trains.
    """
    words = sys.argv[1:] if arguments is None else arguments
    values = _convert_words(function, words)
    end_with_parent()
    signal.signal(signal.SIGTERM, _terminate)
    try:
        if not any(STAGES[name].module == function.__name__ for name in TRAINING_STAGES):
            refuse_several_ranks()
        refuse_other_checkout()
        with explain_file_errors():
            allow_params_packages()
            function(**values)
    except UserError as error:
        several = "\n" in str(error)
        where = "" if several else f"{' '.join([function.__name__, *words])}: "
        print_error_once(f"{where}{error}")
        _exit(1)
    except Exception as error:
        if not is_other_rank_gone(error):
            raise
        reason = "another rank has ended; what was trained is in the checkpoint"
        print_error_once(f"{' '.join([function.__name__, *words])}: {reason}")
        _exit(ENDED_CODE)


def is_other_rank_gone(error: BaseException) -> bool:
    """Return whether an error of one of several ranks says that another has ended."""
    if not has_several_ranks() or not isinstance(error, RuntimeError):
        return False
    of_torch = any(kind.__name__ == "DistError" for kind in type(error).__mro__)
    return of_torch or any(said in str(error) for said in CONNECTION_LOST)


def _exit(code: int) -> None:
    """Exit; SIGTERM, such as a launcher's when one rank has failed, changes nothing any more.

    A rank ends at once, past the interpreter's own end: the store where ranks met counts out there
    who has left, and aborts where its file has gone in between, which would hide the code.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if not has_several_ranks():
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def refuse_several_ranks() -> None:
    """Raise UserError where a launcher started several processes of a stage that is one."""
    if has_several_ranks():
        *first, last = TRAINING_STAGES
        shared = f"{', '.join(first)} and {last}, which train, may be shared"
        size = os.environ["WORLD_SIZE"]
        raise UserError(f"found {size} ranks; allowed of this stage: 1 ({shared})")


def has_several_ranks() -> bool:
    """Return whether a launcher started several ranks."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def print_error_once(text: str) -> None:
    """Print to stderr what is wrong: once, where several ranks end at the same."""
    if has_several_ranks() and "RANK" in os.environ:
        from moecore.core import ranks  # imports torch

        ranks.print_failure_once(text)
    else:
        print(text, file=sys.stderr)


def end_with_parent() -> None:
    """Have SIGTERM sent when the parent dies, even by ``kill -9``; only on Linux."""
    parent = os.getppid()
    set_parent_death_signal()
    if os.getppid() != parent:  # it died in between
        sys.exit(ENDED_CODE)


def _terminate(*_: Any) -> None:
    sys.exit(ENDED_CODE)


def _convert_words(function: Callable[..., None], words: list[str]) -> dict[str, Any]:
    names = list(inspect.signature(function).parameters)
    types = typing.get_type_hints(function)
    main = function.__module__ == "__main__"
    module = f"{STAGE_MODULES}{function.__name__}" if main else function.__module__
    usage = " ".join(["usage: python -m", module, *map(str.upper, names)])
    if len(words) != len(names):
        _exit_with_usage(f"{usage} ({len(words)} given)")
    values: dict[str, Any] = {}
    for name, word in zip(names, words, strict=True):
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
