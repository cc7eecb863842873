"""How the routing settles during training: agreement with the final model, and between consecutive epochs (TGR, figure 3)."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from moecore.evaluation.intervals import over_seeds
from moecore.report.curves import Row
from moecore.report.results import Measured
from moecore.report.style import legend_of, line_look, new_figure, share_axis, styled

PANELS = {"agreement_with_final": "Agreement with the final model", "agreement_consecutive": "Agreement of consecutive epochs"}


def agreement_rows(models: Sequence[Measured], name: str) -> list[Row]:
    """epoch, value, low, high over the seeds of one method; [] where a seed has no such list.

    name: a key of PANELS. A list that is shorter than the training has epochs ends with the last epoch; null is no value.
    """
    lists = [model.trained.get(name) or [] for model in models]
    if not all(lists):
        return []
    epochs = max(len(model.trained.get(key) or []) for model in models for key in PANELS)
    rows = []
    for number, values in enumerate(zip(*lists, strict=True), start=1 + epochs - len(lists[0])):
        if None not in values:
            found = over_seeds(values)
            low, high = (found.value, found.value) if found.low is None else (max(0.0, found.low), min(1.0, found.high))
            rows.append({"epoch": number, "value": found.value, "low": low, "high": high})
    return rows


@styled
def routing_agreement(curves: Mapping[str, Mapping[str, Sequence[Row]]]) -> Figure:
    """Two panels over epochs, one line a method with a band over the seeds; ``curves``: key of PANELS → method → rows.

    A method without rows has no line but keeps its colour, so that a method looks the same in all figures.
    """
    figure = new_figure(9.8, 3.9)
    panels = figure.subplots(1, 2, sharey=True)
    for axes, (name, title) in zip(panels, PANELS.items(), strict=True):
        for index, (method, rows) in enumerate(curves[name].items()):
            if rows:
                look, epochs = line_look(index), [row["epoch"] for row in rows]
                axes.plot(epochs, [row["value"] for row in rows], label=method, **look)
                axes.fill_between(epochs, [row["low"] for row in rows], [row["high"] for row in rows], color=look["color"], alpha=0.13, linewidth=0)
        axes.set(xlabel="Epoch", title=title, ylim=(0, 1.02))
    share_axis(panels[0], "Tokens")
    legend_of(figure, panels[0], "lower right")
    return figure
