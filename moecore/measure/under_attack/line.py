"""A line of the audit, and how scores are compared and worded in it."""

from moecore.core.config import Config
from moecore.statistics.intervals import Interval
from moecore.tasks.base import Task


class Line(Config):
    """One question of the audit."""

    name: str
    holds: bool | None
    text: str


def not_judged(name: str, reason: str) -> Line:
    """A line that could not be told; ``reason`` in words."""
    return Line(name=name, holds=None, text=f"not judged: {reason}")


def is_share(task: Task) -> bool:
    """Whether an image is simply right or wrong."""
    return task.needs_classes("share") is None


def no_better(task: Task, one: float, other: float) -> bool:
    """Whether the score ``one`` is as bad as ``other``, or worse."""
    if task.score.better == "higher":
        return one <= other
    return one >= other


def shown(task: Task, value: float) -> str:
    """A score in words."""
    if task.score.form == "share":
        return f"{value:.1%}"
    return f"{value:.4g}"


def worse_limit(task: Task, found: Interval) -> float:
    """The end of an interval that holds the worse scores."""
    low, high = limits(found)
    return low if task.score.better == "higher" else high


def with_limits(task: Task, found: Interval) -> str:
    """A score and its interval in words."""
    low, high = limits(found)
    between = f"{shown(task, low)} to {shown(task, high)}"
    return f"{task.score.label} {shown(task, found.value)} ({between})"


def limits(found: Interval) -> tuple[float, float]:
    """The ends of an interval; the value itself where it has none."""
    low = found.value if found.low is None else found.low
    high = found.value if found.high is None else found.high
    return low, high


class Lines(Config):
    """The audit."""

    lines: tuple[Line, ...]
