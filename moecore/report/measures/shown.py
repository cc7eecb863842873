"""What the report has to say about one kind of result."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from moecore.core.config import Config
from moecore.report.column import Column, Columns
from moecore.report.measured import Phase
from moecore.report.page.view import Block, Picture
from moecore.report.references import column_context
from moecore.tasks.base import Task

Figures = Iterator[tuple[str, Figure]]


def every_task(task: Task) -> bool:
    """For results that all tasks have."""
    return True


class Shown(NamedTuple):
    """One entry of the table of what is shown; a file in report/measures/ gives the last three."""

    stage: str  # that writes the result, below artifacts/measured; "" for the trainings
    title: str  # in the list of what was measured
    result: type[Config]
    columns: Sequence[Columns]
    figures: Callable[[Any], Figures]
    part: Callable[[Phase], Iterable[Block]] | None = None  # None: the figures, folded
    applies: Callable[[Task], bool] = every_task

    def blocks(self, phase: Phase) -> list[Block]:
        """What the page says of it."""
        if self.part is not None:
            return list(self.part(phase))
        drawn = each_method(phase, self.result, self.figures)
        title = self.title[0].upper() + self.title[1:]
        about = next((one.name for one in self.named(phase) if one.better), "")
        return [Block(title, pictures=drawn, folded=True, about=about)]

    def named(self, phase: Phase) -> list[Column]:
        """Its columns in this phase."""
        known = column_context(phase, self.result)
        return [column for entry in self.columns for column in entry.columns(known)]


def each_method(
    phase: Phase, kind: type[Config], figures: Callable[[Any], Figures]
) -> list[Picture]:
    """The figures of every method's first seed."""
    return [picture for of_name in by_name(phase, kind, figures).values() for picture in of_name]


def by_name(
    phase: Phase, kind: type[Config], figures: Callable[[Any], Figures]
) -> dict[str, list[Picture]]:
    """A figure's name → that figure of every method's first seed; [] for an unknown name."""
    pictures: dict[str, list[Picture]] = defaultdict(list)
    for method, result in phase.first(kind).items():
        for name, figure in figures(result):
            label = f"{phase.name}: {name.replace('_', ' ')} of {method}"
            caption = f"{method}. {getattr(figure, 'caption', '')}".strip() + phase.first_seed
            pictures[name].append(Picture(figure, label, caption))
    return pictures
