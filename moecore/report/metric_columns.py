"""The columns of a measurement's metrics: before a run their names, after it their values."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from moecore.measure.base import MeasuredPart
from moecore.measure.values import SCORE, Found, Metric, Place, Value, place_slug
from moecore.report.column import (
    Column,
    ColumnContext,
    PlannedMetric,
    PlannedPhase,
    has_guided_routers,
    has_routers,
    has_score_thresholds,
    score_interval_kind,
    score_slug,
    score_title,
    unit_suffix,
)
from moecore.statistics.intervals import Interval
from moecore.tasks.base import Score

NEEDED: dict[str, Callable[[PlannedPhase], bool]] = {  # Metric.needs → whether any method has it
    "": lambda ahead: True,
    "routers": has_routers,
    "thresholds": has_score_thresholds,
    "guide": has_guided_routers,
    "views": lambda ahead: ahead.score != "nats",  # a text has none
}


class MetricColumns(NamedTuple):
    """The columns of all metrics of a measurement."""

    stage: str  # the measurement's name
    kind: type[MeasuredPart]
    within: str = ""  # the setting of the measurement that it is a part of

    def columns(self, seen: ColumnContext) -> list[Column]:
        """Return metric by metric its mean and its places, which are last where they are details
        of a mean.
        """
        first: list[Column] = []
        details: list[Column] = []
        for key, metric in self._shown.items():
            if metric.mean:
                first.append(mean_column(seen, key, metric))
            places = [{}]
            if metric.over:
                places = [{metric.over: at} for at in list_places(seen.results, key, metric.over)]
            for at in places:
                columns = [self._column(seen, *one, at) for one in with_chance(key, metric)]
                (details if metric.detail and metric.mean else first).extend(columns)
        return first + details

    @property
    def _shown(self) -> dict[str, Metric]:
        """Return the metrics that have columns."""
        return {key: metric for key, metric in self.kind.metrics.items() if metric.label}

    def _column(
        self, seen: ColumnContext, key: str, metric: Metric, at: dict[str, Place]
    ) -> Column:
        """Return the column of a metric at one place, or at none."""
        score = seen.task.score
        words = "".join(map(self.kind.place_words, at.values()))

        def read_value(result: Found) -> float | Interval | None:
            if metric.of_dense:
                return metric.of_dense(result, seen.of_dense) if seen.of_dense else None
            return result.interval(key, **at)

        def items(result: Found) -> np.ndarray | None:
            value = result.find(key, **at)
            return None if value is None else value.array

        return Column(
            column_name(key, metric, score_slug(score), *at.values()),
            fill_words(metric.label, score, words),
            metric.of_pairs or read_value,
            score.better if metric.better == SCORE else metric.better,
            score.form if metric.form == SCORE else metric.form,
            fill_words(metric.note, score, words),
            metric.paper,
            items=items,
            limits=score_interval_kind(score) if metric.form == SCORE else metric.limits,
            detail=metric.detail,
            is_fixed=metric.is_fixed,
            curve=key if metric.is_monotone else "",
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
            known = ahead.plan_metrics([""], metric.form, metric.better)[""]
            known = known._replace(
                is_fixed=metric.is_fixed,
                curve=key if metric.is_monotone else "",
                of_pairs=metric.of_pairs is not None,
            )
            if metric.mean:
                first[column_name(key, metric, ahead.score)] = known
            for at in ([place] for place in places.get(metric.over, ())) if metric.over else [()]:
                names = [column_name(*one, ahead.score, *at) for one in with_chance(key, metric)]
                (details if metric.detail and metric.mean else first).update(
                    dict.fromkeys(names, known)
                )
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


def mean_column(seen: ColumnContext, key: str, metric: Metric) -> Column:
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
        items=items,
    )


def column_name(key: str, metric: Metric, score: str, *places: Place) -> str:
    """Return a column's name: the metric's, followed by the place unless ``name`` says where."""
    name = metric.name or "_".join([key, *["{}"] * len(places)])
    return fill_template(name, score, "_".join(map(place_slug, places)))


def fill_words(text: str, score: Score, place: str = "") -> str:
    """Return a label or a note with the words of the task's score, and of the place."""
    title = score_title(score)
    return fill_template(text.replace("{unit}", unit_suffix(score)), title, place)


def fill_template(text: str, score: str, place: str) -> str:
    """Return a text with {score} and {} replaced."""
    return text.replace("{score}", score).replace("{}", place)


def list_places(results: Iterable[Found], key: str, over: str) -> list[Place]:
    """Return the places of a metric, in the order in which results have them."""
    result = (
        value.at for result in results for value in result.all(key) if set(value.at) == {over}
    )
    return list(dict.fromkeys(at[over] for at in result))


def find_settings(study: Any, name: str) -> Any:
    """Return a study's section of a measurement, ``my_lab.brightness``; None where it has none."""
    package, _, module = name.partition(".")
    section = getattr(study, package, None)
    return getattr(section, module, None) if module else section
