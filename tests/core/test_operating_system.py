"""What Linux has, and what is done on a system that lacks it."""

import errno
import os
import sys

import pytest

from moecore.core.files import FullDisk, whole_file
from moecore.core.operating_system import available_cores, set_parent_death_signal
from moecore.data.thread_map import map_in_threads, thread_count


@pytest.fixture
def bare_system(monkeypatch) -> None:
    """A system without affinities and prctl."""
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.delenv("MOECORE_THREADS", raising=False)


def test_linux_tells_its_cores():
    assert available_cores() == len(os.sched_getaffinity(0))


def test_a_bare_system_uses_all_cores(bare_system, tmp_path):
    assert available_cores() == thread_count() == os.cpu_count()
    assert list(map_in_threads(str, range(5))) == ["0", "1", "2", "3", "4"]
    set_parent_death_signal()
    with pytest.raises(FullDisk, match="file too large"), whole_file(tmp_path / "large"):
        raise OSError(errno.EFBIG, "File too large")
