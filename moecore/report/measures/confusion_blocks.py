"""Which class is taken for which: a matrix for few classes, the commonest mistakes of many."""

from collections.abc import Iterator, Sequence

import numpy as np

from moecore.report.figures.training_figures import NUMBERED, shares_of
from moecore.report.measured import Phase
from moecore.report.page.rows import percent_grid
from moecore.report.page.view import Block, Grid, Item, Line
from moecore.training.outcome import Outcome

LISTED = 10  # mistakes of a method with many classes


def confusion(phase: Phase) -> Block:
    """Share of each true class that was predicted as each class, method by method."""
    tables = {
        method: shares_of(result.confusion)
        for method, result in phase.first(Outcome).items()
        if result.confusion is not None
    }
    if not tables:
        return Block("")
    classes = phase.task.answers
    tiles = [
        tile(shares, classes)._replace(
            title=method, below="Percent of each true class." + phase.first_seed
        )
        for method, shares in tables.items()
    ]
    finding = commonest(list(tables.values()), classes)
    return Block("Confusion of classes", tiles=tiles, folded=True, finding=finding)


def tile(shares: np.ndarray, classes: Sequence[str]) -> Grid:
    """One method's table; shares: (true, predicted)."""
    if len(classes) <= NUMBERED:
        rows = dict(zip(classes, shares.tolist(), strict=True))
        return percent_grid("True, predicted", rows, classes)
    lines = [
        Line(Item(classes[true]), [Item(classes[taken], look="words"), Item(f"{100 * share:.0f}")])
        for share, true, taken in mistakes(shares)
    ]
    return Grid(["True class", "Taken for", "Percent"], lines)


def mistakes(shares: np.ndarray) -> Iterator[tuple[float, int, int]]:
    """The commonest ones: share, true class, predicted class; shares: (true, predicted)."""
    wrong = shares * (1 - np.eye(len(shares)))
    order = np.argsort(-wrong, axis=None, kind="stable")[:LISTED]
    for true, taken in zip(*np.unravel_index(order, wrong.shape), strict=True):
        if wrong[true, taken] > 0:
            yield float(wrong[true, taken]), int(true), int(taken)


def commonest(tables: Sequence[np.ndarray], classes: Sequence[str]) -> str:
    """The commonest mistake of all methods; "" where none was made."""
    if not tables:
        return ""
    worst = next(mistakes(np.mean(tables, axis=0)), None)
    if worst is None:
        return "no test image was taken for another class"
    share, true, taken = worst
    methods = ", mean over methods" if len(tables) > 1 else ""
    return (
        f"{classes[true]} is taken for {classes[taken]} most often ({100 * share:.0f} %{methods})"
    )
