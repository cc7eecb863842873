"""What is shown of a run: its file for ``dvc metrics show``, its numbers and figures in MLflow."""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from matplotlib.figure import Figure

from moecore.core.config import Config
from moecore.core.files import UserError
from moecore.data.prepared import Prepared
from moecore.measure.base import Skipped, read_result
from moecore.measure.values import Found
from moecore.report import headline_quantities
from moecore.report.column import score_slug
from moecore.report.figures.overview import draw_dataset_samples
from moecore.report.pictures import transfer
from moecore.report.results import Display, Draw, list_displays, read_card_and_task, read_model
from moecore.report.study_results import Measured, Phase, Results
from moecore.report.tables.metrics_by_method import phase_result_columns
from moecore.statistics.intervals import Interval
from moecore.study.stages import MODEL_STAGES, REDUCING_PHASES, TRAINING_PHASES

MOST = 12  # numbers of a run
DIGITS = 5  # significant ones
MLFLOW_DIGITS = 4
MLFLOW_LETTERS = 14  # that a column of MLflow's table shows
SHORT_PHASES = {"pretrain": "pre", "finetune": "fine", "adversarial": "adv"}
Items = Mapping[str, Collection[str]]  # method → the items whose results are of its model
RUN_FIGURES: Mapping[str, Draw] = {"transfer": transfer.figures}  # by stage, of no single model


def render_metrics_files(results: Results) -> dict[str, str]:
    """Return path below reports/ → JSON, metric → number: ``metrics/pretrain/vmoe-0.json`` etc."""
    numbers: dict[str, dict[str, float]] = {}
    for name, result in results.calculations.items():
        rounded = {key: round_significant(number) for key, number in result.numbers().items()}
        numbers[f"calculations/{name}"] = rounded
    for phase in results.phases.values():
        columns = {column.name: column for column in phase_result_columns(phase)}
        names = [headline.name for headline in headline_quantities.HEADLINES if headline.run]
        names = [*names[:4], *headline_quantities.attacked_score_and_change_names(phase), *names]
        # The score comes first, then the score under attack, routing, and cost.
        metrics = [columns[name] for name in dict.fromkeys(names) if name in columns][:MOST]
        for method, seeds in phase.models.items():
            for seed, model in seeds.items():
                numbers[f"{phase.name}/{method}-{seed}"] = {
                    metric.name: round_significant(interval.value)
                    for metric in metrics
                    if (interval := metric.read(model)) is not None
                }
    return {
        f"metrics/{name}.json": json.dumps(values, indent=1) + "\n"
        for name, values in numbers.items()
    }


def round_significant(value: float, digits: int = DIGITS) -> float:
    """Return the value with ``digits`` significant digits; counts stay whole."""
    if value.is_integer():
        return int(value)
    return float(f"{value:.{digits}g}")


def read_headline_numbers(
    study: Path, method: str, seed: int, items: Items
) -> tuple[dict[str, float], dict[str, int]]:
    """Return a model's headline numbers by their names in MLflow, and phase.metric → count."""
    # The last training comes first, and of each phase the score, then the score under attack.
    # items: method → the items whose results are of its present model, for the method and the dense
    # one, to which some numbers are relative. Results of other code are omitted.
    numbers: dict[str, float] = {}
    counts: dict[str, int] = {}
    for name in (*reversed(TRAINING_PHASES), *REDUCING_PHASES):
        try:
            card, task = read_card_and_task(study, name)
        except UserError:
            continue  # not there, or of other code: the run of `prepare` says so
        displays = [shown for shown in list_displays() if shown.applies(task)]
        models = {
            model: {seed: read_current_results(study, name, f"{model}/{seed}", displays, current)}
            for model, current in items.items()
        }
        phase = Phase(name, card, task, models)
        if not models[method][seed].results:
            continue
        metrics = {metric.name: metric for metric in phase_result_columns(phase)}
        slugs = headline_quantities.first_columns(phase, metrics)
        attacked, _ = headline_quantities.attacked_score_and_change_names(phase)
        scores = [f"test_{score_slug(task.score)}", attacked]
        for key in sorted(slugs, key=lambda key: scores.index(key) if key in scores else 2):
            interval = metrics[key].read(models[method][seed])
            if interval is not None and metrics[key].form == "count":
                counts[f"{name}.{key}"] = int(interval.value)
            elif interval is not None:
                numbers |= name_for_mlflow(slugs[key], name, interval)
    return numbers, counts


def name_for_mlflow(slug: str, phase: str, interval: Interval) -> dict[str, float]:
    """Return ``acc/finetune``, ``acc/fine.lo`` and ``acc/fine.hi`` → rounded value and limits."""
    short = f"{slug}/{SHORT_PHASES.get(phase, phase)}"
    name = f"{slug}/{phase}"
    numbers = {name if len(name) <= MLFLOW_LETTERS else short: interval.value}
    if interval.limits is not None:
        numbers |= zip((f"{short}.lo", f"{short}.hi"), interval.limits, strict=True)
    return {name: round_significant(value, MLFLOW_DIGITS) for name, value in numbers.items()}


def read_current_results(
    study: Path, phase: str, model: str, displays: Iterable[Display], items: Collection[str]
) -> Measured:
    """Return the results of a model, such as ``vmoe/0``, whose paths are in ``items``."""
    results: dict[type[Config], Config] = {}
    for shown in displays:
        if Path(shown.stage, phase, model).as_posix() in items:
            with suppress(UserError):  # of other code, or missing: the stage's own run says so
                results |= read_model(study, phase, model, [shown]).results
    return Measured(results)


def draw_run_figures(study: Path, stage: str, item: str) -> Iterator[tuple[str, Figure]]:
    """Yield (name, figure) of the results that an item of a stage wrote in ``study``."""
    # item: its path in artifacts/history.
    if stage == "prepare":
        folder = study / "artifacts/data" / item.removeprefix("prepare/")
        yield "samples", draw_dataset_samples(Prepared.open(folder))
        return
    path = study / "artifacts/measured" / f"{item}.json"
    if stage in RUN_FIGURES:
        yield from RUN_FIGURES[stage](read_result(path, Found, stage))
        return
    folder = "" if stage in MODEL_STAGES else stage
    displays = [display for display in list_displays() if display.stage == folder]
    for shown in sorted(displays, key=lambda display: bool(display.within)):  # parts come last
        result = shown.read(path, stage)
        if result is None or isinstance(result, Skipped):
            continue
        names = {value.metric for value in getattr(result, "values", ())}
        # ``calibrate`` writes ages or classes.
        if shown.within or not names or not names.isdisjoint(shown.kind.metrics):
            yield from shown.pictures.figures(result)
