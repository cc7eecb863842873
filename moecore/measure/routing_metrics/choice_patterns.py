"""Patterns in what tokens choose: together, by neighbours, how concentrated, how foreseeable.

Co-activation (OLMoE, §5.2) is over all pairs of a token's experts. Local consistency (2505.16056):
a window of m neighbours that may load some experts once; how well can one set serve all its tokens?
Predictability: whether a layer's router, shown what came to the layer before, makes its choice
already. B images or texts, T tokens in their order, N = B·T, E experts, k chosen per token, d
width.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from moecore.core.files import UserError
from moecore.core.routing_records import RoutingContext, RoutingRecord
from moecore.measure.base import SEED
from moecore.measure.routing_metrics.barred_experts import find_own_model
from moecore.measure.routing_metrics.layer_metrics import (
    expert_counts,
    linearize_mean,
    max_load_violation,
)
from moecore.nn.backbones.base_model import Model
from moecore.nn.layers.moe import MoEFeedForward
from moecore.statistics.crossed import linearize_ratio
from moecore.training.surgery.expert_reduction import watch_layers


def count_coactivation(chosen: Tensor) -> Tensor:
    """Return how many tokens of each image chose both experts, (B, E, E) fp64; chosen (B, T, E).

    On the diagonal: how many chose the expert.
    """
    ones = chosen.double()
    return ones.mT @ ones


def conditional_coactivation(counts: Tensor) -> Tensor:
    """Return P(b chosen | a chosen), (E, E), rows a, from counts (E, E); the diagonal is 0.

    A row sums to k − 1 where every token chose k experts, and is 0 where no token chose a. By
    chance, at an even load, each is (k − 1)/(E − 1).
    """
    apart = counts - counts.diagonal().diag()
    return apart / _divisors(counts).unsqueeze(-1)


def follow_up_shares(before: Tensor, chosen: Tensor) -> Tensor:
    """Return P(b chosen here | a chosen in the layer before), (E', E) fp64, rows a.

    before: (B, T, E') bool, of the same tokens.  chosen: (B, T, E) bool.  A row is 0 where no token
    chose a. By chance each is P(b).
    """
    first = before.flatten(0, 1).double()
    counts = first.T @ chosen.flatten(0, 1).double()
    return counts / first.sum(dim=0).clamp_min(1).unsqueeze(-1)


def coactivation_lift(counts: Tensor, tokens: int) -> Tensor:
    """Return P(b | a) / P(b), (E, E), from counts (E, E) of so many tokens; 1 if independent.

    A token has only k experts, so the even chance is (k − 1)·E / ((E − 1)·k), below 1.
    """
    return conditional_coactivation(counts) * tokens / _divisors(counts)


def pair_lift_by_image(chosen: Tensor) -> Tensor:
    """Return the mean lift of the pairs that tokens chose as one value an image, (B,) fp64.

    chosen: (B, T, E) bool.  Raises UserError where no token chose two experts.
    """
    experts = chosen.shape[-1]
    rows = count_coactivation(chosen).flatten(1)
    there = rows.any(dim=0)

    def mean_lift(mean: Tensor) -> Tensor:
        counts = torch.zeros_like(there, dtype=mean.dtype).masked_scatter(there, mean)
        counts = counts.view(experts, experts)
        pairs = counts - counts.diagonal().diag()
        return (pairs * coactivation_lift(counts, chosen.shape[1])).sum() / pairs.sum()

    if int(chosen.sum(dim=-1).max()) < 2:
        raise UserError("coactivation: no token chose two experts; allowed: routers of k ≥ 2")
    return linearize_mean(mean_lift, rows)


def _divisors(counts: Tensor) -> Tensor:
    """How many tokens chose each expert, (E,); 1 where none did, whose pairs are 0."""
    return counts.diagonal().where(counts.diagonal() > 0, 1)


def window_use_histogram(chosen: Tensor, length: int) -> Tensor:
    """Return how many pairs of window and expert have a = 0 … m uses, (B, m + 1) int64.

    chosen: (B, T, E) bool.  Windows of ``length`` m tokens begin at every token.
    Raises UserError where a sequence is shorter than a window.
    """
    if length > chosen.shape[1]:
        problem = f"found a window of {length} in sequences of {chosen.shape[1]} tokens"
        raise UserError(f"local_consistency: {problem}; allowed: at most as long")
    uses = chosen.long().unfold(1, length, 1).sum(dim=-1).flatten(1)
    return torch.stack([(uses == number).sum(dim=1) for number in range(length + 1)], dim=1)


def consistency_by_threshold(uses: np.ndarray) -> np.ndarray:
    """Return F1 for each threshold θ = 0 … m, (m + 1,), of counts ``uses`` (m + 1,).

    Each window loads the experts with at least θ uses: 2·served / (m·loaded + needed).
    """
    served, needed_and_loaded = _served_and_size(uses[None])
    return 2 * served[0] / needed_and_loaded[0]


def consistency_by_image(uses: np.ndarray) -> np.ndarray:
    """Return the largest F1 as one value an image, (B,), whose mean it is; uses (B, m + 1)."""
    best = int(consistency_by_threshold(uses.sum(axis=0)).argmax())
    served, needed_and_loaded = _served_and_size(uses)
    return linearize_ratio(2 * served[:, best], needed_and_loaded[:, best])


def _served_and_size(uses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return uses that are served, and slots loaded plus uses needed: (B, m + 1), over θ."""
    length = uses.shape[1] - 1
    weighted = uses * np.arange(length + 1)
    served = np.flip(np.flip(weighted, 1).cumsum(axis=1), 1)
    loaded = length * np.flip(np.flip(uses, 1).cumsum(axis=1), 1)
    return served, loaded + weighted.sum(axis=1, keepdims=True)


def window_consistency(
    patches: Tensor, windows: Sequence[int]
) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Return values by image, and the mean by chance, of windows shorter than tokens (N, T, E)."""
    values, chances = {}, {}
    number, length = patches.shape[:2]
    order = np.random.default_rng(SEED).permuted(np.tile(np.arange(length), (number, 1)), axis=1)
    shuffled = patches[torch.arange(number).unsqueeze(-1), torch.from_numpy(order)]
    for window in sorted(window for window in windows if window < length):
        name = f"consistency_{window}"
        values[name] = consistency_by_image(window_use_histogram(patches, window).numpy())
        uses = window_use_histogram(shuffled, window).sum(dim=0).numpy()
        chances[name] = float(consistency_by_threshold(uses).max())
    return values, chances


SMALLEST = 0.01  # quantile of the margins


def mean_batch_violation(chosen: Tensor, images: int, seed: int = 0) -> float:
    """Return the mean MaxVio over batches of so many images; chosen (B, T, E) bool.

    It falls with the size of a batch. Images are shuffled, as a split may be sorted by class; a
    last incomplete batch is left out, unless it is alone.
    """
    order = np.random.default_rng(seed).permutation(len(chosen))
    whole = order[: max(images, len(chosen) // images * images)]
    batches = [expert_counts(part) for part in chosen[torch.from_numpy(whole)].split(images)]
    return float(np.mean([max_load_violation(counts) for counts in batches if counts.any()]))


def chance_violation(choices: int, experts: int, draws: int = 200, seed: int = 0) -> float:
    """Return the mean MaxVio of so many choices that fall on experts evenly by chance."""
    random = np.random.default_rng(seed)
    counts = random.multinomial(choices, [1 / experts] * experts, draws)
    return float((counts.max(axis=1) * experts / choices - 1).mean())


def cumulative_load_shares(counts: Tensor) -> Tensor:
    """Return the share of the choices that the m most used experts have, m = 1 … E, (E,) fp64.

    m/E at an even load.  counts: (E,).
    """
    ordered = counts.double().sort(descending=True).values
    return ordered.cumsum(dim=0) / ordered.sum()


def choice_margin(scores: Tensor, chosen: Tensor) -> Tensor:
    """Return each token's lowest chosen score − its highest other one, (B, T) fp64.

    scores: (B, T, E), −∞ of what could not be chosen.  Below 0 where the choice was by others, as
    a balance's; NaN where a token chose none, or all that it could.
    """
    scores = scores.double()
    lowest = scores.where(chosen, torch.inf).amin(dim=-1)
    highest = scores.where(~chosen, -torch.inf).amax(dim=-1)
    margin = lowest - highest
    return margin.where(margin.isfinite(), torch.nan)


def margin_values(scores: Tensor, chosen: Tensor) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Return the margin by image, and the smallest; nothing where no token has one."""
    margins = choice_margin(scores, chosen)
    is_known = margins.isfinite()
    if not is_known.any():
        return {}, {}
    sums = margins.nan_to_num().sum(dim=1), is_known.sum(dim=1)
    return (
        {"margin": linearize_ratio(*(one.numpy() for one in sums))},
        {"smallest_margin": float(np.quantile(margins[is_known].numpy(), SMALLEST))},
    )


OWN = frozenset({"basis", "outputs"})  # what routers read beside tokens that is the layer's own
HOT = 8  # one of so many experts counts as hot, one at least


class EarlyChoices(NamedTuple):
    """What one layer's router would have chosen a layer earlier, by the calls of the router."""

    parts: list[Tensor]  # (B, T, E) bool

    def chosen(self, images: int) -> Tensor | None:
        """Return it of so many images, (N, T, E) bool; None where the router cannot be asked."""
        if not self.parts:
            return None
        # a text is read with the blocks before its own, which are calls too: the last is its own
        calls = sum(map(len, self.parts)) // images
        return torch.cat(self.parts[calls - 1 :: calls])


@contextmanager
def choose_one_layer_early(model: Model) -> Iterator[dict[str, EarlyChoices]]:
    """Inside the ``with`` each MoE layer's router decides on the tokens of the layer before, too.

    By the layers' names in their order. A layer has none where it is the first, where its tokens
    are of another shape than those before, or where its router reads more than tokens.
    """
    early: dict[str, EarlyChoices] = {}
    before: dict[str, Tensor] = {}  # what came last to each layer

    def decide(name: str, layer: MoEFeedForward, tokens: Tensor, record: RoutingRecord) -> None:
        own = early.setdefault(name, EarlyChoices([]))
        place = list(early).index(name)
        before[name] = tokens
        if not place or not layer.wants <= OWN:
            return
        earlier = before[list(early)[place - 1]]
        if earlier.shape == tokens.shape:
            basis = layer.experts.lent_basis() if layer.shares_basis else None
            # not by a call, which would be watched
            _, decided = layer.router.forward(earlier, RoutingContext(basis=basis))
            own.parts.append(decided.chosen.cpu())

    with watch_layers(find_own_model(model), decide):
        yield early


class Predictability(NamedTuple):
    """How a layer's early choices agree with its choices."""

    by_image: dict[str, np.ndarray]  # name → (B,), whose mean is the number
    chances: dict[str, float]
    of_layer: dict[str, float]  # numbers without a value by image


def choice_predictability(predicted: Tensor, chosen: Tensor) -> Predictability:
    """Return how well a layer's early choices foretell its choices, both (B, T, E) bool.

    early_choice: share of a token's experts that are among its early ones; by chance k / E.
    early_load: cosine of the counts of both; beside that of even counts.  early_load_rank:
    Spearman's correlation of the counts, left out where those of one are all equal.  early_hottest:
    share of the hottest experts that both have.  Counts may agree while no token does.
    """
    shared = (predicted & chosen).sum(dim=-1).double()
    number = chosen.sum(dim=-1).double()
    # a token that chose no expert says nothing
    overlap = linearize_ratio(
        (shared / number.clamp_min(1)).sum(dim=1).numpy(), (number > 0).sum(dim=1).numpy()
    )
    rows = [one.sum(dim=1).double().numpy() for one in (predicted, chosen)]
    counts = [one.sum(axis=0) for one in rows]
    experts = chosen.shape[-1]
    of_layer = {"early_hottest": hottest_overlap(*counts)}
    if all(np.ptp(one) > 0 for one in counts):
        of_layer["early_load_rank"] = rank_correlation(*counts)
    return Predictability(
        {"early_choice": overlap, "early_load": linearize_cosine(*rows)},
        {
            "early_choice": float(number.sum() / (number > 0).sum() / experts),
            "early_load": float(counts[1].mean() / np.sqrt(np.square(counts[1]).mean())),
        },
        of_layer,
    )


def linearize_cosine(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Return the cosine of the sums of two rows by image, (B, E), as values (B,) of that mean.

    0 where nothing was counted.
    """
    means = [one.mean(axis=0) for one in (ours, theirs)]
    lengths = [max(float(np.linalg.norm(one)), np.finfo(float).tiny) for one in means]
    ours, theirs = (one / length for one, length in zip((ours, theirs), lengths, strict=True))
    first, second = (one / length for one, length in zip(means, lengths, strict=True))
    cosine = first @ second
    # cos + ∂cos · (x − mean), and ∂cos is orthogonal to the means
    return cosine + ours @ (second - cosine * first) + theirs @ (first - cosine * second)


def rank_correlation(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Return Spearman's correlation of counts (E,), ties at their mean rank."""
    from scipy.stats import spearmanr  # slow to import

    return float(spearmanr(ours, theirs).statistic)


def hottest_overlap(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Return which share of the hottest experts by counts (E,) both have; ties: lowest number."""
    number = max(1, len(ours) // HOT)
    hot = [set(np.argsort(-one, kind="stable")[:number]) for one in (ours, theirs)]
    return len(hot[0] & hot[1]) / number
