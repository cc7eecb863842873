"""Show a stage's progress: a bar in a terminal, a line every ten seconds in a log."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SECONDS_BETWEEN_LINES = 10.0  # seconds between two lines in a log


class ProgressLines:
    """Progress as lines on stderr, at most one per SECONDS_BETWEEN_LINES, and one at the end."""

    def __init__(self, title: str, total: int) -> None:
        self.title = title
        self.total = total
        self.begun = time.monotonic()
        self.printed = self.begun
        self.first: int | None = None
        self.last = ""
        self.note = ""

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
        self.last = f"{self.title}: {done}{remaining}{format_values(values)}{note}"
        if now - self.printed >= SECONDS_BETWEEN_LINES:
            self.flush(now)

    def show_note(self, line: str) -> None:
        self.note = line

    def print_warning(self, line: str) -> None:
        print(f"{self.title}: {line}", file=sys.stderr, flush=True)

    def flush(self, now: float) -> None:
        if self.last:
            print(self.last, file=sys.stderr, flush=True)
        self.printed = now
        self.last = ""


class ProgressBar:
    def __init__(self, progress: Any, title: str, total: int) -> None:
        self.progress = progress
        self.task = progress.add_task(title, total=total, values="")

    def update(self, step: int, **values: float) -> None:
        """Show that ``step`` of the total is done, with ``values``."""
        self.progress.update(self.task, completed=step, values=format_values(values).lstrip(", "))

    def show_note(self, line: str) -> None:
        self.progress.note = line

    def print_warning(self, line: str) -> None:
        self.progress.console.print(line, style="yellow", markup=False, highlight=False)


@contextmanager
def report_progress(title: str, total: int) -> Iterator[ProgressBar | ProgressLines]:
    """Yield a progress bar, to be updated by ``bar.update(step, loss=…)``."""
    if not sys.stderr.isatty():
        lines = ProgressLines(title, total)
        try:
            yield lines
        finally:
            lines.flush(time.monotonic())
        return
    # Imported here: without a terminal a stage does not need it (0.1 s).
    import rich.progress
    from rich.console import Console
    from rich.text import Text

    class NotedProgress(rich.progress.Progress):
        note = ""

        def get_renderables(self) -> Iterator[Any]:
            yield from super().get_renderables()
            if self.note:
                yield Text(self.note)

    columns = (
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TimeRemainingColumn(),
        rich.progress.TextColumn("{task.fields[values]}"),
    )
    with NotedProgress(*columns, console=Console(stderr=True)) as bar:
        yield ProgressBar(bar, title, total)


def format_values(values: dict[str, float]) -> str:
    """Return names and values as a text: ``, loss 0.1234, validation accuracy 0.5``."""
    return "".join(f", {name.replace('_', ' ')} {value:.4g}" for name, value in values.items())


def format_duration(seconds: float) -> str:
    """Return the text ``1:02:03`` (hours, minutes, seconds) or ``2:03``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{rest:02}"
    return f"{minutes}:{rest:02}"
