"""Functions of Linux, each with a fallback for other operating systems."""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def available_cores() -> int:
    """Return the number of cores that this process may use, or, if unknown, that exist."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def set_parent_death_signal() -> None:
    """Have the kernel end this process when its parent dies; does nothing outside Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
