"""Show a stage's progress: a redrawn line in a terminal, a line every ten seconds in a log."""

import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

SECONDS_BETWEEN_LINES = 10.0  # seconds between two lines in a log
SECONDS_BETWEEN_REDRAWS = 0.2
LINE_SECONDS = "MOECORE_LINE_SECONDS"  # the same, of a process whose lines become a table's rows


class ProgressLines:
    """Progress as lines on stderr, at most one per SECONDS_BETWEEN_LINES, and one at the end."""

    def __init__(self, title: str, total: int) -> None:
        self.title = title
        self.total = total
        self.is_terminal = sys.stderr.isatty()
        self.wait = float(os.environ.get(LINE_SECONDS, SECONDS_BETWEEN_LINES))
        if self.is_terminal:
            self.wait = SECONDS_BETWEEN_REDRAWS
        self.begun = time.monotonic()
        self.printed = self.begun
        self.first: int | None = None
        self.last = ""
        self.note = ""  # shown below the line, until the next one

    def update(self, step: int, **values: float) -> None:
        """Show that ``step`` of the total is done, with ``values``."""
        now = time.monotonic()
        if self.first is None:  # the first step includes the warm-up: measure the rate after it
            self.first = step
            self.begun = now
        done = f"{step}/{self.total} ({step / max(1, self.total):.0%})"
        remaining = ""
        if step > self.first:
            seconds_per_step = (now - self.begun) / (step - self.first)
            remaining = f", {format_duration((self.total - step) * seconds_per_step)} left"
        note = f"\n  {self.note}" if self.note else ""
        shown = "".join(f", {name.replace('_', ' ')} {value:.4g}" for name, value in values.items())
        self.last = f"{self.title}: {done}{remaining}{shown}{note}"
        if now - self.printed >= self.wait:
            self.flush(now)

    def print_warning(self, line: str) -> None:
        if self.is_terminal:
            print(file=sys.stderr)
        print(f"{self.title}: {line}", file=sys.stderr, flush=True)

    def flush(self, now: float) -> None:
        if self.last and self.is_terminal:
            line = self.last.replace("\n", "; ")[: shutil.get_terminal_size().columns - 1]
            print(f"\r\x1b[2K{line}", end="", file=sys.stderr, flush=True)
        elif self.last:
            print(self.last, file=sys.stderr, flush=True)
        self.printed = now
        self.last = ""


@contextmanager
def report_progress(title: str, total: int) -> Iterator[ProgressLines]:
    """Yield a ``ProgressLines``, to be updated by ``bar.update(step, loss=…)``."""
    bar = ProgressLines(title, total)
    try:
        yield bar
    finally:
        bar.flush(time.monotonic())
        if bar.is_terminal:
            print(file=sys.stderr)


def format_duration(seconds: float) -> str:
    """Return the text ``1:02:03`` (hours, minutes, seconds) or ``2:03``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{rest:02}"
    return f"{minutes}:{rest:02}"
