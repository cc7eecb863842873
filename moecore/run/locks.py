"""A lock file that one process holds at a time; the system frees it when that process ends."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from moecore.core.files import UserError


@contextmanager
def hold_lock(path: Path, describe_holder: Callable[[], str]) -> Iterator[None]:
    """Hold the lock file at ``path``; its folder is made.

    UserError with ``describe_holder()`` where another process holds it, or it cannot be written.
    """
    lock = FileLock(path, timeout=0)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise UserError(describe_holder()) from None
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise UserError(f"{path}: cannot be written, {why}; mend that") from error
    try:
        yield
    finally:
        lock.release()
