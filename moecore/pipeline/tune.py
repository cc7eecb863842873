"""``moecore tune``: chooses the learning rate of each method on validation images.

Each method is pretrained with each rate of one grid, by seeds that no round of the question has, in
a run folder of its own. Scores, curves and choices are stored in pipelines/results/, from where the
rounds take the chosen rates. Names hold the value: a grid that is shifted trains only what is new.
A router threshold is chosen before, by its share of fallbacks (ERMoE, supplement, §6). Unlike in
the paper, a model is trained with each threshold, which changes that share.
"""

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import chdir
from decimal import Decimal
from hashlib import sha256
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from moecore.core.files import UserError, write_atomic
from moecore.core.source_layout import RUNS
from moecore.data.prepared import Prepared
from moecore.measure.routing_metrics.interventions import mean_routing_metrics
from moecore.nn.predict import predict_in_batches
from moecore.pipeline import dvc_yaml, project_record, run_folders
from moecore.report.results_and_displays import read_results
from moecore.study import params_layers, params_writer, questions, yaml_document
from moecore.study.study import read_study
from moecore.training.artifacts import load_model

BATCH = 500  # validation images per forward pass
STAGES = ("prepare", "teacher", "teacher_router", questions.TUNED_PHASE, "compare")


class TuningPlan(NamedTuple):
    """The trainings that tune a question: each method with each learning rate and seed."""

    question: questions.QuestionFile
    tuning: questions.TuningGrids
    methods: tuple[str, ...]
    stages: tuple[str, ...]
    text: str  # of params.yaml
    also: Mapping[str, Mapping[str, Any]]  # method → its settings with the chosen threshold

    @property
    def folder(self) -> Path:
        return self.question.root / RUNS / f"{self.question.name.replace('/', '.')}.tune"

    @property
    def digest(self) -> str:
        """A digest that changes with any setting of the trainings."""
        return sha256(f"{self.text}{self.tuning.threshold or ''}".encode()).hexdigest()

    def train(self, run_stages: Callable[[], object]) -> None:
        with project_record.hold_project_lock(self.folder / project_record.LOCK):
            write_atomic(self.folder / "params.yaml", self.text)
            run_folders.write_dvc_yaml_files(self.folder, self.stages)
            write_atomic(self.folder / ".dvc/config", dvc_yaml.RUN_CONFIG + dvc_yaml.WITHOUT_GIT)
        with chdir(self.folder):
            run_stages()


def plan_tuning(question: questions.QuestionFile, threshold: float | None = None) -> TuningPlan:
    """Plan tuning of rates, or first of a router's threshold (None); UserError without ``tune``."""
    # threshold: the chosen one; None: plan the trainings that choose it, if tuned.
    tuning = question.tuning
    if tuning is None:
        allowed = "tune: {learning_rates: [5.0e-4, 1.0e-3, 2.0e-3, 4.0e-3, 8.0e-3], seeds: [900]}"
        raise UserError.at(question.path, found="no section tune", allowed=allowed)
    composed = [part.compose() for part in question.rounds]
    runs = [read_study(part.document).run for part in composed]
    if used := {seed for run in runs for seed in run.seeds}.intersection(tuning.seeds):
        text = f"found {min(used)}, a seed of a round; allowed: seeds that no round has"
        raise question.document.error(("tune", "seeds"), text)
    methods = tuple(dict.fromkeys(name for run in runs for name in run.methods))
    used = {stage for part in composed for stage in part.all_stages}
    stages = tuple(stage for stage in STAGES if stage in used)
    top = params_layers.SettingsLayer(question.document, {}, stages, names=methods)
    layers = [*question.rounds[0].layers, top]
    values = params_layers.compose_layers(layers, question.root).document.data
    place, grid, tried = ((questions.TUNED_PHASE, questions.RATE), tuning.learning_rates, methods)
    also: dict[str, Any] = {}
    if (tuned := tuning.threshold) is not None:
        routers = {name: (values["methods"][name] or {}).get("router") or {} for name in methods}
        having = [name for name in methods if questions.THRESHOLD_KEY in routers[name]]
        if tuned.method not in having:
            text = f"found {tuned.method}; allowed: {', '.join(having) or 'none has a threshold'}"
            raise question.document.error(("tune", questions.THRESHOLD_KEY, "method"), text)
        if threshold is None:
            place, grid, tried = ("router", questions.THRESHOLD_KEY), tuned.values, (tuned.method,)
        else:
            kind = routers[tuned.method]["kind"]
            same = [name for name in having if routers[name]["kind"] == kind]
            also = dict.fromkeys(same, {"router": {questions.THRESHOLD_KEY: threshold}})
    entries = {
        name_variant(name, value): params_layers.merge_settings(
            values["methods"][name] or {}, {place[0]: {place[1]: value}} | also.get(name, {})
        )
        for name in tried
        for value in grid
    }
    run = {"methods": list(entries), "seeds": list(tuning.seeds), "phases": [questions.TUNED_PHASE]}
    values |= {"run": run, "methods": entries, "claims": [], "questions": []}
    return TuningPlan(question, tuning, tried, stages, params_writer.dump_inline_yaml(values), also)


def choose_fallback_threshold(
    run: TuningPlan, tuned: questions.FallbackThresholdGrid
) -> dict[str, Any]:
    """Return the threshold with nearly the wanted share of fallbacks to top k, and all shares."""
    # Fallback: no expert of a token is above the threshold, so all of its k best are chosen.
    images = Prepared.open(run.folder / "artifacts/data" / questions.TUNED_PHASE).validation.images
    shares = {}
    for value in tuned.values:
        place = run.folder / "artifacts" / questions.TUNED_PHASE / name_variant(tuned.method, value)
        models = [load_model(place / str(seed)) for seed in run.tuning.seeds]
        routings = [predict_in_batches(model, images, BATCH)[1] for model in models]
        means = [mean_routing_metrics(records, 1, value) for records in routings]
        shares[value] = fmean(mean["fallback"] for mean in means)
    chosen = min(shares, key=lambda value: abs(shares[value] - tuned.fallback))
    if chosen in (tuned.values[0], tuned.values[-1]):
        best = f"found {chosen:g} as the best, an end of the grid, fallback {shares[chosen]:.2%}"
        text = f"{best}; allowed: a grid with the fallback {tuned.fallback:.2%} within"
        raise run.question.document.error(("tune", questions.THRESHOLD_KEY, "values"), text)
    return {"method": tuned.method, "chosen": chosen, "shares": [*shares.items()]}


def name_variant(method: str, value: float) -> str:
    """Return a name such as "vmoe_at_0_001", by value: a shifted grid then reuses trainings."""
    decimal = f"{Decimal(str(value)).normalize():f}"
    return f"{method}_at_{decimal.replace('-', 'minus_').replace('.', '_')}"


def tune_question(
    question: questions.QuestionFile, run_stages: Callable[[], object]
) -> dict[str, Any]:
    run = plan_tuning(question)
    run.train(run_stages)
    if (tuned := run.tuning.threshold) is None:
        return choose_and_store(run)
    threshold = choose_fallback_threshold(run, tuned)
    run = plan_tuning(question, threshold["chosen"])
    run.train(run_stages)
    return choose_and_store(run, threshold)


def choose_and_store(run: TuningPlan, threshold: Mapping[str, Any] | None = None) -> dict[str, Any]:
    study = read_study(yaml_document.parse_yaml_document(run.text))
    phase = read_results(study.run, run.text, run.folder, run.stages).phases[questions.TUNED_PHASE]
    task = phase.task
    grid = run.tuning.learning_rates
    methods = {}
    for method in run.methods:
        trainings = [phase.outcomes[name_variant(method, rate)] for rate in grid]
        scores = [[outcome.validation_score.value for outcome in seeds] for seeds in trainings]
        key = f"validation_{task.history_name}"
        curves = [
            [(point["step"], point[key]) for point in seeds[0].curve if key in point]
            for seeds in trainings
        ]
        chosen = grid[index_of_best_rate(scores, task.score.better)]
        also = run.also.get(method, {})
        methods[method] = {questions.RATE: chosen, "also": also, "scores": scores, "curves": curves}
    stored = {"settings": run.digest, "score": f"validation {task.score.label}"}
    stored |= {"learning_rates": list(grid), "seeds": list(run.tuning.seeds), "methods": methods}
    stored |= {questions.THRESHOLD_KEY: threshold}
    run.question.update_results_file(questions.TUNED_KEY, stored)
    return stored


def index_of_best_rate(scores: Sequence[Sequence[float]], better: str) -> int:
    """Return the index of the rate with the best mean score over seeds; ties: the first."""
    # scores: per rate, per seed. A rate with a score that is not finite is the worst.
    means = [fmean(seeds) if better == "higher" else -fmean(seeds) for seeds in scores]
    finite = [mean if math.isfinite(mean) else -math.inf for mean in means]
    return max(range(len(finite)), key=finite.__getitem__)


def print_tuned_rates(stored: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    heads = [f"{rate:g}" for rate in stored["learning_rates"]]
    first = f"{stored['score']} at a learning rate of"
    table = Table(first, *heads, "chosen", box=None, header_style="bold", padding=(0, 1))
    for name, choice in stored["methods"].items():
        means = [f"{fmean(scores):.4f}" for scores in choice["scores"]]
        table.add_row(name, *means, f"{choice[questions.RATE]:g}")
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def list_tuning_problems(question: questions.QuestionFile) -> Iterator[str]:
    """Yield why a question must be tuned (again); nothing if its rates are valid."""
    if question.tuning is None:
        return
    file = question.results_path.relative_to(question.root)
    tune = f"run `moecore tune {question.name}`"
    stored = question.read_results().get(questions.TUNED_KEY)
    if stored is None:
        yield f"{file}: rates were not chosen; {tune}"
        return
    threshold = (stored.get(questions.THRESHOLD_KEY) or {}).get("chosen")
    if stored["settings"] != plan_tuning(question, threshold).digest:
        yield f"{file}: rates were chosen for other settings, methods, seeds or rates; {tune}"
        return
    yield from list_edge_choices(question, stored)


def list_edge_choices(question: questions.QuestionFile, stored: Mapping[str, Any]) -> Iterator[str]:
    """Yield an error line per method in ``stored`` whose best rate is an end of the grid."""
    rates = stored["learning_rates"]
    for name, choice in stored["methods"].items():
        rate = choice[questions.RATE]
        if rate in (rates[0], rates[-1]):
            end = "lower" if rate == rates[0] else "higher"
            best = f"found {rate:g} as the best rate of {name}, an end of the grid"
            text = f"{best}; allowed: a grid that goes on to {end} rates"
            yield str(question.document.error(("tune", "learning_rates"), text))
