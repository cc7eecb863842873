"""The life of a stage that trains: a bar, a line of the history for every point, checkpoints."""

import json
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from moecore.core.config import Config
from moecore.core.ranks import join, joined, only_first, ranks, refuse_unlike, same_text
from moecore.core.sources import own_code
from moecore.data.prepared import Prepared
from moecore.run.history import Run, record
from moecore.run.history_file import points, read_lines, seconds
from moecore.run.progress import progress
from moecore.run.resume import code_of, work_folder
from moecore.training.checkpoint import Checkpoint
from moecore.training.job import Job
from moecore.training.loop import Metrics, fit, total_steps
from moecore.training.outcome import Log
from moecore.training.runtime import tune
from moecore.training.settings import Training
from moecore.training.speed import trace_file


class TrainingRun:
    """A run whose checkpoint and history lie in ``work``, a folder that outlives the process."""

    def __init__(self, run: Run | None, work: Path, title: str) -> None:
        """``run``: None on every rank but the first, which alone writes."""
        self.recorded = run
        self.work = work
        self.title = title
        self.runtime = tune(work=work)

    def train(
        self,
        job: Job,
        settings: Training,
        seed: int,
        each_epoch: Callable[[int], None] | None = None,
    ) -> None:
        """Train from the last checkpoint; ``each_epoch`` is told every epoch (from 1) that ends.

        Of several ranks the first alone comes back.

        A point is in the history, and ``each_epoch`` done, before the training goes on: what a
        checkpoint counts as done is never looked at again.
        """
        checkpoint = Checkpoint(self.work)
        training = fit(job, settings, seed, self.runtime, checkpoint, trace_file(self.title))
        if self.recorded is None:
            deque(training, maxlen=0)
            only_first()
        for name, value in self.runtime._asdict().items():
            self.run.tag(f"runtime.{name}", value)
        self.run.tag("runtime.ranks", ranks().size)
        with progress(self.title, total_steps(job, settings)) as bar:
            for metrics in training:
                self.run.log(metrics.step, metrics.values | {"epoch": metrics.epoch})
                if each_epoch is not None and metrics.epoch == int(metrics.epoch):
                    each_epoch(int(metrics.epoch))
                bar.update(metrics.step, **_shown(metrics))
        only_first()

    @property
    def run(self) -> Run:
        """The record; of the first rank."""
        assert self.recorded is not None, "only the first rank writes"
        return self.recorded

    def log(self) -> Log:
        """All points, also those of before a kill."""
        lines = read_lines(self.run.folder)
        return Log([(step, values) for step, _, values in points(lines)], seconds(lines))


@contextmanager
def training_run(
    stage: str,
    params: Config,
    data: Prepared,
    inputs: Sequence[Path],
    script: str,
    method: str | None = None,
    seed: int | None = None,
    trains: bool = True,
) -> Iterator[TrainingRun]:
    """A recorded run of a training stage on ``data``; killed at any moment, it is resumed.

    inputs: what else the result depends on, files and folders of artifacts. script: the stage's
    file. trains: several ranks may share it; where nothing is trained the first does the work.
    """
    item = [str(word) for word in (method, seed) if word is not None]
    name = "/".join([stage, *item])
    if trains:
        join()
    elif os.environ.get("RANK", "0") != "0":
        sys.exit(0)
    refuse_unlike("params", json.dumps([name, params.model_dump(mode="json")], sort_keys=True))
    refuse_unlike("data", (data.folder / "card.json").read_text(encoding="utf-8"))
    refuse_unlike("sources", own_code() if joined() else "")
    if not ranks().first:
        yield TrainingRun(None, Path(same_text("")), name.replace("/", " "))
        return
    files = [data.folder, *inputs]
    with (
        work_folder(name, params, files, script) as work,
        record(
            stage,
            params,
            work=work,
            method=method,
            seed=seed,
            inputs=[*files, *code_of(name, params, script)],
        ) as run,
    ):
        run.dataset(data.card)
        same_text(str(work.resolve()))
        yield TrainingRun(run, work, name.replace("/", " "))


def followed(
    points: Iterable[tuple[int, dict[str, float]]], steps: int, title: str, run: Run
) -> dict[str, float]:
    """Show and log (step, values) as they come; return the last values."""
    values: dict[str, float] = {}
    with progress(title, steps) as bar:
        for step, values in points:
            run.log(step, values)
            bar.update(step, **values)
    return values


def _shown(metrics: Metrics) -> dict[str, float]:
    """The loss and the scores."""
    scores = ("train_", "validation_")
    return {
        name: value
        for name, value in metrics.values.items()
        if name == "loss" or (name.startswith(scores) and name != "validation_loss")
    }
