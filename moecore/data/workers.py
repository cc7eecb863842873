"""The same function on many items in several threads, results in order. numpy, scipy and zlib let each other run while they compute."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from threadpoolctl import threadpool_limits

Item, Result = TypeVar("Item"), TypeVar("Result")


def workers() -> int:
    """How many threads may work: $MOECORE_THREADS, else the cores this process may use."""
    return int(os.environ.get("MOECORE_THREADS") or 0) or len(os.sched_getaffinity(0))


def each(function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """``function(item)`` of every item, in order; at most two results a thread wait, so that memory stays small.

    Results do not depend on the number of threads. An error is raised where its result is due. Meanwhile BLAS has one thread: with more,
    its small products take several times as long, as its threads wait for each other.
    """
    number = workers()
    with threadpool_limits(1, user_api="blas"), ThreadPoolExecutor(number) as pool:
        waiting: deque = deque()
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) > 2 * number:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
