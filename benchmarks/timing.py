"""Time contestants in alternating turns; a figure is the ratio of two turns of one round.

Contestants share a process, or have one each if their process-wide settings differ.
"""

import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median, quantiles
from typing import NamedTuple

Run = Callable[[], object]
LEAST = 8  # rounds; a race with fewer does not count


class Ratio(NamedTuple):
    """The time of one contestant divided by the time of another, over all rounds."""

    median: float  # of the rounds' ratios
    minimum: float  # shortest turn of each, which other load disturbs least
    low: float  # first quartile of the rounds' ratios
    high: float  # third quartile

    @classmethod
    def of(cls, seconds: list[float], against: list[float]) -> "Ratio":
        """Return the ratio of two lists of seconds, paired by round.

        Raises ValueError for lists of different lengths, or empty ones.
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
    """Return contestant → seconds of its turns; every contestant runs once per round.

    All first warm up, at most ``warm`` times, until a turn has few page faults: a fault costs as
    much as the copy of a page. After ``most`` seconds the race ends, with at least two rounds.
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
    """Take a turn per line of standard input; print the median seconds of its ``count`` runs."""
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
    """Return contestant → seconds of its turns; each command starts a process that calls ``serve``.

    start_together: start all processes at once; turns begin when all are ready. Raises
    RuntimeError if a process ends. ``failures`` gets name → error instead, and the others go on,
    except while processes start one by one.
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


def time_fastest_call(run: Run, repeats: int) -> float:
    """Return the seconds of the fastest of ``repeats`` calls, after two to warm up."""
    return min(take_turns({"": run}, repeats, warm=2)[""])


def _page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
