"""Columns of the comparison table, one per metric and place: planned, or read after a run."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations, product
from typing import Any, NamedTuple

import numpy as np

from moecore.measure import base, routing
from moecore.measure.values import SCORE, Found, Metric, Place, Value, place_slug
from moecore.report.result_types import ModelResults, Models, PhaseResults, list_without_none
from moecore.statistics.intervals import Interval, jackknife_pseudo_values
from moecore.tasks.base import Score, Task

BASELINE = "vmoe"
DENSE = "dense"
CEILING = "told"  # routed by the true kinds of generated data


class PlannedMetric(NamedTuple):
    """The properties of a column that are known before a run; fields as in ``Metric``."""

    form: str
    better: str
    is_fixed: bool = False
    curve: str = ""
    of_pairs: bool = False
    stage: str = ""  # the stage that writes the result, as in ``Display``
    # Returns why a model has no value; None: as the measurement says.
    refusal: Callable[[Any], str | None] | None = None


class PhaseBeforeRun(NamedTuple):
    """A phase before its run: params.yaml and its score's name, to plan the columns of tables."""

    study: Any  # params.yaml
    score: str  # as in column names: "accuracy", "mae" or "nats"
    name: str

    @property
    def methods(self) -> list[Any]:
        return [self.study.methods[name] for name in self.study.run.methods]

    @property
    def layers(self) -> range:
        """The numbers 1, 2, … of MoE layers, for the method with the most MoE layers."""
        model = self.study.model
        having = [method for method in self.methods if model is not None and method.moe is not None]
        numbers = [
            len(method.moe.indices(method.merge_model_settings(model).depth)) for method in having
        ]
        return range(1, 1 + max(numbers, default=0))


class ColumnContext(NamedTuple):
    """The data that columns depend on beyond one result: task, baseline and dense results."""

    task: Task
    results: Sequence[Found]  # of all models of a phase
    baseline: str  # method that training times are compared with; "" without one
    of_baseline: Sequence[Found]  # the results of that method, one per seed
    of_dense: Sequence[Found]  # the results of the dense model
    pairs: Sequence[tuple[Found, Found]] = ()  # a result and the baseline's of the same seed


class Column(NamedTuple):
    """One metric as a column of a table: how to read it from a result, and how to show it."""

    name: str  # a key of compare.json, which claims refer to
    label: str
    read_result: Callable[..., Interval | float | None]
    better: str = ""  # "higher", "lower", or "" where neither is better
    form: str = "number"  # or "share", "count", "seconds", "bytes"
    note: str = ""
    paper: str = ""  # a key of paper_numbers.PAPERS, or "" for what every paper reports
    kind: type[base.MeasuredPart] = base.MeasuredPart  # of the results that it reads
    # Which images (N,) bool a share counted, or None.
    read_hits: Callable[[ModelResults], np.ndarray | None] | None = None
    # One value per item (N,), an image or a person; the value is their mean.
    read_items: Callable[[Found], np.ndarray | None] | None = None
    limits: str = "bootstrap"  # of one model: "wilson", "bootstrap", "quartiles", "draws"
    detail: bool = False  # only in the full table and compare.json
    # Whether a result's value is only a bound: it then has no interval and is not tested.
    is_bound: Callable[[Found], bool] = lambda result: False
    # Whether ``read_result`` compares the results of two seeds, in their order. A method's value is
    # the mean over its pairs of seeds, with the jackknife's interval over seeds.
    of_pairs: bool = False

    def read(self, model: ModelResults) -> Interval | None:
        """Return a model's value; None if not measured, or if it compares seeds (``of_pairs``)."""
        result = model.of(self.kind)
        if result is None or self.of_pairs:
            return None
        value = self.read_result(result)
        if isinstance(value, int | float):
            return Interval(float(value))
        return value

    def pair_values(self, models: Sequence[ModelResults]) -> np.ndarray | None:
        """Return the values (S, S) of pairs of S seeds; None if S < 2 or a result is missing."""
        results = list_without_none(model.of(self.kind) for model in models)
        if len(results) < max(2, len(models)):
            return None
        values = np.zeros((len(results), len(results)))
        for first, second in combinations(range(len(results)), 2):
            pair = self.read_result(results[first], results[second])
            assert isinstance(pair, float), f"{self.name} of two seeds is no float"
            values[first, second] = values[second, first] = pair
        return values

    def seed_numbers(self, models: Sequence[ModelResults]) -> np.ndarray:
        """Return one number per seed (S,), for tests; if ``of_pairs``, jackknife pseudo-values."""
        if self.of_pairs:
            pairs = self.pair_values(models)
            assert pairs is not None, f"{self.name} is read of models that lack it"
            return jackknife_pseudo_values(pairs)
        intervals = list_without_none(self.read(model) for model in models)
        assert len(intervals) == len(models), f"{self.name} is read of a model that lacks it"
        return np.array([interval.value for interval in intervals])

    def has_bound(self, models: Iterable[ModelResults]) -> bool:
        results = [model.of(self.kind) for model in models]
        return any(result is not None and self.is_bound(result) for result in results)

    def items(self, model: ModelResults) -> np.ndarray | None:
        """Return one value per item (N,), whose mean is the column's value; None if not stored."""
        result = model.of(self.kind)
        if result is None or self.read_items is None:
            return None
        return self.read_items(result)

    def hits(self, model: ModelResults) -> np.ndarray | None:
        """Return bool (N,): the images that count as correct; None if not stored."""
        return None if self.read_hits is None else self.read_hits(model)


def find_moe_baseline(models: Models) -> str:
    """Return the baseline MoE: ``vmoe``, else the first method with MoE layers; "" if none has."""
    if BASELINE in models:
        return BASELINE
    routed = [method for method, seeds in models.items() if any(map(has_experts, seeds.values()))]
    return min(routed, key=lambda method: method == CEILING, default="")


def reference_methods(models: Models) -> list[str]:
    """Return the methods that others are compared with: the baseline MoE and the dense model."""
    return [name for name in dict.fromkeys((find_moe_baseline(models), DENSE)) if name in models]


def has_experts(model: ModelResults) -> bool:
    """Return whether a model has experts: routing was measured, or tokens use only some weights."""
    outcome = model.outcome
    is_sparse = outcome is not None and outcome.active_parameters != outcome.parameters
    return is_sparse or model.of(routing.Routing) is not None


def build_column_context(phase: PhaseResults, kind: type) -> ColumnContext:
    method = find_moe_baseline(phase.models)
    rivals = phase.models.get(method, {})
    pairs = [
        (result, baseline)
        for seeds in phase.models.values()
        for seed, model in seeds.items()
        if seed in rivals and (result := model.of(kind)) and (baseline := rivals[seed].of(kind))
    ]
    of_baseline, of_dense = (
        list_without_none(model.of(kind) for model in phase.models.get(name, {}).values())
        for name in (method, DENSE)
    )
    return ColumnContext(phase.task, phase.results(kind), method, of_baseline, of_dense, pairs)


def phase_has_moe(phase: PhaseBeforeRun) -> bool:
    return any(method.moe for method in phase.methods)


def score_slug(score: Score) -> str:
    if score.form == "share":
        return "accuracy"
    return score.name


def score_title(score: Score) -> str:
    if score.name == "mae":
        return "MAE"
    return score.label.capitalize()


def unit_suffix(score: Score) -> str:
    """Return ", years" for a score in years, to append to a label; "" without a unit."""
    return score.unit and f", {score.unit}"


At = Mapping[str, Place]  # place name → place
# (key, metric, score as in names, places) → the metric with its name and words there.
FillIn = Callable[[str, Metric, str, At], Metric]
NEEDED: dict[str, Callable[[PhaseBeforeRun], bool]] = {  # Metric.needs → whether it is fulfilled
    "": lambda phase: True,
    "routers": phase_has_moe,
    "thresholds": lambda phase: any(
        method.moe and method.router.has_score_threshold for method in phase.methods
    ),
    # A method's routers learn from a teacher's, or use them.
    "guide": lambda phase: (
        phase.name == "pretrain" and any(method.guided_routing for method in phase.methods)
    ),
    # Routing is compared from epoch to epoch, and before and after fine-tuning.
    "settling": lambda phase: phase.name == "pretrain" and phase_has_moe(phase),
    "finetuned": lambda phase: phase.name in ("finetune", "adversarial") and phase_has_moe(phase),
    "text": lambda phase: phase.score == "nats",
    "views": lambda phase: phase.score != "nats",  # a text has none
}

SCORE_MEANINGS = {  # of scores
    "precision_at_1": "1 − false discovery rate",
    "mae": "mean |predicted − known age|",
    "nats": "mean over blocks of words, each read with those before it",
}


class MetricColumns(NamedTuple):
    """Builds the columns of a measurement, or of an optional part (added by setting ``within``)."""

    stage: str  # the measurement's name
    kind: type[base.MeasuredPart]
    within: str = ""  # for a part of a measurement: the setting that adds it
    fill_in: FillIn | None = None  # for words that depend on several places, or the kind of score

    def columns(self, context: ColumnContext) -> list[Column]:
        """Return all columns; details, such as single layers if a column has the mean, are last."""
        first: list[Column] = []
        details: list[Column] = []
        for key, metric in self.kind.metrics.items():
            if not metric.label or (metric.needs == "text" and not context.task.long):
                continue
            if metric.mean:
                first.append(self._column(context, key, metric, None))
            columns = details if metric.detail and metric.mean else first
            columns += self.columns_of(context, key)
        return first + details

    def columns_of(self, context: ColumnContext, key: str) -> list[Column]:
        metric = self.kind.metrics[key]
        places = list_metric_places(context.results, key, metric) if metric.over else [{}]
        return [
            self._column(context, name, variant, at)
            for at in places
            for name, variant in add_chance_metric(key, metric)
        ]

    def _with_column_texts(self, key: str, metric: Metric, score: str, at: At | None) -> Metric:
        """Return the metric with name, label and note for places ``at`` (layer, ε); None: mean."""
        if at is None:
            name = column_name(key, metric, score)
            note = f"{metric.note}; mean over {metric.over}s"
            return metric._replace(name=name, label=metric.mean, note=note, detail=False)
        if self.fill_in is not None:
            return self.fill_in(key, metric, score, at)
        place_text = "".join(map(self.kind.place_words, at.values()))
        name = column_name(key, metric, score, *at.values())
        label, note = (text.replace("{}", place_text) for text in (metric.label, metric.note))
        return metric._replace(name=name, label=label, note=note)

    def _column(self, context: ColumnContext, key: str, metric: Metric, at: At | None) -> Column:
        score = context.task.score
        named = self._with_column_texts(key, metric, score_slug(score), at)
        limits = metric.limits or "bootstrap"
        if metric.limits and metric.form == SCORE:
            limits = "wilson" if score.form == "share" else "bootstrap"
        has_hits = metric.items == "hits" and not context.task.needs_classes("share")

        def read_value(result: Found) -> float | Interval | None:
            if metric.of_dense:
                if context.of_dense:
                    return metric.of_dense(result, context.of_dense)
                return None
            if metric.of_baseline:
                baselines = (baseline for paired, baseline in context.pairs if paired is result)
                return metric.of_baseline(result, context.of_baseline, next(baselines, None))
            values = find_metric_values(result, key, metric, at)
            if not values:
                return None
            if metric.limits and at is not None:
                return values[0].interval
            return sum(value.value for value in values) / len(values)

        def items(result: Found) -> np.ndarray | None:
            arrays = [value.item_values for value in find_metric_values(result, key, metric, at)]
            if not arrays or any(array is None for array in arrays):
                return None
            return np.mean(list_without_none(arrays), axis=0)

        def is_bound(result: Found) -> bool:
            value = read_value(result)
            if metric.is_bound is None or value is None or isinstance(value, Interval):
                return False
            return metric.is_bound(result, value)

        def hits(model: ModelResults) -> np.ndarray | None:
            if metric.hits:
                return metric.hits(model.results)
            result = model.of(self.kind)
            array = None if result is None else items(result)
            if array is None or set(array) - {0, 1}:
                return None
            return array.astype(bool)

        words = (named.label, named.note)
        label, note = (fill_score_words(text, score, context.baseline) for text in words)
        better = score.better if metric.better == SCORE else metric.better
        form = score.form if metric.form == SCORE else metric.form
        read = metric.of_pairs or read_value
        column = Column(named.name, label, read, better, form, note, metric.paper, self.kind)
        if metric.hits or has_hits:
            column = column._replace(read_hits=hits)
        column = column._replace(read_items=items, limits=limits, detail=named.detail)
        return column._replace(is_bound=is_bound, of_pairs=metric.of_pairs is not None)

    def planned(self, phase: PhaseBeforeRun) -> dict[str, PlannedMetric]:
        """Return column name → properties for every column that a planned phase will have."""
        first: dict[str, PlannedMetric] = {}
        details: dict[str, PlannedMetric] = {}
        places = self._planned_places(phase)
        score_form, score_better = "number", "lower"
        if phase.score == "accuracy":
            score_form, score_better = "share", "higher"
        for key, metric in self.kind.metrics.items():
            if not metric.label or not NEEDED[metric.needs](phase):
                continue
            column = PlannedMetric(
                score_form if metric.form == SCORE else metric.form,
                score_better if metric.better == SCORE else metric.better,
                metric.is_fixed,
                curve=key if metric.is_monotone else "",
                of_pairs=metric.of_pairs is not None,
            )
            if metric.mean:
                first[column_name(key, metric, phase.score)] = column
            names = [name for name in metric.places if name != metric.last]
            columns = details if metric.detail and metric.mean else first
            for planned in product(*(places.get(name, ()) for name in names)):
                at = dict(zip(names, planned, strict=True))
                for name, variant in add_chance_metric(key, metric):
                    columns[self._with_column_texts(name, variant, phase.score, at).name] = column
        return first | details

    def _planned_places(self, phase: PhaseBeforeRun) -> dict[str, Iterable[Place]]:
        if not any(metric.over for metric in self.kind.metrics.values()):
            return {}
        package, _, module = self.stage.partition(".")  # my_lab.brightness
        settings = getattr(phase.study, package, None)
        if module:
            settings = getattr(settings, module, None)
        if self.within:
            settings = getattr(settings, self.within)
        elif not isinstance(settings, self.kind):  # for ``calibrate``, whose section differs
            settings = self.kind.model_construct()
        return {"layer": phase.layers, **settings.places()}


def add_chance_metric(key: str, metric: Metric) -> list[tuple[str, Metric]]:
    """Return [(key, metric)]; if ``metric.chance`` is set, also the pair of its chance level."""
    if not metric.chance:
        return [(key, metric)]
    name = metric.name or (f"{key}_{{}}" if metric.over else key)
    label = f"{metric.label}, by chance"
    chance = metric._replace(name=f"{name}_chance", label=label, note=metric.chance, detail=True)
    return [(key, metric), (f"{key}_chance", chance)]


def column_name(key: str, metric: Metric, score: str, *places: Place) -> str:
    """Return the column's name: ``metric.name`` or ``key``, filled with score and places."""
    name = metric.name or "_".join([key, *["{}"] * len(places)])
    return name.replace("{score}", score).replace("{}", "_".join(map(place_slug, places)))


def fill_score_words(text: str, score: Score, baseline: str = "") -> str:
    """Replace {score}, {unit}, {baseline} etc. in ``text``; other words in braces stay."""
    tested = {"mae": "Test MAE", "precision_at_1": "Precision at 1"}
    texts = {
        "": "",
        "score": score_title(score),
        "unit": unit_suffix(score),
        "tested": tested.get(score.name, f"Test {score.label}"),
        "meaning": SCORE_MEANINGS.get(score.name, ""),
        "items": {"accuracy": "Images", "nats": "Blocks"}.get(score_slug(score), "Volumes"),
        "baseline": baseline,
    }
    return re.sub(r"{(\w*)}", lambda match: texts.get(match[1], match[0]), text)


def list_metric_places(results: Iterable[Found], key: str, metric: Metric) -> list[At]:
    """Return each distinct combination of places (such as attack and epsilon) with values."""
    places: dict[tuple[Place, ...], At] = {}
    for result in results:  # of ``metric.last``: the last place of the first result with the others
        of_result = {
            tuple(value.at[name] for name in metric.places if name != metric.last): value.at
            for value in result.all(key)
            if set(value.at) == set(metric.places)
        }
        places |= {place: at for place, at in of_result.items() if place not in places}
    return list(places.values())


def find_metric_values(result: Found, key: str, metric: Metric, at: At | None) -> list[Value]:
    """Return the values at places ``at`` (the last along ``metric.last``); None: at all places."""
    if at is not None and not metric.last:
        return list_without_none([result.find(key, **at)])
    values = [value for value in result.all(key) if set(value.at) == set(metric.places)]
    if at is None:
        return values
    fixed = {(name, place) for name, place in at.items() if name != metric.last}
    return [value for value in values if fixed <= set(value.at.items())][-1:]
