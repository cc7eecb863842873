"""Timers and statistics of timings, independent of models."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from moecore.statistics.intervals import Interval


def timing_quartiles(values: Sequence[float]) -> Interval:
    """Return median and quartiles (linear interpolation), as timings have a long upper tail."""
    if len(values) == 0:
        raise ValueError("quartiles: no values")
    low, median, high = (float(value) for value in np.quantile(values, [0.25, 0.5, 0.75]))
    return Interval(median, low, high)


class Clock:
    """Measures seconds between marks in a computation, without synchronisation at the marks.

    Call ``mark()`` during the computation, then ``wait()``, then ``seconds(a, b)``. On CUDA a mark
    is an event in the stream, as waiting for the device would change the timing.
    """

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.device = device

    def mark(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """Return the seconds between two marks; call ``wait`` before."""
        if self.cuda:
            return start.elapsed_time(end) / 1000
        return end - start

    def wait(self) -> None:
        """Wait until the device has finished."""
        if self.cuda:
            torch.cuda.synchronize(self.device)


def time_calls(
    run: Callable[[int], object], rounds: int, warm_up: int, device: torch.device
) -> list[float]:
    """Return the seconds of each of ``rounds`` calls ``run(number)``, after ``warm_up`` calls."""
    durations = []
    for number in range(warm_up + rounds):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        run(number)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        durations.append(time.perf_counter() - start)
    return durations[warm_up:]
