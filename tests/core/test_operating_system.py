"""What Linux has, and what is done on a system that lacks it."""

import errno
import os
import subprocess
import sys

import pytest

from moecore.core.files import FullDisk, whole_file
from moecore.core.operating_system import (
    available_cores,
    largest_file_size,
    set_parent_death_signal,
    try_lock,
)
from moecore.core.sources import ROOT
from moecore.data.workers import each, workers


@pytest.fixture
def bare_system(monkeypatch) -> None:
    """A system without affinities, file locks, limits and prctl."""
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setitem(sys.modules, "fcntl", None)
    monkeypatch.setitem(sys.modules, "resource", None)
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.delenv("MOECORE_THREADS", raising=False)


def test_linux_tells_cores_locks_and_limits(tmp_path, limited):
    assert available_cores() == len(os.sched_getaffinity(0))
    with open(tmp_path / "lock", "w") as one, open(tmp_path / "lock", "w") as other:
        assert try_lock(one) and not try_lock(other)
        one.close()
        assert try_lock(other)
    with limited(1234):
        assert largest_file_size() == 1234
    assert largest_file_size() is None


def test_a_bare_system_uses_all_cores_and_knows_no_locks_or_limits(bare_system, tmp_path):
    assert available_cores() == workers() == os.cpu_count()
    assert list(each(str, range(5))) == ["0", "1", "2", "3", "4"]
    with open(tmp_path / "lock", "w") as one, open(tmp_path / "lock", "w") as other:
        assert try_lock(one) and try_lock(other)
    assert largest_file_size() is None
    set_parent_death_signal()
    with pytest.raises(FullDisk, match="file too large"), whole_file(tmp_path / "large"):
        raise OSError(errno.EFBIG, "File too large")


def test_a_child_ends_with_its_parent():
    child = (
        "import time; from moecore.core.operating_system import set_parent_death_signal as s; "
        "s(); print('ready', flush=True); time.sleep(60)"
    )
    parent = (
        "import subprocess, sys; "
        "child = subprocess.Popen([sys.executable, '-c', sys.argv[1]], stdout=subprocess.PIPE); "
        "child.stdout.readline(); print(child.pid)"
    )
    words = [sys.executable, "-c", parent, child]
    pid = int(subprocess.run(words, cwd=ROOT, capture_output=True, timeout=60, check=True).stdout)
    for _ in range(100):
        state = subprocess.run(["ps", "-o", "stat=", str(pid)], capture_output=True, text=True)
        if state.stdout.strip()[:1] in ("", "Z"):
            return
    pytest.fail("the child goes on")
