"""One model's loss over how many experts are removed, and over the rank of a dropped choice."""

from collections.abc import Mapping
from typing import Any

from moecore.measure.expert_worth import ORDERS, WAYS
from moecore.measure.values import Found
from moecore.report.figures.charts import ChartSpec, Curves, curves_chart, point_from_interval
from moecore.report.results import Figures, Pictures


def figures(result: Found) -> Figures:
    """Yield a line per order of removal, and per way to use a token's other choices."""
    words = "Loss, 95 % intervals over images"
    look = ChartSpec("Without more and more experts", "Experts removed from every layer", words)
    yield (
        "expert_removal",
        curves_chart(loss_curves(result, ORDERS, "lost_without", "removed"), look),
    )
    curves = loss_curves(result, WAYS, "lost_without_choice", "rank")
    if len(next(iter(curves.values()))) > 1:
        yield (
            "dropped_choices",
            curves_chart(curves, ChartSpec("Without one choice", "Rank", words)),
        )


def loss_curves(result: Found, names: Mapping[Any, str], metric: str, over: str) -> Curves:
    """Return the words of each of ``names`` → the points of that metric."""
    return {
        words: [
            point_from_interval(float(value.at[over]), value.interval)
            for value in result.all(f"{metric}_{name}")
            if over in value.at
        ]
        for name, words in names.items()
    }


PICTURES = Pictures("expert_worth", figures)
