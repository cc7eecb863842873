"""Patterns of the tokens' choices: co-activation, local consistency, load and predictability.

Co-activation (OLMoE, §5.2): pairs of a token's experts. Local consistency (2505.16056): how well
one set of experts serves a window of m neighbouring tokens. Predictability: how well a layer's
router chooses from the tokens of the layer before. T tokens in order, N = B·T.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import scipy
import torch
from torch import Tensor

from moecore.core.files import UserError
from moecore.core.routing_records import RoutingContext, RoutingRecord, choice_margin
from moecore.measure.base import SEED
from moecore.measure.routing_metrics import interventions, layer_metrics
from moecore.nn.backbones.base_model import Model
from moecore.nn.layers.moe import MoEFeedForward
from moecore.statistics.comparisons import linearize_ratio
from moecore.training.surgery.expert_reduction import calling_after_each_routing


def count_coactivation(chosen: Tensor) -> Tensor:
    """Count the tokens that chose each pair of experts, (B, E, E) fp64; chosen: (B, T, E)."""
    ones = chosen.double()
    return ones.mT @ ones


def conditional_coactivation(counts: Tensor) -> Tensor:
    """Return P(b chosen | a chosen), (E, E), rows a, from counts (E, E); the diagonal is 0."""
    # A row sums to k − 1 if every token chose k experts, and is 0 if no token chose a. By chance,
    # at an even load, each is (k − 1)/(E − 1).
    return (counts - counts.diagonal().diag()) / _expert_counts_at_least_one(counts).unsqueeze(-1)


def layer_transitions(before: Tensor, chosen: Tensor) -> Tensor:
    """Return P(expert b | expert a in the layer before), (E', E) fp64, rows a; by chance P(b)."""
    # before: (B, T, E') bool, of the same tokens. A row is 0 if no token chose a.
    first = before.flatten(0, 1).double()
    return first.T @ chosen.flatten(0, 1).double() / first.sum(dim=0).clamp_min(1).unsqueeze(-1)


def coactivation_lift(counts: Tensor, tokens: int) -> Tensor:
    """Return P(b | a) / P(b), (E, E), from counts (E, E) of ``tokens``; 1 if independent."""
    # As a token has only k experts, chance at an even load is (k − 1)·E / ((E − 1)·k), below 1.
    return conditional_coactivation(counts) * tokens / _expert_counts_at_least_one(counts)


def mean_pair_lift_by_image(chosen: Tensor) -> Tensor:
    """Return mean lift of chosen pairs as jackknife pseudo-values (B,) fp64; chosen (B, T, E)."""
    experts = chosen.shape[-1]
    rows = count_coactivation(chosen).flatten(1)
    is_used = rows.any(dim=0)  # linearize_at_mean leaves out the other columns

    def mean_lift(mean: Tensor) -> Tensor:
        counts = torch.zeros_like(is_used, dtype=mean.dtype).masked_scatter(is_used, mean)
        counts = counts.view(experts, experts)
        pairs = counts - counts.diagonal().diag()
        return (pairs * coactivation_lift(counts, chosen.shape[1])).sum() / pairs.sum()

    if int(chosen.sum(dim=-1).max()) < 2:
        raise UserError("coactivation: no token chose two experts; allowed: routers of k ≥ 2")
    return layer_metrics.linearize_at_mean(mean_lift, rows)


def _expert_counts_at_least_one(counts: Tensor) -> Tensor:
    """Return each expert's tokens (E,), the diagonal of ``counts`` (E, E), with 1 in place of 0."""
    return counts.diagonal().where(counts.diagonal() > 0, 1)


def count_windows_by_expert_uses(chosen: Tensor, length: int) -> Tensor:
    """Count (window, expert) pairs by how many of m tokens chose the expert, (B, m + 1) int64."""
    # chosen: (B, T, E) bool. Windows of ``length`` m tokens start at every token.
    if length > chosen.shape[1]:
        raise UserError.at(
            "local_consistency",
            found=f"a window of {length} in sequences of {chosen.shape[1]} tokens",
            allowed="at most as long",
        )
    uses = chosen.long().unfold(1, length, 1).sum(dim=-1).flatten(1)
    return torch.stack([(uses == number).sum(dim=1) for number in range(length + 1)], dim=1)


def compute_consistency_f1_by_threshold(uses: np.ndarray) -> np.ndarray:
    """Return F1 per θ, (m + 1,), if a window's tokens use the experts that ≥ θ of them chose."""
    # A window loads experts with at least θ uses: F1 = 2·served / (m·loaded + needed), with served
    # the uses of loaded experts and needed all uses.
    served, needed_and_loaded = _sum_f1_terms_by_threshold(uses[None])
    return 2 * served[0] / needed_and_loaded[0]


def consistency_by_image(uses: np.ndarray) -> np.ndarray:
    """Return F1 of all images at its best θ as jackknife pseudo-values, (B,); uses: (B, m + 1)."""
    best = int(compute_consistency_f1_by_threshold(uses.sum(axis=0)).argmax())
    served, needed_and_loaded = _sum_f1_terms_by_threshold(uses)
    return linearize_ratio(2 * served[:, best], needed_and_loaded[:, best])


def _sum_f1_terms_by_threshold(uses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return F1's terms by θ, (B, m + 1): uses of experts with ≥ θ uses; m · their count + uses."""
    length = uses.shape[1] - 1
    weighted = uses * np.arange(length + 1)
    served = np.flip(np.flip(weighted, 1).cumsum(axis=1), 1)
    loaded = length * np.flip(np.flip(uses, 1).cumsum(axis=1), 1)
    return served, loaded + weighted.sum(axis=1, keepdims=True)


def measure_consistency_by_window(
    patches: Tensor, windows: Sequence[int]
) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Return F1 of how well one set of experts serves a window of m tokens, per window size m.

    patches: (B, T, E). Both dicts have the keys "consistency_{m}" of m < T. The values are F1 by
    image, (B,), in the first, and F1 of shuffled tokens (chance) in the second.
    """
    values, chances = {}, {}
    number, length = patches.shape[:2]
    order = np.random.default_rng(SEED).permuted(np.tile(np.arange(length), (number, 1)), axis=1)
    shuffled = patches[torch.arange(number).unsqueeze(-1), torch.from_numpy(order)]
    for window in sorted(window for window in windows if window < length):
        name = f"consistency_{window}"
        values[name] = consistency_by_image(count_windows_by_expert_uses(patches, window).numpy())
        uses = count_windows_by_expert_uses(shuffled, window).sum(dim=0).numpy()
        chances[name] = float(compute_consistency_f1_by_threshold(uses).max())
    return values, chances


SMALLEST_QUANTILE = 0.01  # of the margins


def mean_batch_maxvio(chosen: Tensor, images: int) -> float:
    """Return the mean MaxVio over shuffled batches of ``images`` images; chosen: (B, T, E)."""
    # Shuffled, as a split may be sorted by class.
    order = np.random.default_rng(0).permutation(len(chosen))
    # An incomplete last batch is left out, unless it is the only one.
    used = order[: max(images, len(chosen) // images * images)]
    batches = map(layer_metrics.expert_counts, chosen[torch.from_numpy(used)].split(images))
    violations = [layer_metrics.max_load_violation(counts) for counts in batches if counts.any()]
    return float(np.mean(violations))


def chance_maxvio(choices: int, experts: int) -> float:
    """Return the mean MaxVio if ``choices`` fall on ``experts`` uniformly at random, 200 draws."""
    counts = np.random.default_rng(0).multinomial(choices, [1 / experts] * experts, 200)
    return float((counts.max(axis=1) * experts / choices - 1).mean())


def cumulative_load_shares(counts: Tensor) -> Tensor:
    """Return the m most used experts' share of the choices, m = 1 … E, (E,); m/E if even."""
    ordered = counts.double().sort(descending=True).values
    return ordered.cumsum(dim=0) / ordered.sum()


def mean_and_low_quantile_margin(
    scores: Tensor, chosen: Tensor
) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Return margins, chosen − best other score: mean by image (B,), and 1 % quantile of tokens."""
    margins = choice_margin(scores, chosen)
    is_known = margins.isfinite()
    if not is_known.any():
        return {}, {}
    sums = margins.nan_to_num().sum(dim=1)
    by_image = linearize_ratio(sums.numpy(), is_known.sum(dim=1).numpy())
    smallest = float(np.quantile(margins[is_known].numpy(), SMALLEST_QUANTILE))
    return {"margin": by_image}, {"smallest_margin": smallest}


ROUTER_INPUTS_FROM_LAYER = frozenset({"basis", "outputs"})  # that the layer itself provides
EXPERTS_PER_HOT = 8  # one of this many experts counts as hot, at least one in all


@contextmanager
def record_choices_from_earlier_layer(model: Model) -> Iterator[dict[str, list[Tensor]]]:
    """Record layer name → its router's choices for the previous MoE layer's inputs, in ``with``."""
    early: dict[str, list[Tensor]] = {}  # layer, in order → (B, T, E) bool per call
    latest: dict[str, Tensor] = {}  # name → latest tokens of the layer

    def choose_early(name: str, layer: MoEFeedForward, tokens: Tensor, _: RoutingRecord) -> None:
        choices = early.setdefault(name, [])
        index = list(early).index(name)
        latest[name] = tokens
        if index == 0 or not layer.wants <= ROUTER_INPUTS_FROM_LAYER:
            return
        earlier = latest[list(early)[index - 1]]
        if earlier.shape == tokens.shape:
            basis = layer.experts.lent_basis() if layer.shares_basis else None
            # forward() instead of a call, which the hooks of this watch would see
            _, early_record = layer.router.forward(earlier, RoutingContext(basis=basis))
            choices.append(early_record.chosen.cpu())

    with calling_after_each_routing(interventions.unguided_model(model), choose_early):
        yield early


def choice_predictability(
    predicted: Tensor, chosen: Tensor
) -> tuple[dict[str, np.ndarray], dict[str, float], dict[str, float]]:
    """Score choices predicted a layer earlier, (B, T, E): metrics by image, by chance, overall."""
    # Returns name → (B,) with the metric as mean; name → chance; name → metric of the whole layer.
    # early_choice: share of a token's experts that are among its early ones; by chance k / E.
    # early_load: cosine of both loads; by chance with an even load. early_load_rank: Spearman's
    # correlation of the loads (mean ranks for ties), left out if either is constant. early_hottest:
    # share of the hottest experts that both have (ties: lowest index). Loads may agree although no
    # token does.
    shared = (predicted & chosen).sum(dim=-1).double()
    number = chosen.sum(dim=-1).double()
    # Tokens that chose no expert are left out.
    shares = (shared / number.clamp_min(1)).sum(dim=1).numpy()
    overlap = linearize_ratio(shares, (number > 0).sum(dim=1).numpy())
    early_rows = predicted.sum(dim=1).double().numpy()
    rows = chosen.sum(dim=1).double().numpy()
    early_counts, counts = early_rows.sum(axis=0), rows.sum(axis=0)
    hottest = max(1, len(counts) // EXPERTS_PER_HOT)
    loads = (early_counts, counts)
    early_set, own_set = (set(np.argsort(-load, kind="stable")[:hottest]) for load in loads)
    of_layer = {"early_hottest": len(early_set & own_set) / hottest}
    if np.ptp(early_counts) > 0 and np.ptp(counts) > 0:
        of_layer["early_load_rank"] = float(scipy.stats.spearmanr(early_counts, counts).statistic)
    by_image = {"early_choice": overlap, "early_load": linearize_load_cosine(early_rows, rows)}
    chances = {
        "early_choice": float(number.sum() / (number > 0).sum() / chosen.shape[-1]),
        "early_load": float(counts.mean() / np.sqrt(np.square(counts).mean())),
    }
    return by_image, chances, of_layer


def linearize_load_cosine(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Return the cosine of two loads as pseudo-values (B,); loads by image: (B, E); 0 if zero."""
    first, second = ours.mean(axis=0), theirs.mean(axis=0)
    tiny = np.finfo(float).tiny
    length, other_length = (max(float(np.linalg.norm(mean)), tiny) for mean in (first, second))
    ours, first = ours / length, first / length
    theirs, second = theirs / other_length, second / other_length
    cosine = first @ second
    # cos + ∂cos · (x − mean); ∂cos is orthogonal to the means
    return cosine + ours @ (second - cosine * first) + theirs @ (first - cosine * second)
