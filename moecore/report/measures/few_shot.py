"""How well frozen features tell classes from a few images each (V-MoE's evaluator; ERMoE)."""

from collections.abc import Callable, Iterator

import numpy as np

from moecore.measure.few_shot import FewShot, Result, Shots
from moecore.report.column import Ahead, Column, Each, decode_items
from moecore.report.figures.charts import Look, curves_chart, interval_caption, points_over_seeds
from moecore.report.measured import Phase
from moecore.report.measures.shown import Figures
from moecore.report.page.view import Block, Picture
from moecore.statistics.intervals import Interval

NOTE = (
    "ridge on frozen features, {} images per class, V-MoE's protocol; mean and interval over draws "
    "of the images; penalty chosen by leaving one out (ERMoE's main paper reports 5-shot)"
)
LEAKY = "the same with the penalty that is best on the test images themselves: too good"


def row_of(result: Result, shots: str) -> Shots | None:
    """The row of so many images per class; None where the smallest class has fewer."""
    return next((row for row in result.rows if row.shots == int(shots)), None)


def with_shots(shots: str, result: Result) -> Column:
    """The score with so many images per class."""

    def read(result: Result) -> Interval | None:
        row = row_of(result, shots)
        return None if row is None else Interval(row.score, row.low, row.high)

    def items(result: Result) -> np.ndarray | None:
        row = row_of(result, shots)
        return None if row is None else decode_items(row.items)

    return Column(
        f"few_shot_{shots}",
        f"{shots}-shot accuracy",
        read,
        "higher",
        "share",
        NOTE.format(shots),
        "ermoe",
        items=items,
        limits="draws",
    )


def leaky(shots: str, result: Result) -> Column:
    """The score with the penalty chosen on the test split."""

    def read(result: Result) -> Interval | None:
        row = row_of(result, shots)
        return None if row is None else Interval(row.leaky_score, row.leaky_low, row.leaky_high)

    return Column(
        f"few_shot_{shots}_leaky",
        f"{shots}-shot accuracy, penalty chosen on test (leaky)",
        read,
        "",
        "share",
        LEAKY,
        "ermoe",
        limits="draws",
        detail=True,
    )


def names_of(result: Result) -> list[str]:
    """1, 5, 10, 25."""
    return [str(row.shots) for row in result.rows]


def ahead_of(end: str = "") -> Callable[[Ahead], list[str]]:
    """The names of the columns, of all the numbers that are asked for."""

    def names(ahead: Ahead) -> list[str]:
        settings = ahead.study.few_shot or FewShot()
        return [f"few_shot_{one}{end}" for one in settings.shots]

    return names


COLUMNS = (
    Each(names_of, with_shots, ahead_of(), "share"),
    Each(names_of, leaky, ahead_of("_leaky"), "share"),
)


def figures(result: Result) -> Figures:
    """None: one model is a few points."""
    yield from ()


def part(phase: Phase) -> Iterator[Block]:
    """The score over the number of images per class, a line per method; what was left out."""
    seeds = phase.of(Result)
    curves = {
        method: points_over_seeds(
            [{row.shots: row.score for row in result.rows} for result in of_method], (0.0, 1.0)
        )
        for method, of_method in seeds.items()
    }
    reasons = {
        f"{one.shots} shots: {one.why}."
        for result in phase.results(Result)
        for one in result.skipped
    }
    drawn = []
    if any(curves.values()):
        look = Look(
            "Accuracy from a few images", "Images per class", "Accuracy", share=True, top=1.02
        )
        caption = f"Ridge on frozen features, mean over draws. {interval_caption(seeds)}"
        drawn.append(Picture(curves_chart(curves, look), f"{phase.name}: few shots", caption))
    names = [name for result in phase.results(Result) for name in names_of(result)]
    about = f"few_shot_{max(names, key=int)}" if names else ""
    yield Block("Few shots", pictures=drawn, below=sorted(reasons), folded=True, about=about)
