"""What Linux has, and what is done on a system that lacks it."""

import errno
import os
import sys

import pytest

from moecore.core.files import FullDisk, whole_file
from moecore.core.operating_system import (
    available_cores,
    set_parent_death_signal,
    try_lock,
)
from moecore.data.workers import map_in_threads, thread_count


@pytest.fixture
def bare_system(monkeypatch) -> None:
    """A system without affinities, file locks and prctl."""
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setitem(sys.modules, "fcntl", None)
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.delenv("MOECORE_THREADS", raising=False)


def test_linux_tells_cores_and_locks(tmp_path):
    assert available_cores() == len(os.sched_getaffinity(0))
    with open(tmp_path / "lock", "w") as one, open(tmp_path / "lock", "w") as other:
        assert try_lock(one) and not try_lock(other)
        one.close()
        assert try_lock(other)


def test_a_bare_system_uses_all_cores_and_knows_no_locks(bare_system, tmp_path):
    assert available_cores() == thread_count() == os.cpu_count()
    assert list(map_in_threads(str, range(5))) == ["0", "1", "2", "3", "4"]
    with open(tmp_path / "lock", "w") as one, open(tmp_path / "lock", "w") as other:
        assert try_lock(one) and try_lock(other)
    set_parent_death_signal()
    with pytest.raises(FullDisk, match="file too large"), whole_file(tmp_path / "large"):
        raise OSError(errno.EFBIG, "File too large")
