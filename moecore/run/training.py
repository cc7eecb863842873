"""Runs a training stage with progress bar, history and checkpoints."""

import json
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from moecore.core import config, ranks, source_layout
from moecore.data.prepared import Prepared
from moecore.run.history_file import logged_points, read_lines, routing_points, spent_seconds
from moecore.run.run_record import GPU_MEMORY_TAG, Run, printing_progress, record_resumable_run
from moecore.study.params_reader import read_stage_params
from moecore.training import loop, outcome, runtime
from moecore.training.artifacts import Checkpoint
from moecore.training.job import TrainingJob
from moecore.training.monitor import MonitorSettings, build_routing_point, format_routing_point
from moecore.training.settings import Training

PROGRESS_BAR_PREFIXES = ("loss", "train_", "validation_")  # next to a progress bar
EachEpoch = Callable[[int], float | None] | None  # see ``TrainingRun.train``


class MonitorSection(config.Config):
    """The section ``monitor`` of params.yaml, which changes no result."""

    monitor: MonitorSettings | None = None


class TrainingRun:
    """A training with its record and checkpoint in the folder ``work``, which survives a kill."""

    def __init__(
        self, run: Run | None, work: Path, title: str, monitor: MonitorSettings | None
    ) -> None:
        """``run``: where points are logged; None except on the first rank, which alone writes."""
        self.recorded = run
        self.work = work
        self.title = title
        self.monitor = monitor
        self.runtime = runtime.tune_runtime(work=work)

    def train(
        self, job: TrainingJob, settings: Training, seed: int, each_epoch: EachEpoch = None
    ) -> None:
        """Train from the last checkpoint to the end; other ranks than the first then exit."""
        # ``each_epoch`` is called after each epoch, from 1, before its checkpoint. It may return
        # the agreement of the routing with the previous epoch's.
        inputs = self.recorded.inputs if self.recorded else None
        files = (Checkpoint(self.work, inputs), runtime.trace_file(self.title))
        training = loop.iterate_training(job, settings, seed, self.runtime, *files, self.monitor)
        if self.recorded is None:
            deque(training, maxlen=0)
            ranks.exit_unless_first_rank()
        for name, value in self.runtime._asdict().items():
            self.record.log_tag(f"runtime.{name}", value)
        self.record.log_tag("runtime.ranks", ranks.rank_and_size().size)
        with printing_progress(self.title, loop.total_steps(job, settings)) as bar:
            for metrics in training:
                self.record.log(metrics.step, metrics.values | {"epoch": metrics.epoch})
                agreement = None
                if each_epoch is not None and metrics.epoch == int(metrics.epoch):
                    agreement = each_epoch(int(metrics.epoch))
                if self.monitor is not None and metrics.routing:
                    state = (metrics.step, metrics.routing, self.record.last_routing)
                    point = build_routing_point(*state, self.monitor, agreement)
                    self.record.log_routing(point)
                    bar.note = format_routing_point(point)
                    for line in point.warnings:
                        bar.print_warning(line)
                shown = {
                    name: value
                    for name, value in metrics.values.items()
                    if name.startswith(PROGRESS_BAR_PREFIXES) and name != "validation_loss"
                }
                bar.update(metrics.step, **shown)
        if self.runtime.device.startswith("cuda"):
            size = torch.cuda.max_memory_reserved() / 1e9 + runtime.CUDA_CONTEXT_GB
            self.record.log_tag(GPU_MEMORY_TAG, round(size, 2))
        ranks.exit_unless_first_rank()

    @property
    def record(self) -> Run:
        assert self.recorded is not None, "only the first rank writes"
        return self.recorded

    def read_log(self) -> outcome.LoggedPoints:
        """Return logged points, computing time (s), routing warnings, including before a kill."""
        lines = read_lines(self.record.folder)
        points = [(step, values) for step, _, values in logged_points(lines)]
        warnings = [line for _, point in routing_points(lines) for line in point.warnings]
        return outcome.LoggedPoints(points, spent_seconds(lines), warnings)


@contextmanager
def training_run(
    stage: str,
    params: config.Config,
    data: Prepared,
    inputs: Sequence[Path],
    method: str | None = None,
    seed: int | None = None,
    trains: bool = True,  # several ranks share it; else the first rank does the work
) -> Iterator[TrainingRun]:
    title = " ".join(str(word) for word in (stage, method, seed) if word is not None)
    monitor = read_stage_params(MonitorSection).monitor
    if trains:
        ranks.join_ranks()
    elif os.environ.get("RANK", "0") != "0":
        sys.exit(0)
    settings = [title, *(part.model_dump(mode="json") for part in (params, monitor) if part)]
    ranks.check_equal_across_ranks("params", json.dumps(settings, sort_keys=True))
    ranks.check_equal_across_ranks("data", (data.folder / "card.json").read_text(encoding="utf-8"))
    source = source_layout.moecore_source_hash() if ranks.has_process_group() else ""
    ranks.check_equal_across_ranks("sources", source)
    if not ranks.rank_and_size().is_first:
        yield TrainingRun(None, Path(ranks.broadcast_text("")), title, monitor)
        return
    artifacts = [data.folder, *inputs]
    model = {"method": method, "seed": seed}
    with record_resumable_run(stage, params, artifacts, **model) as (run, work):
        run.log_dataset(data.card)
        ranks.broadcast_text(str(work.resolve()))
        yield TrainingRun(run, work, title, monitor)


def log_points_with_progress(
    points: Iterable[tuple[int, dict[str, float]]], steps: int, title: str, run: Run
) -> dict[str, float]:
    values: dict[str, float] = {}
    with printing_progress(title, steps) as bar:
        for step, values in points:
            run.log(step, values)
            bar.update(step, **values)
    return values
