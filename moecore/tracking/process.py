"""Whether the process that wrote a history is still there."""

import platform

import psutil


def alive(lines: list[dict]) -> bool:
    """True while the last process of a history runs; one on another host is taken to run."""
    writer = next(line for line in reversed(lines) if "pid" in line)
    return writer["host"] != platform.node() or runs(writer["pid"], writer["t"])


def runs(pid: int, at: float) -> bool:
    """True while the process ``pid`` that was there ``at`` seconds since 1970 runs.

    Numbers of ended processes are used again: one that began later is another.
    """
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and process.create_time() <= at + 1
    except psutil.NoSuchProcess:
        return False
