"""``moecore pilot``: short trainings that show whether routing can help on some data.

They are the dense method; where the file has them a wider dense one, V-MoE and the hash; and with
the oracle `told` also the oracle, the oracle with a learned router, and the last again, started
from the oracle's initial weights and a linear router fitted to the oracle's choices. Scores are of
validation images. Shapes: E experts, d width, n tokens.
"""

import math
import sys
import time
from collections.abc import Mapping, Sequence
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
from moecore.nn.routers.hash import Hash
from moecore.nn.routers.noisy_top_k import NoisyTopK, NoisyTopKRouter
from moecore.nn.routers.told import Told
from moecore.report.tables.metrics_by_method import unanswerable_claims
from moecore.run.run_record import printing_progress
from moecore.study import check, model_rules, params_reader, yaml_document
from moecore.tasks.base import Score, Task
from moecore.training import artifacts, loop
from moecore.training.job import TrainingJob, training_batch
from moecore.training.method import Method
from moecore.training.phase_trainings import build_pretraining
from moecore.training.runtime import tune_runtime
from moecore.training.settings import Training
from moecore.training.surgery.expert_reduction import calling_after_each_routing

MIN_ORACLE_GAIN = 10.0  # points, or percent of dense's score, between dense and the oracle
MIN_VMOE_GAIN_OVER_HASH = 2.0  # points, or percent of dense's score, between the hash and V-MoE
MAX_SECONDS = 90.0  # per training, on one thread
VMOE_LOSSES = {"importance", "load"}
WIDTH_SETTINGS = {"mlp_ratio", "hidden"}  # settings of the hidden width of a model
FITTED_TOKENS = 2**15  # to fit a router, from at most one pass over the images
RIDGE = 1e-4  # weight of the squared weights: without it, separable kinds have no optimum
Choices = tuple[Tensor, Tensor]  # tokens (n, d), and the expert of each (n,)


class PilotParams(Config):
    source: Annotated[Source, params_reader.ParamsKeyTemplate("data.pretrain")]
    model: Backbone
    methods: dict[str, Method]
    pretrain: Training


class PilotRow(NamedTuple):
    name: str
    scores: list[float]  # on validation images, per seed
    seconds: list[float]  # CPU time, per seed


class PilotResult(NamedTuple):
    """Scores per role of a method ("told": the oracle, …); agreement of routers fitted to it."""

    score: Score
    rows: Mapping[str, PilotRow]
    fitted: float = math.nan  # share of tokens for which fitted routers choose as the oracle does

    @property
    def unit(self) -> str:
        """The unit of differences: percentage points for shares, else percent of dense's score."""
        return "points" if self.score.form == "share" else "% of dense"

    @property
    def scale(self) -> float:
        """The factor that converts a difference of scores to ``unit``."""
        if self.score.form == "share":
            return 100
        return 100 / abs(fmean(self.rows["dense"].scores))

    @property
    def scatter(self) -> float:
        """The standard deviation of scores over seeds, in ``unit``, pooled over methods."""
        return self.scale * math.sqrt(fmean(variance(row.scores) for row in self.rows.values()))

    def advantage(self, role: str, other: str) -> float:
        """Return by how much ``role`` is better than ``other``, as mean score, in ``unit``."""
        ahead = fmean(self.rows[role].scores) - fmean(self.rows[other].scores)
        return self.scale * (ahead if self.score.better == "higher" else -ahead)


class PilotVerdict(NamedTuple):
    text: str  # the criterion
    holds: bool
    study: str  # "truth" or "accuracy"; "": every study


def run_pilot(path: Path, seeds: int) -> PilotResult:
    """Train the pilot's methods of a params.yaml with seeds 0, 1, …, on one CPU thread."""
    # Nothing is written to its folder.
    check.check_study(path, also=unanswerable_claims)
    document = yaml_document.load_yaml_document(path)
    params = params_reader.extract_settings(PilotParams, document)
    methods = choose_pilot_methods(params, document)
    with TemporaryDirectory() as scratch:
        with model_rules.chdir_to_study(path.parent):
            folder = model_rules.PREPARED_DATA.absolute() / "pretrain"
            if model_rules.read_matching_data_card(folder / "card.json", params.source) is None:
                folder = Path(scratch, "data")
                params.source.write(folder)
            data = Prepared.open(folder)
            data = data._replace(test=Split(data.test.images[:0], data.test.labels[:0]))
        with chdir(scratch):
            return _train_all(params, methods, data, seeds)


def choose_pilot_methods(
    params: PilotParams, document: yaml_document.YamlDocument
) -> dict[str, tuple[str, Method]]:
    """Return role → (name, method): the first method of each role in params.yaml."""
    # ``learned`` and ``begun`` are the oracle with the file's first noisy top-k, or a plain one
    # with k = 1, and no routing loss.
    roles: dict[str, tuple[str, Method]] = {}
    routers = [method.router for method in params.methods.values()]
    for name, method in params.methods.items():
        if (role := _role_of(method)) is not None:
            roles.setdefault(role, (name, method))
    if "dense" not in roles or ("told" not in roles and not {"vmoe", "hash"} <= set(roles)):
        needs = "one without router and experts, and one with router: {kind: told}, or one with "
        needs += "{kind: hash} and one with {kind: noisy_top_k} and the losses importance and load"
        text = f"found {', '.join(params.methods) or 'none'}; allowed for a pilot: {needs}"
        raise document.error(("methods",), text)
    if "told" in roles:
        name, oracle = roles["told"]
        plain = NoisyTopK(k=1, noise_std=0.0)
        learned = next((router for router in routers if isinstance(router, NoisyTopK)), plain)
        mixture = oracle.model_copy(update={"router": learned, "regularizers": ()})
        roles["learned"] = ("learned", mixture)
        roles["begun"] = (f"learned, begun as {name}", mixture)
    return roles


def _role_of(method: Method) -> str | None:
    """Return a method's role in a pilot: dense, wide, told, hash or vmoe; else None."""
    if method.router is None:
        return "wide" if WIDTH_SETTINGS & set(method.model) else "dense"
    if isinstance(method.router, Told):
        return "told"
    if isinstance(method.router, Hash):
        return "hash"
    losses = {loss.kind for loss in method.regularizers}
    if isinstance(method.router, NoisyTopK) and losses == VMOE_LOSSES:
        return "vmoe"
    return None


def _train_all(
    params: PilotParams, methods: dict[str, tuple[str, Method]], data: Prepared, seeds: int
) -> PilotResult:
    runtime = tune_runtime("cpu")
    torch.set_num_threads(1)
    guide = Path("guide")
    guide.mkdir()
    artifacts.record_no_guide_needed(guide)
    rows = {role: PilotRow(name, [], []) for role, (name, _) in methods.items()}
    shares = []
    for seed in range(seeds):
        settings = {
            role: method.merge_pretrain_settings(params.pretrain)
            for role, (_, method) in methods.items()
        }
        jobs = {
            role: build_pretraining(method, params.model, settings[role], data, guide, seed, "cpu")
            for role, (_, method) in methods.items()
        }
        if "told" in jobs:
            learner, oracle = jobs["begun"], jobs["told"]
            shares.append(copy_oracle_and_fit_routers(learner, oracle, settings["told"], seed))
        for role, job in jobs.items():
            name = f"validation_{job.task.history_name}"
            begun = time.process_time()
            score = math.nan
            steps = loop.total_steps(job, settings[role])
            with printing_progress(f"{rows[role].name} {seed}", steps) as bar:
                for point in loop.iterate_training(job, settings[role], seed, runtime):
                    score = point.values.get(name, score)
                    bar.update(point.step)
            rows[role].scores.append(math.exp(score) if job.task.long else score)
            rows[role].seconds.append(time.process_time() - begun)
    return PilotResult(pilot_score_kind(data.task), rows, fmean(shares or [math.nan]))


def copy_oracle_and_fit_routers(
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
        weight = fit_linear_router_weights(tokens, chosen, len(router.weight))
        router.weight.data.copy_(weight)
        shares.append(float(((tokens @ weight.T).argmax(dim=-1) == chosen).float().mean()))
    return fmean(shares)


@torch.no_grad()
def _oracle_choices(oracle: TrainingJob, settings: Training, seed: int) -> dict[str, Choices]:
    """Return MoE layer → training tokens (n, d), and the expert (n,) that the oracle chose."""
    pairs: dict[str, list[Choices]] = {}

    def keep(name: str, layer: MoEFeedForward, tokens: Tensor, record: RoutingRecord) -> None:
        chosen = record.chosen.int().argmax(dim=-1)
        pairs.setdefault(name, []).append((tokens.flatten(0, 1), chosen.flatten()))

    with calling_after_each_routing(oracle.model, keep):
        for step in range(oracle.updates_per_epoch(settings)):
            batch = training_batch(oracle, settings, seed, step)
            loop.forward_and_embed_captions(oracle, batch, None, 0.0)
            counts = [sum(len(chosen) for _, chosen in batches) for batches in pairs.values()]
            if all(count >= FITTED_TOKENS for count in counts):
                break
    columns = ((name, zip(*batches, strict=True)) for name, batches in pairs.items())
    return {name: (torch.cat(tokens), torch.cat(chosen)) for name, (tokens, chosen) in columns}


def fit_linear_router_weights(tokens: Tensor, chosen: Tensor, experts: int) -> Tensor:
    """Fit a softmax regression of ``chosen`` (n,) on ``tokens`` (n, d); return weights (E, d)."""
    weight = torch.zeros(experts, tokens.shape[-1], requires_grad=True)
    optimizer = torch.optim.LBFGS([weight], max_iter=100, line_search_fn="strong_wolfe")

    def compute_loss() -> Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(tokens @ weight.T, chosen) + RIDGE * weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(compute_loss)
    return weight.detach()


def pilot_score_kind(task: Task) -> Score:
    if task.long:
        return Score("ppl", "perplexity", "", "number", "lower")
    return task.score


def pilot_verdicts(result: PilotResult) -> list[PilotVerdict]:
    """Return one verdict per criterion on whether the data suit a study of routing or accuracy."""
    # Differences must exceed the scatter of seeds.
    rows = result.rows
    scatter = result.scatter
    verdicts = []

    def compare(role: str, other: str, minimum: float, study: str) -> None:
        ahead = result.advantage(role, other)
        text = f"{rows[role].name} is {ahead:.2f} {result.unit} better than {rows[other].name}; "
        text += f"needed: {minimum:g}, and more than {scatter:.2f}, the scatter of seeds"
        verdicts.append(PilotVerdict(text, ahead >= minimum and ahead > scatter, study))

    if "told" in rows:
        compare("told", "dense", MIN_ORACLE_GAIN, "truth")
        compare("told", "learned", 0, "truth")
    if "vmoe" in rows and "hash" in rows:
        compare("vmoe", "hash", MIN_VMOE_GAIN_OVER_HASH, "accuracy")
    slowest = max(max(row.seconds) for row in rows.values())
    text = f"the longest training took {slowest:.0f} s of one thread; allowed: {MAX_SECONDS:g}"
    return [*verdicts, PilotVerdict(text, slowest <= MAX_SECONDS, "")]


def study_kinds_worth_running(verdicts: Sequence[PilotVerdict]) -> list[str]:
    """Return the studies, of true routing ("truth") or "accuracy", for which all verdicts hold."""
    failed = {verdict.study for verdict in verdicts if not verdict.holds}
    if "" in failed:
        return []
    studies = dict.fromkeys(verdict.study for verdict in verdicts if verdict.study)
    return [study for study in studies if study not in failed]


def print_pilot(result: PilotResult, verdicts: Sequence[PilotVerdict]) -> None:
    from rich.console import Console
    from rich.table import Table

    factor, unit = (100, ", %") if result.score.form == "share" else (1, "")
    seeds = [f"seed {seed}" for seed in range(len(result.rows["dense"].scores))]
    heads = [f"validation {result.score.label}{unit}", *seeds, "mean", "s a training"]
    table = Table(*heads, box=None, header_style="bold", padding=(0, 1))
    for row in result.rows.values():
        cells = [f"{factor * score:.2f}" for score in [*row.scores, fmean(row.scores)]]
        table.add_row(row.name, *cells, f"{fmean(row.seconds):.1f}")
    console = Console(width=None if sys.stdout.isatty() else 200)
    console.print(table)
    lines = [f"{'yes' if verdict.holds else 'no':<3} {verdict.text}" for verdict in verdicts]
    if "told" in result.rows:
        told = result.rows["told"].name
        ahead = result.advantage("told", "begun")
        begins = f"A router that begins with {result.fitted:.1%} of tokens as {told}"
        side = "below" if ahead > 0 else "above"
        lines.append(f"{begins} ends {abs(ahead):.2f} {result.unit} {side} it.")
    worth = study_kinds_worth_running(verdicts)
    lines.append(f"Worth a study of {' and '.join(worth)}." if worth else "Not worth a study.")
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
