"""What the report has to say about one kind of result, and the pictures that measurements share."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from moecore.core.config import Config, collect_constants_named, find_class
from moecore.core.files import UserError
from moecore.core.outside_packages import list_allowed_modules
from moecore.measure.base import (
    MeasuredPart,
    Measurement,
    Skipped,
    builtin_measurements,
    read_result,
)
from moecore.measure.values import Chart, Found, OnPage
from moecore.report.column import Columns
from moecore.report.figures.charts import (
    EVERYWHERE,
    ChartSpec,
    Limits,
    curves_chart,
    interval_caption,
    points_over_seeds,
)
from moecore.report.metric_columns import FillIn, MetricColumns, fill_words
from moecore.report.page.view import Block, Picture
from moecore.report.reference_methods import column_context
from moecore.report.typed_results import Phase
from moecore.tasks.base import Task

Figures = Iterator[tuple[str, Figure]]
Draw = Callable[[Any], Figures]
PICTURES = "moecore.report.pictures"  # the folder of modules that have PICTURES


class Pictures(NamedTuple):
    """What no chart of a measurement's page shows: PICTURES of a module."""

    stage: str  # the measurement's name, "routing", or that of a part, "routing.roles"
    figures: Draw = lambda result: iter(())
    is_on_page: bool = True  # below the charts; False: of a run's own page alone
    above: Callable[[Phase], Iterable[Block]] = lambda phase: ()  # blocks before the charts
    draw: Callable[[Phase], Iterable[Picture]] = lambda phase: ()  # below these, of all methods
    more: Callable[[Phase], Iterable[Block]] = lambda phase: ()  # blocks after these
    fill_in: FillIn | None = None  # words that depend on more than one place


class Shown(NamedTuple):
    """One kind of result; a file in report/measures/, or a module from outside, has its own."""

    stage: str  # that writes the result, below artifacts/measured; "" for the trainings
    title: str  # in the list of what was measured
    result: type[Config]
    columns: Sequence[Columns] = ()
    figures: Draw = lambda result: iter(())
    part: Callable[[Phase], Iterable[Block]] | None = None  # None: the figures, folded
    applies: Callable[[Task], bool] = lambda task: True
    place: int = 100  # in the order of the page; of one place, by the names of their files
    within: str = ""  # the setting of the measurement that it is a part of

    def read(self, path: Path, stage: str) -> Config | Skipped | None:
        """Return the result in the file that ``stage`` wrote, or why there is none.

        None for a part that was not asked. Raises UserError as ``read_result`` does.
        """
        if not issubclass(self.result, MeasuredPart):
            return read_result(path, self.result, stage)
        whole = read_result(path, Found, stage)
        if not self.within or isinstance(whole, Skipped):
            return whole
        part = whole.facts.get(self.within)
        if part is None:
            return None
        return Skipped.model_validate(part) if set(part) == {"skipped"} else whole

    def has_figures_of(self, result: Any) -> bool:
        """Return whether a result is of this kind; ``calibrate`` has one kind for ages, and one for
        classes.
        """
        if not isinstance(result, Found):
            return result is not None and not isinstance(result, Skipped)
        kind: Any = self.result
        names = {value.metric for value in result.values}
        return bool(self.within) or not names or not names.isdisjoint(kind.metrics)

    def is_asked(self, settings: Any) -> bool:
        """Return whether these settings of a study ask for it where its stage is."""
        return not self.within or getattr(getattr(settings, self.stage), self.within) is not None

    def blocks(self, phase: Phase) -> list[Block]:
        """What the page says of it."""
        if self.part is not None:
            return list(self.part(phase))
        drawn = first_seed_pictures(phase, self.result, self.figures)
        title = self.title[0].upper() + self.title[1:]
        return [Block(title, pictures=drawn, about=self.first_directed(phase))]

    def first_directed(self, phase: Phase) -> str:
        """Return the name of the first column that is better one way; "" for none."""
        known = column_context(phase, self.result)
        named = [column for entry in self.columns for column in entry.columns(known)]
        return next((column.name for column in named if column.better), "")


def list_displays() -> list[Shown]:
    """Return what there is to show, in the order of the page; UserError for a faulty module."""
    try:
        displays = collect_constants_named(__name__.rpartition(".")[0], "SHOWN")
        pictures = {one.stage: one for one in collect_constants_named(PICTURES, "PICTURES")}
        for name in list_measurements_with_values():
            kind = find_class(Measurement, name)
            displays.append(display_measurement(name, kind, pictures.get(name, Pictures(name))))
            for within, part in kind.parts.items():
                drawn = pictures.get(f"{name}.{within}", Pictures(name))
                displays.append(display_measurement(name, part, drawn, within))
    except ValueError as error:
        raise UserError(f"report: {error}") from None
    return sorted(displays, key=lambda shown: (shown.place, shown.stage))


def list_measurements_with_values() -> list[str]:
    """Return the names of the measurements that put values; ValueError for a faulty module."""
    names = [*builtin_measurements(), *list_allowed_modules(defines_measurement)]
    return [name for name in names if find_class(Measurement, name).puts_values()]


def defines_measurement(file: Path) -> bool:
    """Return whether a module from outside holds a measurement."""
    return "(Measurement):" in file.read_text(encoding="utf-8")


def display_measurement(
    name: str, kind: type[MeasuredPart], pictures: Pictures, within: str = ""
) -> Shown:
    """Return what is shown of the metrics of a measurement, or of what is within it, and its
    pictures that no chart draws.
    """
    columns = (MetricColumns(name, kind, within, pictures.fill_in),)
    shown = Shown(name, kind.page.title, kind, columns, pictures.figures)
    shown = shown._replace(place=kind.page.place, within=within)
    return shown._replace(part=lambda phase: measurement_blocks(phase, shown, pictures))


def measurement_blocks(phase: Phase, shown: Shown, pictures: Pictures) -> list[Block]:
    """Return the charts of a measurement's page, its pictures, and what was not measured."""
    kind: Any = shown.result
    page: OnPage = kind.page
    drawn = [picture for chart in page.charts for picture in draw_chart(phase, kind, chart)]
    if pictures.is_on_page:
        drawn += first_seed_pictures(phase, kind, pictures.figures)
    drawn += pictures.draw(phase)
    skipped = dict.fromkeys(f"{reason}." for one in phase.found(kind) for reason in one.skipped)
    about = about_column(phase, shown, page.about) or shown.first_directed(phase)
    title = page.heading or page.title[0].upper() + page.title[1:]
    block = Block(title, pictures=drawn, below=list(skipped), about=about)
    return [*pictures.above(phase), block, *pictures.more(phase)]


def about_column(phase: Phase, shown: Shown, name: str) -> str:
    """Return a column's own name, or the first column of a metric; "" for none."""
    kind: Any = shown.result
    metric = kind.metrics.get(name)
    if metric is None or metric.mean or not metric.name:
        return name
    known = column_context(phase, shown.result)
    columns = (entry for entry in shown.columns if isinstance(entry, MetricColumns))
    return next((column.name for entry in columns for column in entry.columns_of(known, name)), "")


def draw_chart(phase: Phase, kind: type[Config], chart: Chart) -> list[Picture]:
    """Draw a metric over a place, a line per method."""
    score = phase.task.score
    share = chart.share if chart.share is not None else score.form == "share"
    title, x, y = (fill_words(text, score) for text in (chart.title, chart.x, chart.y))
    look = ChartSpec(title, x, y, share, chart.top if share else None, chart.height)
    return draw_method_curves(
        phase,
        kind,
        lambda result: result.curve(chart.metric, chart.over),
        look,
        chart.words,
        limits=chart.limits,
    )


def first_seed_pictures(phase: Phase, kind: type[Config], figures: Draw) -> list[Picture]:
    """The figures of every method's first seed."""
    return [
        picture
        for of_name in pictures_by_name(phase, kind, figures).values()
        for picture in of_name
    ]


def pictures_by_name(phase: Phase, kind: type[Config], figures: Draw) -> dict[str, list[Picture]]:
    """A figure's name → that figure of every method's first seed; [] for an unknown name."""
    pictures: dict[str, list[Picture]] = defaultdict(list)
    for method, result in phase.first(kind).items():
        for name, figure in figures(result):
            label = f"{phase.name}: {name.replace('_', ' ')} of {method}"
            caption = f"{method}. {getattr(figure, 'caption', '')}".strip() + phase.first_seed
            pictures[name].append(Picture(figure, label, caption))
    return pictures


def draw_method_curves(
    phase: Phase,
    kind: type[Config],
    read: Callable[[Any], Mapping[float, float | None]],
    look: ChartSpec,
    words: str,
    label: str = "",
    limits: Limits = EVERYWHERE,
) -> list[Picture]:
    """Return one chart with a line per method over its seeds, or [] where no method has points.

    read: x → the value of one result, None where it has none; words: of the caption, before those
    on the bands; label: the look's title where it is "".
    """
    seeds = phase.of(kind)
    curves = {
        method: points_over_seeds([read(result) for result in results], limits)
        for method, results in seeds.items()
    }
    if not any(curves.values()):
        return []
    caption = f"{words} {interval_caption(seeds)}"
    return [Picture(curves_chart(curves, look), f"{phase.name}: {label or look.title}", caption)]
