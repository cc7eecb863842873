"""Whether the process that wrote a history is still there."""

import platform

import psutil


def alive(lines: list[dict]) -> bool:
    """True while the last process of a history runs; one on another host is taken to run."""
    writer = next(line for line in reversed(lines) if "pid" in line)
    return writer["host"] != platform.node() or runs(writer["pid"], writer["t"])


def runs(pid: int, at: float | None = None) -> bool:
    """True while ``pid`` exists, is no zombie and, with ``at``, was there at that time (numbers of ended processes are used again)."""
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and (at is None or process.create_time() <= at + 1)
    except psutil.NoSuchProcess:
        return False
