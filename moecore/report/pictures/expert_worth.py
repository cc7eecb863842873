"""Loss over the number of removed experts, and over the rank of a dropped choice."""

from collections.abc import Mapping
from typing import Any

from moecore.measure.expert_worth import ORDERS, WAYS
from moecore.measure.values import Found
from moecore.report.figures.charts import ChartSpec, Curves, curves_chart, point_from_interval
from moecore.report.results import Figures, Pictures


def figures(result: Found) -> Figures:
    """Yield (name, chart): loss over removed experts, and over the rank of a dropped choice."""
    label = "Loss, 95 % intervals over images"
    spec = ChartSpec("Removing experts", "Experts removed from every layer", label)
    curves = loss_curves(result, ORDERS, "lost_without", "removed")
    yield "expert_removal", curves_chart(curves, spec)
    curves = loss_curves(result, WAYS, "lost_without_choice", "rank")
    if len(next(iter(curves.values()))) > 1:
        spec = ChartSpec("Without one choice", "Rank", label)
        yield "dropped_choices", curves_chart(curves, spec)


def loss_curves(result: Found, names: Mapping[Any, str], metric: str, over: str) -> Curves:
    """Return label → points of the metric over the values of ``over``, such as "removed"."""
    # names: end of the metric's name → label of its curve.
    return {
        label: [
            point_from_interval(float(value.at[over]), value.interval)
            for value in result.all(f"{metric}_{name}")
            if over in value.at
        ]
        for name, label in names.items()
    }


PICTURES = Pictures("expert_worth", figures)
