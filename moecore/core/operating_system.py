"""What not every operating system has, each with a plain way for one that lacks it (macOS)."""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def available_cores() -> int:
    """Return how many cores this process may use, or how many there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def set_parent_death_signal() -> None:
    """Have this process ended when its parent dies; only Linux can, elsewhere it goes on."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
