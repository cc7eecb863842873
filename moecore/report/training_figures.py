"""Figures of trainings: curves, how the routing settles, which class is taken for which."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from moecore.report.charts import (
    AROUND,
    Labels,
    Point,
    draw_curves,
    heat_table,
    name_curves,
    over,
    texts_of,
)
from moecore.report.column import title_of, unit_of
from moecore.report.direct_labels import End
from moecore.report.drawing import (
    line_look,
    new_figure,
    share_axis,
    styled,
    whole_epochs,
)
from moecore.report.maps import expert_maps
from moecore.training.outcome import Outcome

AGREEMENTS = {
    "agreement_with_final": "Agreement with the final model",
    "agreement_consecutive": "Agreement of consecutive epochs",
}
NUMBERED = 20  # classes: with more, a matrix has colours only


@styled
def training_curves(trained: Mapping[str, Sequence[Outcome]]) -> Figure:
    """Loss in training and the score on the validation split over epochs, a line a seed."""
    figure = new_figure(4.8, 4.8)
    loss, below = figure.subplots(2, 1, sharex=True)
    score = next(iter(trained.values()))[0].task.score
    ends = []
    for index, (label, seeds) in enumerate(trained.items()):
        for number, result in enumerate(seeds):
            look = line_look(index) | {
                "alpha": 0.9 if number == 0 else 0.45,
                "label": label if number == 0 else None,
            }
            _plot(loss, result, "train_loss", look | {"marker": ""})
            last = _plot(below, result, f"validation_{result.task.logged}", look)
            if number == 0 and last is not None:
                ends.append(End(label, *last, look))
    share = score.form == "share"
    loss.set(ylabel="Cross-entropy in training" if share else "Loss in training", title="Training")
    below.set_ylabel(f"Validation {title_of(score)}{unit_of(score)}")
    whole_epochs(below)
    if share:
        share_axis(below, f"Validation {score.label}")
    if "" not in trained:
        name_curves(figure, below, ends, 1.7)
    return figure


def _plot(axes: Axes, result: Outcome, name: str, look: Mapping) -> tuple[float, float] | None:
    """One logged value over the epochs, where it is known; its last point."""
    epochs, values = [], []
    for row in result.curve:
        epoch, value = row["epoch"], row.get(name)
        if epoch is not None and value is not None:
            epochs.append(epoch)
            values.append(value)
    axes.plot(epochs, values, **look)
    return (epochs[-1], values[-1]) if epochs else None


def agreement_points(seeds: Sequence[Outcome], name: str) -> list[Point]:
    """One point an epoch over the seeds of one method; [] where a seed has no such list.

    name: a key of AGREEMENTS. A list that is shorter than the training has epochs ends with the
    last epoch.
    """
    lists = [getattr(result, name) or () for result in seeds]
    if not all(lists):
        return []
    epochs = max(len(getattr(result, key) or ()) for result in seeds for key in AGREEMENTS)
    by_epoch: list[dict[float, float]] = [
        {
            epoch: value
            for epoch, value in enumerate(values, start=1 + epochs - len(values))
            if value is not None
        }
        for values in lists
    ]
    return over(by_epoch, (0.0, 1.0))


@styled
def routing_agreement(curves: Mapping[str, Mapping[str, Sequence[Point]]]) -> Figure:
    """Two panels over epochs; curves: key of AGREEMENTS → method → points (TGR, figure 3)."""
    figure = new_figure(9.8, 3.9)
    panels = figure.subplots(1, 2, sharex=True, sharey=True)
    named = []
    for axes, (name, title) in zip(panels, AGREEMENTS.items(), strict=True):
        ends = draw_curves(axes, curves[name])
        axes.set(title=title, ylim=(0, 1.02))
        whole_epochs(axes)
        if ends:
            named = [(axes, ends)]
    share_axis(panels[0], "Tokens")
    for axes, ends in named:
        name_curves(figure, axes, ends, 3.9 - AROUND)
    return figure


def confusion_matrix(counts: Sequence[Sequence[int]], classes: Sequence[str]) -> Figure:
    """Share of each true class (rows) that was predicted as each class (columns)."""
    shares = shares_of(counts)
    few = len(classes) <= NUMBERED
    names = list(classes) if few else []
    texts = texts_of(shares, 0.005) if few else np.full(shares.shape, "", dtype=object)
    labels = Labels("Confusion", names, names, "Predicted", "True", slanted=True)
    caption = "Percent of each true class."
    return heat_table(shares, texts, labels, (4.8, 4.7), caption)


def shares_of(counts: Sequence[Sequence[int]]) -> np.ndarray:
    """Counts (K, K) as shares of each row; a class without images has zeros."""
    table = np.asarray(counts, dtype=float)
    return table / np.maximum(table.sum(axis=1, keepdims=True), 1)


def class_maps(result: Outcome) -> Figure:
    """Mean routing of each class in the last MoE layer over the epochs."""
    rows = {
        f"epoch {epoch}": [layers[-1] for layers in classes]
        for epoch, classes in result.class_maps.items()
    }
    return expert_maps(rows, result.task.classes, caption="Last MoE layer.")
