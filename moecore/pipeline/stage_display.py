"""What `moecore run` prints of its stages: a redrawn table in a terminal, else lines with a prefix.

DVC's own lines are left out. In the table a stage's progress is a row; its other lines are printed
at its end, indented ones only if it fails.
"""

import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from moecore.run.progress import LINE_SECONDS, format_duration

DVC_LINES = re.compile(
    r"$|> |(Updating|Generating) lock file|Stage '.*' (didn't|is cached)|Data and pipelines are"
    r"|To track the changes|\tgit add|To enable auto|\tdvc config|Use `dvc push`"
)
BEGUN = re.compile(r"Running stage '(?:.*:)?(.*)'")
PROGRESS = re.compile(r".*: (\d+/\d+) \(\d+%\)(?:, ([\d:]+) left)?(?:, )?(.*)")


class StageDisplay:
    """Displays the output of stages that run at the same time.

    seconds: expected seconds, None if unknown, of all stages that will run.
    """

    def __init__(self, seconds: Mapping[str, float | None], jobs: int, is_verbose: bool) -> None:
        self.seconds = seconds
        self.jobs = jobs
        self.is_verbose = is_verbose
        self.is_live = sys.stdout.isatty() and not is_verbose
        self.done: set[str] = set()
        self.begun: dict[str, float] = {}  # running stage → its start on the monotonic clock
        self.progress: dict[str, tuple[str, ...]] = {}  # running stage → step, time left, values
        self.lines: dict[str, list[str]] = {}  # running stage → lines to print at its end

    def add(self, stage: str, line: str) -> str:
        """Display a line that DVC printed while ``stage`` ran; return the stage that now runs."""
        line = line.rstrip()
        if begun := BEGUN.match(line):
            self.end(stage)
            stage = begun[1]
            self.begun[stage] = time.monotonic()
            if not self.is_live and not self.is_verbose:
                print_line(stage, "started")
        if self.is_verbose:
            print_line("", line)
        elif begun or DVC_LINES.match(line):
            pass
        elif not self.is_live:
            print_line(stage, line)
        elif progress := PROGRESS.fullmatch(line):
            self.progress[stage] = progress.groups("")
        else:
            self.lines.setdefault(stage, []).append(line)
        return stage

    def end(self, stage: str, is_failed: bool = False) -> None:
        begun = self.begun.pop(stage, None)
        self.progress.pop(stage, None)
        for line in self.lines.pop(stage, ()):
            if is_failed or not line[:1].isspace():
                print_line(stage, line)
        if begun is not None and not is_failed:
            self.done.add(stage)
            if not self.is_live and not self.is_verbose:
                print_line(stage, f"done in {format_duration(time.monotonic() - begun)}")

    def table(self) -> Any:
        """Return a line per running stage, below what is done and the expected time left."""
        from rich.text import Text

        now = time.monotonic()
        running = dict(self.begun)
        left = 0.0
        for stage in self.seconds.keys() - self.done:
            left += max(0.0, (self.seconds[stage] or 0) - now + running.get(stage, now))
        title = f"{len(self.done)} of {len(self.seconds)} stages done"
        lines = [f"{title}, about {format_duration(left / self.jobs)} left" if left else title]
        for stage, begun in running.items():
            step, rest, values = self.progress.get(stage, ("", "", ""))
            spent = format_duration(now - begun)
            lines.append(f"{stage_words(stage):<32} {spent:>7} {step:>11} {rest:>7}  {values}")
        return Text("\n".join(lines), no_wrap=True, overflow="ellipsis")


@contextmanager
def redraw_table(display: StageDisplay) -> Iterator[None]:
    """Redraw the table below all printed lines, if the output is a terminal."""
    if not display.is_live:
        yield
        return
    from rich.live import Live

    os.environ.setdefault(LINE_SECONDS, "1")
    with Live(get_renderable=display.table, transient=True):
        yield


def stage_words(stage: str) -> str:
    """Return a stage as words: ``explorer pretrain vmoe 0``, ``prepare pretrain``, ``compare``."""
    return re.sub("[@-]", " ", stage.removeprefix("measure@"))


def print_line(stage: str, line: str) -> None:
    """Print ``[pretrain vmoe 0] line``, without these words at the start of the line."""
    words = stage_words(stage)
    if words:
        line = re.sub(rf"^(\w+ )?{re.escape(words)}: ", "", line)  # after the script's name
        line = f"[{words}] {line}"
    print(f"{line}\n", end="", flush=True)
