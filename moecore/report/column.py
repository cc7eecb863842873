"""Columns: those of a measurement's metrics, before a run their names and after it their values."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations, product
from typing import Any, NamedTuple

import numpy as np

from moecore.measure.base import MeasuredPart
from moecore.measure.routing import Routing
from moecore.measure.values import SCORE, Found, Metric, Place, Value, place_slug
from moecore.report.typed_results import Measured, Models, Phase, list_without_none
from moecore.statistics.intervals import Interval, seed_pseudo_values
from moecore.tasks.base import Score, Task

BASELINE = "vmoe"
DENSE = "dense"
CEILING = "told"  # routed by the truth of generated data


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


def find_moe_baseline(models: Models) -> str:
    """``vmoe`` where it is there, else the first method with MoE layers; "" where none has.

    The ceiling only where no other method has them.
    """
    if BASELINE in models:
        return BASELINE
    routed = [method for method, seeds in models.items() if any(map(has_experts, seeds.values()))]
    return min(routed, key=lambda method: method == CEILING, default="")


def has_moe_method(models: Models) -> bool:
    """Whether any method has experts to choose from."""
    return bool(find_moe_baseline(models))


def references(models: Models) -> list[str]:
    """Those of the two that the study has."""
    return [name for name in dict.fromkeys((find_moe_baseline(models), DENSE)) if name in models]


def has_experts(model: Measured) -> bool:
    """Whether its routing was measured, or a token uses a part of its parameters only."""
    if model.of(Routing) is not None:
        return True
    trained = model.outcome
    return trained is not None and trained.active_parameters != trained.parameters


def column_context(phase: Phase, kind: type) -> ColumnContext:
    """Return what columns of results of this type may depend on."""
    method = find_moe_baseline(phase.models)
    rivals = phase.models.get(method, {})
    beside = [
        (one, other)
        for seeds in phase.models.values()
        for seed, model in seeds.items()
        if seed in rivals and (one := model.of(kind)) and (other := rivals[seed].of(kind))
    ]
    of_baseline, of_dense = (
        list_without_none(model.of(kind) for model in phase.models.get(name, {}).values())
        for name in (method, DENSE)
    )
    return ColumnContext(phase.task, phase.results(kind), method, of_baseline, of_dense, beside)


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


At = Mapping[str, Place]  # place → where on it
# A metric, its key, the score as in names, and a place → the metric with its name and words there.
FillIn = Callable[[str, Metric, str, At], Metric]
NEEDED: dict[str, Callable[[PlannedPhase], bool]] = {  # Metric.needs → whether any method has it
    "": lambda ahead: True,
    "routers": has_routers,
    "thresholds": has_score_thresholds,
    "guide": has_guided_routers,
    "settling": has_settling_routers,
    "finetuned": has_finetuned_routers,
    "text": lambda ahead: ahead.score == "nats",
    "views": lambda ahead: ahead.score != "nats",  # a text has none
}

MEANINGS = {  # of scores
    "precision_at_1": "1 − false discovery rate",
    "mae": "mean |predicted − known age|",
    "nats": "mean over blocks of words, each read with those before it",
}


class MetricColumns(NamedTuple):
    """The columns of all metrics of a measurement."""

    stage: str  # the measurement's name
    kind: type[MeasuredPart]
    within: str = ""  # the setting of the measurement that it is a part of
    fill_in: FillIn | None = None  # where words need more than one place, or the kind of score

    def columns(self, seen: ColumnContext) -> list[Column]:
        """Return metric by metric its mean and its places, which are last where they are details
        of a mean.
        """
        first: list[Column] = []
        details: list[Column] = []
        for key, metric in self._shown.items():
            if metric.needs == "text" and not seen.task.long:
                continue
            if metric.mean:
                first.append(mean_column(seen, self.kind, key, metric))
            of_mean = metric.detail and metric.mean
            (details if of_mean else first).extend(self.columns_of(seen, key))
        return first + details

    def columns_of(self, seen: ColumnContext, key: str) -> list[Column]:
        """Return the columns of a metric, place by place."""
        metric = self.kind.metrics[key]
        places = list_places(seen.results, key, metric) if metric.over else [{}]
        return [self._column(seen, *one, at) for at in places for one in with_chance(key, metric)]

    @property
    def _shown(self) -> dict[str, Metric]:
        """Return the metrics that have columns."""
        return {key: metric for key, metric in self.kind.metrics.items() if metric.label}

    def _named(self, key: str, metric: Metric, score: str, at: At) -> Metric:
        """Return a metric with the column's name and words at a place."""
        if self.fill_in is not None:
            return self.fill_in(key, metric, score, at)
        words = "".join(map(self.kind.place_words, at.values()))
        return metric._replace(
            name=column_name(key, metric, score, *at.values()),
            label=metric.label.replace("{}", words),
            note=metric.note.replace("{}", words),
        )

    def _column(self, seen: ColumnContext, key: str, metric: Metric, at: At) -> Column:
        """Return the column of a metric at one place, or at none."""
        score = seen.task.score
        named = self._named(key, metric, score_slug(score), at)
        of_score = score_interval_kind(score) if metric.form == SCORE else metric.limits
        limits = of_score if metric.limits else "bootstrap"
        has_hits = metric.items == "hits" and not seen.task.needs_classes("share")

        def read_value(result: Found) -> float | Interval | None:
            if metric.of_dense:
                return metric.of_dense(result, seen.of_dense) if seen.of_dense else None
            if metric.of_baseline:
                return metric.of_baseline(result, seen.of_baseline, seen.baseline_of(result))
            value = find_value(result, key, metric, at)
            if value is None or metric.limits:
                return None if value is None else value.interval
            return value.value

        def items(result: Found) -> np.ndarray | None:
            value = find_value(result, key, metric, at)
            return None if value is None else value.array

        def is_bound(result: Found) -> bool:
            value = read_value(result)
            if metric.is_bound is None or value is None or isinstance(value, Interval):
                return False
            return metric.is_bound(result, value)

        def hits(model: Measured) -> np.ndarray | None:
            if metric.hits:
                return metric.hits(model.results)
            result = model.of(self.kind)
            array = None if result is None else items(result)
            return None if array is None or set(array) - {0, 1} else array.astype(bool)

        return Column(
            named.name,
            fill_words(named.label, score, seen.baseline),
            metric.of_pairs or read_value,
            score.better if metric.better == SCORE else metric.better,
            score.form if metric.form == SCORE else metric.form,
            fill_words(named.note, score, seen.baseline),
            metric.paper,
            kind=self.kind,
            read_hits=hits if metric.hits or has_hits else None,
            read_items=items,
            limits=limits,
            detail=metric.detail,
            is_bound=is_bound,
            of_pairs=metric.of_pairs is not None,
        )

    def foreseen(self, ahead: PlannedPhase) -> dict[str, PlannedMetric]:
        """Return the names of the columns, and what is known of them before anything runs."""
        first: dict[str, PlannedMetric] = {}
        details: dict[str, PlannedMetric] = {}
        places = self._planned_places(ahead)
        for key, metric in self._shown.items():
            if not NEEDED[metric.needs](ahead):
                continue
            known = ahead.plan_metric(metric.form, metric.better)._replace(
                is_fixed=metric.is_fixed,
                curve=key if metric.is_monotone else "",
                of_pairs=metric.of_pairs is not None,
            )
            if metric.mean:
                first[column_name(key, metric, ahead.score)] = known
            names = [name for name in metric.places if name != metric.last]
            for planned in product(*(places.get(name, ()) for name in names)):
                at = dict(zip(names, planned, strict=True))
                for one in with_chance(key, metric):
                    name = self._named(*one, ahead.score, at).name
                    (details if metric.detail and metric.mean else first)[name] = known
        return first | details

    def _planned_places(self, ahead: PlannedPhase) -> dict[str, Iterable[Place]]:
        """Return place → its values, as the settings of a study have them."""
        if not any(metric.over for metric in self.kind.metrics.values()):
            return {}
        settings = find_settings(ahead.study, self.stage)
        if self.within:
            settings = getattr(settings, self.within)
        elif not isinstance(settings, self.kind):  # such as of ``calibrate``, whose section differs
            settings = self.kind.model_construct()
        return {"layer": ahead.layers, **settings.places()}


def with_chance(key: str, metric: Metric) -> list[tuple[str, Metric]]:
    """Return a metric with its name, and that of what chance gives, where there is one."""
    if not metric.chance:
        return [(key, metric)]
    name = metric.name or key + "_{}" * bool(metric.over)
    label = f"{metric.label}, by chance"
    chance = metric._replace(name=f"{name}_chance", label=label, note=metric.chance, detail=True)
    return [(key, metric), (f"{key}_chance", chance)]


def mean_column(seen: ColumnContext, kind: type[MeasuredPart], key: str, metric: Metric) -> Column:
    """Return the column of the mean over all places of a metric."""

    def values(result: Found) -> list[Value]:
        return [value for value in result.all(key) if set(value.at) == {metric.over}]

    def read(result: Found) -> float | None:
        numbers = [value.value for value in values(result)]
        return sum(numbers) / len(numbers) if numbers else None

    def items(result: Found) -> np.ndarray | None:
        arrays = [value.array for value in values(result)]
        known = [array for array in arrays if array is not None]
        return np.mean(known, axis=0) if known and len(known) == len(arrays) else None

    score = seen.task.score
    return Column(
        column_name(key, metric, score_slug(score)),
        fill_words(metric.mean, score),
        read,
        metric.better,
        metric.form,
        f"{fill_words(metric.note, score)}; mean over {metric.over}s",
        metric.paper,
        kind,
        read_items=items,
    )


def column_name(key: str, metric: Metric, score: str, *places: Place) -> str:
    """Return a column's name: the metric's, followed by the place unless ``name`` says where."""
    name = metric.name or "_".join([key, *["{}"] * len(places)])
    return name.replace("{score}", score).replace("{}", "_".join(map(place_slug, places)))


def fill_words(text: str, score: Score, baseline: str = "") -> str:
    """Return a label or a note with the words of the task's score, and the baseline's name."""
    words = {
        "": "",
        "score": score_title(score),
        "unit": unit_suffix(score),
        "tested": {"mae": "Test MAE", "precision_at_1": "Precision at 1"}.get(
            score.name, f"Test {score.label}"
        ),
        "meaning": MEANINGS.get(score.name, ""),
        "items": {"accuracy": "Images", "nats": "Blocks"}.get(score_slug(score), "Volumes"),
        "baseline": baseline,
    }
    return re.sub(r"{(\w*)}", lambda found: words.get(found[1], found[0]), text)


def list_places(results: Iterable[Found], key: str, metric: Metric) -> list[At]:
    """Return the places of a metric's columns, in the order in which results have them.

    That on ``metric.last`` is the last one of the first result that has the others.
    """
    places: dict[tuple[Place, ...], At] = {}
    for result in results:
        of_result = {
            tuple(value.at[name] for name in metric.places if name != metric.last): value.at
            for value in result.all(key)
            if set(value.at) == set(metric.places)
        }
        places = places | {known: at for known, at in of_result.items() if known not in places}
    return list(places.values())


def find_value(result: Found, key: str, metric: Metric, at: At) -> Value | None:
    """Return the value of a metric at a place, on ``metric.last`` the last one; None without."""
    if not metric.last:
        return result.find(key, **at)
    fixed = {(name, place) for name, place in at.items() if name != metric.last}
    having = [
        value
        for value in result.all(key)
        if set(value.at) == set(metric.places) and fixed <= set(value.at.items())
    ]
    return having[-1] if having else None


def find_settings(study: Any, name: str) -> Any:
    """Return a study's section of a measurement, ``my_lab.brightness``; None where it has none."""
    package, _, module = name.partition(".")
    section = getattr(study, package, None)
    return getattr(section, module, None) if module else section
