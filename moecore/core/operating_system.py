"""What not every operating system has, each with a plain way for one that lacks it (macOS)."""

import ctypes
import os
import signal
import sys
from typing import IO

PR_SET_PDEATHSIG = 1


def available_cores() -> int:
    """Return how many cores this process may use, or how many there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def try_lock(file: IO) -> bool:
    """Lock an open file until it is closed; return whether no other process holds it.

    Without such locks (Windows) it is never held.
    """
    try:
        import fcntl
    except ImportError:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def largest_file_size() -> int | None:
    """Return how many bytes a file may have (``ulimit -f``), or None without a limit."""
    try:
        import resource
    except ImportError:
        return None
    size, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return None if size == resource.RLIM_INFINITY else size


def set_parent_death_signal() -> None:
    """Have this process ended when its parent dies; only Linux can, elsewhere it goes on."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
