"""One column of numbers: where it is read from, and how it is shown."""

from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

from moecore.measure.base import MeasuredPart
from moecore.measure.values import SCORE, Found
from moecore.report.typed_results import Measured, list_without_none
from moecore.statistics.intervals import Interval, seed_pseudo_values
from moecore.tasks.base import Score, Task


class PlannedMetric(NamedTuple):
    """What is known of a metric before anything has run: see ``Metric``."""

    form: str
    better: str
    is_fixed: bool = False
    curve: str = ""
    of_pairs: bool = False
    stage: str = ""  # that writes the result, as ``Display.stage``
    # why a model has none, in words; None: as the measurement has it
    refusal: Callable[[Any], str | None] | None = None


class PlannedPhase(NamedTuple):
    """What is known of a phase before anything has run."""

    study: Any  # the whole of params.yaml
    score: str  # as in the names of columns: "accuracy", "mae" or "nats"
    name: str  # of the phase

    @property
    def methods(self) -> list[Any]:
        """The settings of the methods that are trained."""
        return [self.study.methods[name] for name in self.study.run.methods]

    @property
    def layers(self) -> range:
        """Numbers of the MoE layers, from 1, of the method that has most."""
        model = self.study.model
        having = [method for method in self.methods if model is not None and method.moe is not None]
        numbers = [
            len(method.moe.indices(method.merge_model_settings(model).depth)) for method in having
        ]
        return range(1, 1 + max(numbers, default=0))

    def plan_metric(self, form: str, better: str) -> PlannedMetric:
        """Return what is known of a metric; SCORE is what the task's score has."""
        is_share = self.score == "accuracy"
        form = {SCORE: "share" if is_share else "number"}.get(form, form)
        better = {SCORE: "higher" if is_share else "lower"}.get(better, better)
        return PlannedMetric(form, better)


class ColumnContext(NamedTuple):
    """All that the columns of a measurement may depend on besides the result that they read."""

    task: Task
    results: Sequence[Found]  # of all models of a phase
    baseline: str  # the method that training times are compared with; "" without one
    of_baseline: Sequence[Found]  # the results of that method, one per seed
    of_dense: Sequence[Found]  # those of the dense model
    beside: Sequence[tuple[Found, Found]] = ()  # a result, and the baseline's of the same seed

    def baseline_of(self, result: Found) -> Found | None:
        """The baseline's result of the seed that this very result is of; None where it has none."""
        return next((other for one, other in self.beside if one is result), None)


class Column(NamedTuple):
    """What is read from one kind of results, and how it is shown."""

    name: str  # a key of compare.json, which claims refer to
    label: str
    read_result: Callable[..., Interval | float | None]
    better: str = ""  # "higher", "lower", or "" where neither is better
    form: str = "number"  # or "share", "count", "seconds", "bytes"
    note: str = ""
    paper: str = ""  # a key of paper_numbers.PAPERS, or "" for what every paper reports
    kind: type[MeasuredPart] = MeasuredPart  # of the results that it reads
    # Which images (N,) bool a share counted, None where that is not known.
    read_hits: Callable[[Measured], np.ndarray | None] | None = None
    # One value per item (N,), whose mean is the value: an image, or a person who has several.
    read_items: Callable[[Found], np.ndarray | None] | None = None
    limits: str = "bootstrap"  # one model's: "wilson", "bootstrap", "quartiles", "draws"
    detail: bool = False  # in the full table and in compare.json only
    # Whether a result's value is only a bound of what was not seen: no interval or test takes it.
    is_bound: Callable[[Found], bool] = lambda result: False
    # Whether ``read_result`` compares the results of two seeds, the lower place first: a method has
    # the mean over its pairs of seeds, with the jackknife's interval over seeds.
    of_pairs: bool = False

    def read(self, model: Measured) -> Interval | None:
        """Return the value of one model, None where it has no such result or no such value."""
        result = model.of(self.kind)
        if result is None or self.of_pairs:
            return None
        value = self.read_result(result)
        return Interval(float(value)) if isinstance(value, int | float) else value

    def number(self, model: Measured) -> float:
        """Return the value itself, of a model that has it."""
        interval = self.read(model)
        assert interval is not None, f"{self.name} is read of a model that lacks it"
        return interval.value

    def pair_values(self, models: Sequence[Measured]) -> np.ndarray | None:
        """Return the value of each two of a method's S models, (S, S), 0 on the diagonal.

        None of fewer than two, or where one has no such result.
        """
        results = list_without_none(model.of(self.kind) for model in models)
        if len(results) < max(2, len(models)):
            return None
        values = np.zeros((len(results), len(results)))
        for one, other in combinations(range(len(results)), 2):
            pair = self.read_result(results[one], results[other])
            assert isinstance(pair, float), f"{self.name} of two seeds is no float"
            values[one, other] = values[other, one] = pair
        return values

    def seed_numbers(self, models: Sequence[Measured]) -> np.ndarray:
        """Return one number of each of a method's models that have it, (S,), to be tested.

        Of a value of pairs the jackknife's, see ``seed_pseudo_values``.
        """
        if self.of_pairs:
            pairs = self.pair_values(models)
            assert pairs is not None, f"{self.name} is read of models that lack it"
            return seed_pseudo_values(pairs)
        return np.array([self.number(model) for model in models])

    def has_bound(self, models: Iterable[Measured]) -> bool:
        """Return whether the value of any of these models is only a bound."""
        results = [model.of(self.kind) for model in models]
        return any(result is not None and self.is_bound(result) for result in results)

    def items(self, model: Measured) -> np.ndarray | None:
        """Return one value per item (N,), whose mean is ``number``; None where it has none."""
        result = model.of(self.kind)
        return None if result is None or self.read_items is None else self.read_items(result)

    def hits(self, model: Measured) -> np.ndarray | None:
        """Return which images (N,) bool the share counted; None where that is not known."""
        return None if self.read_hits is None else self.read_hits(model)


def has_routers(ahead: PlannedPhase) -> bool:
    """Return whether a method has routers."""
    return any(method.moe for method in ahead.methods)


def has_settling_routers(ahead: PlannedPhase) -> bool:
    """Return whether a method has routers that are watched from epoch to epoch: in pretraining."""
    return ahead.name == "pretrain" and has_routers(ahead)


def has_finetuned_routers(ahead: PlannedPhase) -> bool:
    """Return whether a method has routers that are looked at before and after fine-tuning."""
    return ahead.name in ("finetune", "adversarial") and has_routers(ahead)


def has_guided_routers(ahead: PlannedPhase) -> bool:
    """Return whether a method has routers that learn from a teacher's, or ask it."""
    return ahead.name == "pretrain" and any(method.guided_routing for method in ahead.methods)


def has_score_thresholds(ahead: PlannedPhase) -> bool:
    """Return whether a method has a router whose scores must exceed a threshold."""
    return any(method.moe and method.router.has_score_threshold for method in ahead.methods)


def score_slug(score: Score) -> str:
    """The score inside the name of a column: claims call the precision at 1 accuracy, too."""
    return {"share": "accuracy"}.get(score.form, score.name)


def score_title(score: Score) -> str:
    """The score as a column's words begin: Accuracy, Precision at 1, Cross-entropy, MAE."""
    return {"mae": "MAE"}.get(score.name, score.label.capitalize())


def unit_suffix(score: Score) -> str:
    """What stands behind those words: ", years"."""
    return score.unit and f", {score.unit}"


def score_interval_kind(score: Score) -> str:
    """Return the kind of one model's interval of a score."""
    return {"share": "wilson"}.get(score.form, "bootstrap")
