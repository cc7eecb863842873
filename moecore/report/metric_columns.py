"""The columns of a measurement's metrics: before a run their names, after it their values."""

import re
from collections.abc import Callable, Iterable, Mapping
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from moecore.measure.base import MeasuredPart
from moecore.measure.values import SCORE, Found, Metric, Place, Value, place_slug
from moecore.report.column import (
    Column,
    ColumnContext,
    PlannedMetric,
    PlannedPhase,
    has_finetuned_routers,
    has_guided_routers,
    has_routers,
    has_score_thresholds,
    has_settling_routers,
    score_interval_kind,
    score_slug,
    score_title,
    unit_suffix,
)
from moecore.report.typed_results import Measured
from moecore.statistics.intervals import Interval
from moecore.tasks.base import Score

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
