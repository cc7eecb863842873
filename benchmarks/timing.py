"""Contestants take turns in one process; a figure is a ratio of two turns of the same round."""

import resource
import time
from collections.abc import Callable, Mapping
from statistics import median, quantiles
from typing import NamedTuple

Run = Callable[[], object]
LEAST = 8  # rounds of a race that counts


class Ratio(NamedTuple):
    """Time of one contestant over that of another."""

    median: float  # of the rounds' ratios
    minimum: float  # ratio of the two shortest turns: the one that a busy machine disturbs least
    low: float  # first quartile of the rounds' ratios
    high: float  # third quartile

    @classmethod
    def of(cls, seconds: list[float], against: list[float]) -> "Ratio":
        """Turn i of both belongs to round i.

        Raises ValueError where the rounds are not as many, or none.
        """
        ratios = sorted(own / other for own, other in zip(seconds, against, strict=True))
        if not ratios:
            raise ValueError("no rounds to compare")
        if len(ratios) > 1:
            low, _, high = quantiles(ratios, n=4, method="inclusive")
        else:
            low, _, high = ratios * 3
        return cls(median(ratios), min(seconds) / min(against), low, high)


def take_turns(
    runs: Mapping[str, Run], rounds: int, warm: int = 10, most: float = float("inf")
) -> dict[str, list[float]]:
    """Seconds of each turn, in ``rounds`` rounds in which every contestant runs once.

    Before them all run until the process asks the kernel for hardly any memory, ``warm`` times at
    most: a page fault costs as much as the copy of the page. A race that takes more than ``most``
    seconds ends early, but not before two rounds.
    """
    begun = time.perf_counter()
    for turn in range(warm):
        before = _page_faults()
        for run in runs.values():
            run()
        if turn and _page_faults() - before < 2000 or time.perf_counter() - begun > most / 3:
            break
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for done in range(rounds):
        if done >= 2 and time.perf_counter() - begun > most:
            break
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def shortest(run: Run, repeats: int) -> float:
    """The least seconds of ``repeats`` calls, after two that do not count."""
    return min(take_turns({"": run}, repeats, warm=2)[""])


def _page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
