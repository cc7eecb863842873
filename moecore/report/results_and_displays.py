"""Reads a study's result files, and lists what the report displays of each measurement."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from moecore.core.config import Config, collect_constants_named, find_class
from moecore.core.files import UserError, read_json
from moecore.core.source_layout import list_allowed_modules
from moecore.data.card import parse_card_task
from moecore.measure import base
from moecore.measure.pixel_baselines import Baselines
from moecore.measure.transfer_attacks import Transfer
from moecore.measure.values import Chart, Found
from moecore.report.column import FillIn, MetricColumns, build_column_context, fill_score_words
from moecore.report.figures import charts, drawing
from moecore.report.page.page_objects import PageBlock, Picture
from moecore.report.result_types import (
    ModelResults,
    PhaseResults,
    StudyResults,
    add_measurements_to_stages,
)
from moecore.study.run_and_claims import PhaseName as PhaseName
from moecore.study.run_and_claims import RunSelection, file_defines_measurement
from moecore.study.stages import CALCULATE, MEASURE, MEASURED_STAGES
from moecore.tasks.base import Task

Figures = Iterator[tuple[str, drawing.Figure]]
Draw = Callable[[Any], Figures]
Kind = type[base.MeasuredPart]  # of results
PICTURES_PACKAGE = "moecore.report.pictures"  # folder of the modules with a constant PICTURES


class Pictures(NamedTuple):
    """What the report shows of a measurement in addition to charts that its class declares."""

    stage: str  # name of the measurement ("routing") or of a part ("routing.roles")
    figures: Draw = lambda result: iter(())
    is_on_page: bool = True  # below the charts; False: only on a run's page
    above: Callable[[PhaseResults], Iterable[PageBlock]] = lambda phase: ()  # blocks before charts
    draw: Callable[[PhaseResults], Iterable[Picture]] = lambda phase: ()  # after these, all methods
    more: Callable[[PhaseResults], Iterable[PageBlock]] = lambda phase: ()  # blocks after these
    fill_in: FillIn | None = None  # words that depend on more than one place
    kind: type[base.MeasuredPart] | None = None  # for a stage that is not a measurement
    applies: Callable[[Task], bool] = lambda task: True  # for such a stage
    # (path, stage) → values, or ``SkipReason``; raises as ``read_result``.
    read: Callable[[Path, str], Any] = lambda path, stage: base.read_result(path, Found, stage)


class MeasurementDisplay(NamedTuple):
    """What the report shows of a measurement, of an optional part, or of a stage (training …)."""

    stage: str  # folder of the results below artifacts/measured; "" for trainings
    kind: type[base.MeasuredPart]
    pictures: Pictures
    within: str = ""  # for a part of a measurement: the setting that adds it

    @property
    def title(self) -> str:
        return self.kind.page.title or self.stage.rpartition(".")[2].replace("_", " ")

    @property
    def columns(self) -> MetricColumns:
        return MetricColumns(self.stage, self.kind, self.within, self.pictures.fill_in)

    def applies(self, task: Task) -> bool:
        return self.pictures.applies(task)

    def read(self, path: Path, stage: str) -> Found | base.SkipReason | None:
        """Return the result at ``path``; None for a part (``within``) that the result lacks."""
        result = self.pictures.read(path, stage)
        if not self.within or isinstance(result, base.SkipReason):
            return result
        part = result.facts.get(self.within)
        if part is None:
            return None
        if set(part) == {"skipped"}:
            return base.SkipReason.model_validate(part)
        return result

    def blocks(self, phase: PhaseResults) -> list[PageBlock]:
        kind, pictures = self.kind, self.pictures
        page = kind.page
        shown = [row for chart in page.charts for row in draw_metric_chart(phase, kind, chart)]
        if pictures.is_on_page:
            shown += first_seed_pictures(phase, kind, pictures.figures)
        shown += pictures.draw(phase)
        results = phase.results(kind)
        skipped = dict.fromkeys(f"{reason}." for result in results for reason in result.skipped)
        title = page.heading or self.title[0].upper() + self.title[1:]
        block = PageBlock(title, pictures=shown, below=list(skipped), about=self.main_column(phase))
        return [*pictures.above(phase), block, *pictures.more(phase)]

    def main_column(self, phase: PhaseResults) -> str:
        """Return the name of the column that a folded block of the report shows as its summary."""
        name = self.kind.page.about
        context = build_column_context(phase, self.kind)
        metric = self.kind.metrics.get(name)
        if metric is not None and metric.name and not metric.mean:
            name = next((column.name for column in self.columns.columns_of(context, name)), "")
        directed = (column.name for column in self.columns.columns(context) if column.better)
        return name or next(directed, "")


def list_displays() -> list[MeasurementDisplay]:
    """Return the displays of all measurements and stages, in the order of the page."""
    try:
        constants = collect_constants_named(PICTURES_PACKAGE, "PICTURES")
        lists = [[value] if isinstance(value, Pictures) else value for value in constants]
        pages = list(chain(*lists))
        by_stage = {page.stage: page for page in pages}
        displays = [MeasurementDisplay(page.stage, page.kind, page) for page in pages if page.kind]
        for name in list_measurements_with_values():
            kind = find_class(base.Measurement, name)
            displays.append(MeasurementDisplay(name, kind, by_stage.get(name, Pictures(name))))
            for within, part in kind.parts.items():
                pictures = by_stage.get(f"{name}.{within}", Pictures(name))
                displays.append(MeasurementDisplay(name, part, pictures, within))
    except ValueError as error:
        raise UserError(f"report: {error}") from None
    return sorted(displays, key=lambda shown: (shown.kind.page.place, shown.stage))


def list_measurements_with_values() -> list[str]:
    names = [*base.builtin_measurements(), *list_allowed_modules(file_defines_measurement)]
    return [name for name in names if find_class(base.Measurement, name).puts_values()]


def list_calculations(results: StudyResults) -> list[tuple[MeasurementDisplay, PhaseResults]]:
    """Return (display, result as a phase) per calculation, which is a model-free measurement."""
    if not results.calculations:
        return []
    displays = {display.stage: display for display in list_displays() if not display.within}
    pairs = []
    for name, result in results.calculations.items():
        display = displays[name]
        models = {name: {0: ModelResults({display.kind: result})}}
        pairs.append((display, PhaseResults("calculation", {}, base.PLACEHOLDER_TASK, models)))
    return pairs


def results_by_phase_or_calculation(results: StudyResults) -> dict[str, PhaseResults]:
    calculated = {display.stage: phase for display, phase in list_calculations(results)}
    return {**results.phases, **calculated}


def draw_metric_chart(phase: PhaseResults, kind: Kind, chart: Chart) -> list[Picture]:
    score = phase.task.score
    share = chart.share if chart.share is not None else score.form == "share"
    title, x, y = (fill_score_words(text, score) for text in (chart.title, chart.x, chart.y))
    spec = charts.ChartSpec(title, x, y, share, chart.top if share else None, chart.height)
    read = lambda result: result.curve(chart.metric, chart.over)
    return draw_method_curves(phase, kind, read, spec, chart.words, limits=chart.limits)


def first_seed_pictures(phase: PhaseResults, kind: Kind, figures: Draw) -> list[Picture]:
    return list(chain(*draw_pictures_by_name(phase, kind, figures).values()))


def draw_pictures_by_name(phase: PhaseResults, kind: Kind, draw: Draw) -> dict[str, list[Picture]]:
    """Return figure name → a picture per method; draw: draws the first seed's result."""
    pictures = defaultdict(list)
    for method, result in phase.first(kind).items():
        for name, figure in draw(result):
            label = f"{phase.name}: {name.replace('_', ' ')} of {method}"
            caption = f"{method}. {getattr(figure, 'caption', '')}".strip() + phase.seed_note
            pictures[name].append(Picture(figure, label, caption))
    return pictures


def draw_method_curves(
    phase: PhaseResults,
    kind: Kind,
    read: Callable[[Found], charts.Series],
    spec: charts.ChartSpec,
    words: str,  # start of the caption
    label: str = "",  # "": the title
    limits: charts.Limits = charts.NO_LIMITS,
) -> list[Picture]:
    """Return a list with one chart, a curve per method averaged over seeds; [] without points."""
    seeds = phase.of(kind)
    curves = {
        method: charts.points_over_seeds([read(result) for result in results], limits)
        for method, results in seeds.items()
    }
    if not any(curves.values()):
        return []
    caption = f"{words} {charts.interval_caption(seeds)}"
    figure = charts.curves_chart(curves, spec)
    return [Picture(figure, f"{phase.name}: {label or spec.title}", caption)]


MEASURED_FOLDER = Path("artifacts/measured")


def read_results(
    run: RunSelection,
    settings: str,
    root: str | Path = ".",
    stages: Collection[str] = MEASURED_STAGES,
) -> StudyResults:
    # settings: text of params.yaml; stages: of the study's dvc.yaml.
    measured = add_measurements_to_stages(stages, run)
    calculations = {}
    for name in run.calculations:
        result = base.read_result(Path(root, MEASURED_FOLDER, f"{name}.json"), Found, CALCULATE)
        assert isinstance(result, Found), f"{name} is never skipped"
        calculations[name] = result
    phases = {name: _read_phase(Path(root), run, measured, name) for name in run.phases}
    return StudyResults(phases, settings, calculations)


def _read_phase(
    root: Path, run: RunSelection, stages: Collection[str], name: PhaseName
) -> PhaseResults:
    card, task = read_data_card_and_task(root, name)
    displays = [
        shown
        for shown in list_displays()
        if shown.applies(task)
        and (not shown.stage or (shown.stage in stages and run.covers(shown.stage, name)))
    ]
    models = {
        method: {
            seed: read_model_results(root, name, f"{method}/{seed}", displays, run.measurements)
            for seed in run.seeds
        }
        for method in run.methods
    }
    together: dict[type[Config], Config] = {}
    files = {Transfer: f"transfer/{name}/{run.seeds[0]}.json", Baselines: f"baselines/{name}.json"}
    for kind, file in files.items():
        stage = file.partition("/")[0]
        if stage in stages:
            result = base.read_result(root / MEASURED_FOLDER / file, Found, stage)
            if not isinstance(result, base.SkipReason):
                together[kind] = result
    return PhaseResults(name, card, task, models, together)


def read_data_card_and_task(root: Path, phase: str) -> tuple[dict[str, Any], Task]:
    path = root / "artifacts/data" / phase / "card.json"
    card = read_json(path)
    try:
        return card, parse_card_task(card["task"])
    except (KeyError, TypeError, ValidationError) as error:
        reason = " ".join(str(error).split())
        older = f"was written by an older version of moecore ({reason})"
        raise UserError(f"{path}: {older}; run `dvc repro prepare`") from None


def read_model_results(
    root: Path,
    phase: str,
    model: str,  # method/seed, such as ``vmoe/0``
    displays: Iterable[MeasurementDisplay],
    measurements: Collection[str] = (),  # those of the stage ``measure``
) -> ModelResults:
    results: dict[type[Config], Config] = {}
    skipped = []
    for shown in displays:
        path = root / MEASURED_FOLDER / shown.stage / phase / f"{model}.json"
        stage = shown.stage or phase
        if stage in measurements:
            stage = MEASURE
        result = shown.read(path, stage)
        if isinstance(result, base.SkipReason):
            skipped.append(f"{shown.title}: {result.skipped}")
        elif result is not None:
            results[shown.kind] = result
    return ModelResults(results, tuple(skipped))
