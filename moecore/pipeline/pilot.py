"""``moecore pilot``: four short trainings per seed show whether routing can help on some data.

They are the dense method; the oracle `told`; the oracle with a learned router; and the last again,
started from the oracle's initial weights and a linear router fitted to the oracle's choices. Scores
are of validation images. Shapes: E experts, d width, n tokens.
"""

import math
import sys
import time
from collections.abc import Mapping
from contextlib import chdir
from pathlib import Path
from statistics import fmean, variance
from tempfile import TemporaryDirectory
from typing import Annotated, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from moecore.core.config import Config
from moecore.core.routing_records import RoutingRecord
from moecore.data.prepared import Prepared, Split
from moecore.data.sources.base import Source
from moecore.nn.backbones.base_model import Backbone
from moecore.nn.layers.moe import MoEFeedForward
from moecore.nn.routers.noisy_top_k import NoisyTopK, NoisyTopKRouter
from moecore.nn.routers.told import Told
from moecore.report.tables.metrics_by_method import unfit_metric_problems
from moecore.run.progress import report_progress
from moecore.study.check import check_study
from moecore.study.document import Document, load_yaml_document
from moecore.study.model_rules import PREPARED_DATA, chdir_to_stages, read_matching_data_card
from moecore.study.settings import ParamsKeyTemplate, extract_declared_settings
from moecore.tasks.base import Score, Task
from moecore.training.artifacts import save_no_guide
from moecore.training.job import TrainingJob, training_batch
from moecore.training.loop import forward_and_embed_labels, iterate_training, total_steps
from moecore.training.method import Method
from moecore.training.phase_trainings import build_pretraining
from moecore.training.runtime import tune_runtime
from moecore.training.settings import Training
from moecore.training.surgery.expert_reduction import watch_layers

MIN_GAIN = 10.0  # points, or percent of dense's score, between dense and the oracle
MAX_SECONDS = 60.0  # per training, on one thread
FITTED_TOKENS = 2**15  # to which a router is fitted, from at most one pass over the images
RIDGE = 1e-4  # weight of the squared weights: without it, separable kinds have no optimum


class PilotParams(Config):
    source: Annotated[Source, ParamsKeyTemplate("data.pretrain")]
    model: Backbone
    methods: dict[str, Method]
    pretrain: Training


class PilotRow(NamedTuple):
    """One method: validation score and CPU seconds per seed."""

    name: str
    scores: list[float]
    seconds: list[float]


class PilotResult(NamedTuple):
    score: Score
    dense: PilotRow
    told: PilotRow
    learned: PilotRow
    begun: PilotRow  # learned, started from the oracle's weights and a fitted router
    fitted: float  # share of tokens for which the fitted routers choose as the oracle does

    @property
    def rows(self) -> tuple[PilotRow, ...]:
        return self.dense, self.told, self.learned, self.begun

    @property
    def unit(self) -> str:
        """Return the unit of differences: points of a share, else percent of dense's score."""
        return "points" if self.score.form == "share" else "% of dense"

    @property
    def scale(self) -> float:
        """Return the factor by which a difference of scores is multiplied to be in ``unit``."""
        return 100 / (1 if self.score.form == "share" else abs(fmean(self.dense.scores)))

    def told_ahead_of(self, other: PilotRow) -> float:
        """Return how much better, in ``unit``, the oracle's mean score is than another method's."""
        ahead = self.scale * (fmean(self.told.scores) - fmean(other.scores))
        return ahead if self.score.better == "higher" else -ahead


def run_pilot(path: Path, seeds: int) -> PilotResult:
    """Train the four methods of a params.yaml with ``seeds`` seeds, on one thread."""
    # Nothing is written to its folder.
    check_study(path, also=unfit_metric_problems)
    document = load_yaml_document(path)
    params = extract_declared_settings(PilotParams, document)
    methods = choose_pilot_methods(params, document)
    with TemporaryDirectory() as scratch:
        with chdir_to_stages(path.parent):
            folder = PREPARED_DATA.absolute() / "pretrain"
            if read_matching_data_card(folder / "card.json", params.source) is None:
                folder = Path(scratch, "data")
                params.source.write(folder)
            data = Prepared.open(folder)
            data = data._replace(test=Split(data.test.images[:0], data.test.labels[:0]))
        with chdir(scratch):
            return _train_all(params, methods, data, seeds)


def choose_pilot_methods(params: PilotParams, document: Document) -> dict[str, Method]:
    """Return name → method: a dense one, the oracle, and the oracle with a learned router, twice.

    They are the file's first; the learned router is its first noisy top-k, or a plain one with k =
    1. Routing losses are dropped, so that no method of the study is trained. Raises UserError if
    the file has no dense method or no oracle.
    """
    dense = [name for name, method in params.methods.items() if method.router is None]
    told = [name for name, method in params.methods.items() if isinstance(method.router, Told)]
    if not dense or not told:
        allowed = "one without router and experts, and one with router: {kind: told}"
        text = f"found {', '.join(params.methods) or 'none'}; allowed for a pilot: {allowed}"
        raise document.error(("methods",), text)
    routers = [method.router for method in params.methods.values()]
    plain = NoisyTopK(k=1, noise_std=0.0)
    learned = next((router for router in routers if isinstance(router, NoisyTopK)), plain)
    oracle = params.methods[told[0]]
    mixture = oracle.model_copy(update={"router": learned, "regularizers": ()})
    return {
        dense[0]: params.methods[dense[0]],
        told[0]: oracle,
        "learned": mixture,
        f"learned, begun as {told[0]}": mixture,
    }


def _train_all(
    params: PilotParams, methods: dict[str, Method], data: Prepared, seeds: int
) -> PilotResult:
    runtime = tune_runtime("cpu")
    torch.set_num_threads(1)
    guide = Path("guide")
    guide.mkdir()
    save_no_guide(guide)
    rows = [PilotRow(name, [], []) for name in methods]
    settings = [method.merge_pretrain_settings(params.pretrain) for method in methods.values()]
    shares = []
    for seed in range(seeds):
        jobs = [
            build_pretraining(method, params.model, training, data, guide, seed, "cpu")
            for method, training in zip(methods.values(), settings, strict=True)
        ]
        shares.append(fit_learner_to_oracle(jobs[3], jobs[1], settings[1], seed))
        for row, job, training in zip(rows, jobs, settings, strict=True):
            name = f"validation_{job.task.history_name}"
            begun = time.process_time()
            score = math.nan
            with report_progress(f"{row.name} {seed}", total_steps(job, training)) as bar:
                for point in iterate_training(job, training, seed, runtime):
                    score = point.values.get(name, score)
                    bar.update(point.step)
            row.scores.append(math.exp(score) if job.task.long else score)
            row.seconds.append(time.process_time() - begun)
    return PilotResult(pilot_score_for_task(data.task), *rows, fitted=fmean(shares))


def fit_learner_to_oracle(
    learner: TrainingJob, oracle: TrainingJob, settings: Training, seed: int
) -> float:
    """Copy the oracle's weights to ``learner.model`` and fit its routers to the oracle's choices.

    Both models are untrained, so the two trainings differ only in their routers. Returns the share
    of the fitted tokens for which these routers choose as the oracle does, mean over layers.
    """
    learner.model.load_state_dict(oracle.model.state_dict(), strict=False)
    shares = []
    for name, (tokens, chosen) in _oracle_choices(oracle, settings, seed).items():
        router = learner.model.get_submodule(f"{name}.router")
        assert isinstance(router, NoisyTopKRouter)
        weight = fit_linear_router(tokens, chosen, len(router.weight))
        router.weight.data.copy_(weight)
        shares.append(float(((tokens @ weight.T).argmax(dim=-1) == chosen).float().mean()))
    return fmean(shares)


@torch.no_grad()
def _oracle_choices(
    oracle: TrainingJob, settings: Training, seed: int
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return name of an MoE layer → tokens (n, d) of training images, and their experts (n,)."""
    pairs: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def keep(name: str, layer: MoEFeedForward, tokens: Tensor, record: RoutingRecord) -> None:
        chosen = record.chosen.int().argmax(dim=-1)
        pairs.setdefault(name, []).append((tokens.flatten(0, 1), chosen.flatten()))

    with watch_layers(oracle.model, keep):
        for step in range(oracle.updates(settings)):
            batch = training_batch(oracle, settings, seed, step)
            forward_and_embed_labels(oracle, batch, None, 0.0)
            counts = [sum(len(chosen) for _, chosen in batches) for batches in pairs.values()]
            if all(count >= FITTED_TOKENS for count in counts):
                break
    columns = {name: zip(*batches, strict=True) for name, batches in pairs.items()}
    return {
        name: (torch.cat(tokens), torch.cat(chosen)) for name, (tokens, chosen) in columns.items()
    }


def fit_linear_router(tokens: Tensor, chosen: Tensor, experts: int) -> Tensor:
    """Return the weight (E, d) of a softmax regression of ``chosen`` (n,) on ``tokens`` (n, d)."""
    weight = torch.zeros(experts, tokens.shape[-1], requires_grad=True)
    optimizer = torch.optim.LBFGS([weight], max_iter=100, line_search_fn="strong_wolfe")

    def compute_loss() -> Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(tokens @ weight.T, chosen) + RIDGE * weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(compute_loss)
    return weight.detach()


def pilot_score_for_task(task: Task) -> Score:
    """Return the score by which a pilot judges: perplexity for text, else the task's."""
    if task.long:
        return Score("ppl", "perplexity", "", "number", "lower")
    return task.score


def pilot_verdicts(result: PilotResult) -> dict[str, bool]:
    """Return line → whether it holds: routing gains enough, has room to learn, is fast."""
    # Differences are in ``PilotResult.unit``. Room must exceed a method's standard deviation over
    # seeds, pooled from the variances of all four.
    told = result.told.name
    unit = result.unit
    scatter = result.scale * math.sqrt(fmean(variance(row.scores) for row in result.rows))
    room = result.told_ahead_of(result.dense)
    gap = result.told_ahead_of(result.learned)
    slowest = max(max(row.seconds) for row in result.rows)
    gain = f"{told} is {room:.1f} {unit} better than {result.dense.name}; needed: {MIN_GAIN:g}"
    learnable = f"{told} is {gap:.2f} {unit} better than a learned router; needed: more than "
    learnable += f"{scatter:.2f}, the scatter of seeds"
    length = f"the longest training took {slowest:.0f} s of one thread; allowed: {MAX_SECONDS:g}"
    return {gain: room >= MIN_GAIN, learnable: gap > scatter, length: slowest <= MAX_SECONDS}


def print_pilot(result: PilotResult, verdicts: Mapping[str, bool]) -> None:
    """Print the scores of every seed, the result of the fitted router, and the verdicts."""
    from rich.console import Console
    from rich.table import Table

    factor, unit = (100, ", %") if result.score.form == "share" else (1, "")
    seeds = [f"seed {seed}" for seed in range(len(result.told.scores))]
    heads = [f"validation {result.score.label}{unit}", *seeds, "mean", "s a training"]
    table = Table(*heads, box=None, header_style="bold", padding=(0, 1))
    for row in result.rows:
        scores = [*row.scores, fmean(row.scores)]
        cells = [f"{factor * score:.2f}" for score in scores]
        table.add_row(row.name, *cells, f"{fmean(row.seconds):.1f}")
    console = Console(width=None if sys.stdout.isatty() else 200)
    console.print(table)
    told = result.told.name
    ahead = result.told_ahead_of(result.begun)
    lines = [f"{'yes' if holds else 'no':<3} {line}" for line, holds in verdicts.items()]
    lines.append(
        f"A router that begins with {result.fitted:.1%} of tokens as {told} ends {abs(ahead):.2f} "
        f"{result.unit} {'below' if ahead > 0 else 'above'} it."
    )
    lines.append("Worth a study." if all(verdicts.values()) else "Not worth a study.")
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
