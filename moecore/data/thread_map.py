"""Apply one function to many items in threads, with results in order."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Lock
from typing import Any, TypeVar

from moecore.core.files import UserError, available_cores

Item = TypeVar("Item")
Result = TypeVar("Result")


def requested_threads() -> int:
    """Return $MOECORE_THREADS, or 0 if unset; UserError if it is not a number."""
    text = os.environ.get("MOECORE_THREADS") or "0"
    if not text.isdecimal():
        raise UserError.at("MOECORE_THREADS", found=repr(text), allowed="1 or more threads")
    return int(text)


def thread_count() -> int:
    """Return the number of threads: $MOECORE_THREADS, else the cores of this process."""
    return requested_threads() or available_cores()


class _SharedBlasLimit:
    """Number of active ``one_blas_thread`` blocks, and the BLAS limit to undo after the last."""

    lock = Lock()
    users = 0
    limits: Any = None


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Limit BLAS to one thread in the ``with`` block, for all threads of the process."""
    # With several, sums are split differently, so that the last bits of a product depend on the
    # number of cores; and small products take several times as long, since its threads wait for
    # each other. Nested and overlapping uses are counted.
    from threadpoolctl import threadpool_limits

    with _SharedBlasLimit.lock:
        _SharedBlasLimit.users += 1
        if _SharedBlasLimit.users == 1:
            _SharedBlasLimit.limits = threadpool_limits(1, user_api="blas")
    try:
        yield
    finally:
        with _SharedBlasLimit.lock:
            _SharedBlasLimit.users -= 1
            if _SharedBlasLimit.users == 0:
                _SharedBlasLimit.limits.restore_original_limits()


def map_in_threads(function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """Yield ``function(item)`` for all items, in order; compute them in threads."""
    number = thread_count()  # changes no result, see one_blas_thread
    with one_blas_thread(), ThreadPoolExecutor(number) as pool:
        waiting: deque = deque()
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) > 2 * number:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
