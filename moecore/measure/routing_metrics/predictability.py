"""Whether a layer's router, shown what came to the layer before, makes its choice already.

B images, T tokens per image, E experts, d width.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from moecore.core.routing_records import RoutingContext, RoutingRecord
from moecore.measure.routing_metrics.barred_experts import find_own_model
from moecore.nn.backbones.base_model import Model
from moecore.nn.layers.moe import MoEFeedForward
from moecore.statistics.crossed import linearize_ratio
from moecore.training.surgery.expert_reduction import watch_layers

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
