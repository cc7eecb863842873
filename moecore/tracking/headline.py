"""The headline numbers of one method and seed: those of the report's first tables."""

from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from moecore.core.config import Config
from moecore.core.files import UserError, read_json
from moecore.data.preview import read_task
from moecore.measure.base import Skipped, read_result
from moecore.measure.cost import Result as Cost
from moecore.measure.robustness import Result as Robustness
from moecore.measure.routing import Result as Routing
from moecore.report.column import Metric
from moecore.report.figures.drawing import INK, line_look
from moecore.report.measured import Measured, Phase
from moecore.report.measures import SHOWN
from moecore.report.quantities import headline
from moecore.report.references import DENSE
from moecore.report.tables.comparison import metrics_of
from moecore.study.document import parse
from moecore.tasks.base import Task
from moecore.tracking.names import PHASES, Numbers, clean


class Trained(NamedTuple):
    """A method and a seed of a study."""

    study: Path
    method: str
    seed: int


def numbers_of(trained: Trained) -> Numbers:
    """The numbers of every phase that was measured, ``test/finetune accuracy``.

    What is not measured yet, or was written by other code, is left out. What is relative to the
    dense model is so to that of the same seed.
    """
    found = Numbers({}, {})
    for name in PHASES:
        phase = _phase(trained, name)
        if phase is None:
            continue
        model = phase.models[trained.method][trained.seed]
        metrics = metrics_of(phase)
        wanted = {column.name for column in headline(phase, [one.column for one in metrics])}
        for metric in metrics:
            value = metric.read(model)
            if metric.name not in wanted or value is None:
                continue
            if metric.column.form == "count":
                found.params[f"{name}.{metric.name}"] = int(value.value)
            else:
                found.metrics[_name(metric, name)] = float(value.value)
    return found


def _name(metric: Metric, phase: str) -> str:
    """The phase comes first: MLflow cuts the end of a long name off."""
    group = "test"
    if metric.result is Routing or metric.name.startswith("routing_"):
        group = "routing"
    elif metric.result is Cost:
        group = "timing"
    words = metric.name.removeprefix("test_").removeprefix("routing_")
    if metric.result is Robustness:
        words = words.removeprefix("accuracy_")  # the accuracy without attack is called so
    return clean(f"{group}/{phase} {words}")


def colour(study: Path, method: str) -> str:
    """The method's colour in the report: by its place among those of params.yaml."""
    path = study / "params.yaml"
    try:
        methods = parse(path.read_text(encoding="utf-8")).data["run"]["methods"]
    except (OSError, UserError, KeyError, TypeError):
        return INK  # `moecore check` says what is wrong with the file
    if not isinstance(methods, list) or method not in methods:
        return INK
    return str(line_look(methods.index(method))["color"])


def _phase(trained: Trained, name: str) -> Phase | None:
    """What is known of its model after a phase, and of the dense one; None where it is nothing."""
    path = trained.study / "artifacts/data" / name / "card.json"
    if not path.is_file():
        return None
    try:
        card = read_json(path)
        task = read_task(card["task"])
    except (UserError, ValidationError, KeyError):
        return None  # of other code: the run of `prepare` says so
    models = {
        method: {trained.seed: Measured(_results(trained._replace(method=method), name, task))}
        for method in (trained.method, DENSE)
    }
    if not models[trained.method][trained.seed].results:
        return None
    return Phase(name, card, task, models)


def _results(trained: Trained, phase: str, task: Task) -> dict[type[Config], Config]:
    found: dict[type[Config], Config] = {}
    for shown in SHOWN:
        folder = trained.study / "artifacts/measured" / shown.stage / phase / trained.method
        path = folder / f"{trained.seed}.json"
        if not shown.applies(task) or not path.is_file():
            continue
        try:
            result = read_result(path, shown.result, shown.stage or phase)
        except UserError:  # of other code: its own run says so
            continue
        if not isinstance(result, Skipped):
            found[shown.result] = result
    return found
