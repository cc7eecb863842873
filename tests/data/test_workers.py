"""Work in several threads: results in order, errors where they are due, one thread for BLAS
meanwhile.
"""

import time

import pytest
from threadpoolctl import threadpool_info, threadpool_limits

from moecore.data.workers import each, one_blas_thread


def blas_threads() -> set[int]:
    return {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"}


@pytest.mark.parametrize("threads", ["1", "3"])
def test_results_come_in_order(threads, monkeypatch):
    monkeypatch.setenv("MOECORE_THREADS", threads)

    def late(number: int) -> int:
        time.sleep(0.002 * (5 - number % 5))
        return number * number

    assert list(each(late, range(23))) == [number * number for number in range(23)]


def test_an_error_is_raised_where_its_result_is_due(monkeypatch):
    monkeypatch.setenv("MOECORE_THREADS", "2")
    found = each(lambda number: 6 // (3 - number), range(6))
    assert [next(found) for _ in range(3)] == [2, 3, 6]
    with pytest.raises(ZeroDivisionError):
        next(found)


def test_blas_has_one_thread_meanwhile_and_its_own_afterwards():
    before = blas_threads()
    assert before and list(each(lambda _: blas_threads(), range(3))) == [{1}] * 3
    assert blas_threads() == before


def test_the_limit_holds_until_the_last_user_has_left():
    with threadpool_limits(2, user_api="blas"):
        first = one_blas_thread()
        second = one_blas_thread()
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert blas_threads() == {1}
        second.__exit__(None, None, None)
        assert blas_threads() == {2}
