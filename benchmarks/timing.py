"""Contestants take turns, in one process or in one each where they want other settings of the
machine, which cannot be set back; a figure is a ratio of two turns of the same round.
"""

import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
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


def serve(run: Run, warm: int = 4, count: int = 3) -> None:
    """What a contestant's process does: one turn a line of standard input, answered by the median
    seconds of its ``count`` runs.
    """
    for _ in range(warm):
        run()
    print("ready", flush=True)
    for _ in sys.stdin:
        seconds = []
        for _ in range(count):
            start = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - start)
        print(median(seconds), flush=True)


def processes_take_turns(
    commands: Mapping[str, Sequence[str]],
    rounds: int,
    start_together: bool = False,
    failures: dict[str, str] | None = None,
) -> dict[str, list[float]]:
    """Seconds of each turn of the contestants that these commands ``serve``.

    start_together: not one after the other; nothing is timed before all are ready. Raises
    RuntimeError where one ends; with ``failures``, which gets its error, the others go on.
    """
    workers: dict[str, subprocess.Popen] = {}
    try:
        for name, command in commands.items():
            workers[name] = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            if not start_together:
                _answer(name, workers[name])  # ready, before the next one starts
        racing = dict(workers)

        def answer(name: str) -> str:
            try:
                return _answer(name, workers[name])
            except RuntimeError as error:
                if failures is None:
                    raise
                failures[name] = str(error)
                del racing[name]
                return "nan"

        for name in list(racing) if start_together else ():
            answer(name)
        seconds: dict[str, list[float]] = {name: [] for name in racing}
        for _ in range(rounds):
            for name, worker in list(racing.items()):
                assert worker.stdin is not None
                worker.stdin.write("\n")
                worker.stdin.flush()
                seconds[name].append(float(answer(name)))
        return {name: seconds[name] for name in racing}
    finally:
        for worker in workers.values():
            worker.communicate()


def _answer(name: str, worker: subprocess.Popen) -> str:
    assert worker.stdout is not None
    line = worker.stdout.readline()
    if not line:
        raise RuntimeError(
            f"the contestant {name!r} ended with status {worker.wait()}; its error stands above"
        )
    return line.strip()


def shortest(run: Run, repeats: int) -> float:
    """The least seconds of ``repeats`` calls, after two that do not count."""
    return min(take_turns({"": run}, repeats, warm=2)[""])


def _page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
