"""How one MoE layer uses its experts: load, entropy, the router's confidence, and who is eligible.

B images, T tokens per image, E experts; a record's fields are (B, T, E).
"""

import math

import torch
from torch import Tensor

from moecore.core.config import Config
from moecore.core.routing_records import RoutingRecord
from moecore.measure.routing_metrics.layer_metrics import (
    Confidence,
    dead_expert_share,
    expert_counts,
    linearize_mean,
    load_cv2,
    max_load_violation,
    mean_token_entropy,
    normalised_load_entropy,
    routing_confidence,
)
from moecore.measure.routing_metrics.tail_and_fallback import (
    below_k_eligible_flags,
    below_k_eligible_rate,
    eligible_tail_mass,
    eligible_tail_sums_by_image,
    fallback_rate,
    tail_by_token,
    tail_of_probs,
)
from moecore.nn.experts.base import map_shape
from moecore.statistics.crossed import linearize_ratio


class BorderShares(Config):
    """Shares of a layer's choices (load), of its probability (mass) and of its experts (cells).

    On the border of the map of experts, in its corners, which belong to the border, and inside it.
    MoGE's regularizer rewards the border: read a share beside that of the cells. A map with a side
    of two experts at most is all border: it has no inside, whose values are None.
    """

    border_load: float | None  # None, as every load, where no token chose an expert
    border_mass: float
    border_cells: float
    corner_load: float | None
    corner_mass: float
    corner_cells: float
    inner_load: float | None
    inner_mass: float | None
    inner_cells: float | None


class Use(BorderShares):
    """One MoE layer's values, or the means over layers of those that all of them have.

    Where no token chose an expert, as the router depth may decide, the load has no values.
    """

    load_cv2: float | None
    max_violation: float | None
    dead: float | None  # share of experts with under 1 % of the mean load
    experts_per_token: float  # chosen, before capacity
    unrouted: float  # share of tokens that chose none
    entropy: float | None
    token_entropy: float
    tail_of_probs: float | None = None  # routers with k only
    fallback: float | None = None  # routers with a threshold only, as the next two
    below_k: float | None = None
    tail_mass: float | None = None  # None too where no token has an eligible expert


class LayerUse(Use):
    """One MoE layer's."""

    load: tuple[float, ...]  # share of the choices per expert; zeros where there is no choice
    confidence: Confidence


def map_border_shares(load: Tensor, mass: Tensor) -> BorderShares:
    """Return where on ``map_shape`` load and mass, both (E,) of sum 1, lie; or a load of zeros."""
    rows, columns = map_shape(len(load))
    row = torch.arange(rows)[:, None]
    column = torch.arange(columns)[None]
    at_row_end = (row == 0) | (row == rows - 1)
    at_column_end = (column == 0) | (column == columns - 1)
    border = (at_row_end | at_column_end).flatten()
    cells = torch.full_like(load, 1 / len(load))
    values: dict[str, float | None] = {}
    for place, where in (
        ("border", border),
        ("corner", (at_row_end & at_column_end).flatten()),
        ("inner", ~border),
    ):
        for name, shares in (("load", load), ("mass", mass), ("cells", cells)):
            is_known = where.any() and shares.any()
            values[f"{place}_{name}"] = float(shares[where].sum()) if is_known else None
    return BorderShares.model_validate(values)


def choices_by_image(chosen: Tensor) -> dict[str, Tensor]:
    """Return the mean number of experts that a token of an image chose, and the share of its tokens
    that chose none, (B,) fp64 each.  chosen: (B, T, E) bool.
    """
    numbers = chosen.sum(dim=-1).double()
    none = (numbers == 0).double()
    return {"experts_per_token": numbers.mean(dim=1), "unrouted": none.mean(dim=1)}


def layer_use_metrics(layer: RoutingRecord, threshold: float | None, k: int | None) -> LayerUse:
    """The metrics of one MoE layer; threshold and k: of its router, None where it has none."""
    counts = expert_counts(layer.chosen)
    fallback = None
    below_k = None
    tail = None
    if threshold is not None:
        fallback = fallback_rate(layer.logits, threshold)
        if k is not None:
            below_k = below_k_eligible_rate(layer.logits, threshold, k)
            tail = eligible_tail_mass(layer.logits, threshold, k)
    load = counts.double() / counts.sum().clamp(min=1)
    mass = layer.probs.double().flatten(0, -2).mean(dim=0)
    return LayerUse(
        **map_border_shares(load, mass / mass.sum()).model_dump(),
        load=load.tolist(),
        load_cv2=load_cv2(counts) if counts.any() else None,
        max_violation=max_load_violation(counts) if counts.any() else None,
        dead=dead_expert_share(counts) if counts.any() else None,
        **{name: float(one.mean()) for name, one in choices_by_image(layer.chosen).items()},
        entropy=normalised_load_entropy(counts) if counts.any() else None,
        confidence=routing_confidence(layer.probs),
        token_entropy=mean_token_entropy(layer.probs),
        tail_of_probs=None if k is None else tail_of_probs(layer.probs, k),
        fallback=fallback,
        below_k=below_k,
        tail_mass=tail,
    )


def use_metrics_by_image(
    layer: RoutingRecord, threshold: float | None, k: int | None
) -> dict[str, Tensor]:
    """The metrics of ``layer_use_metrics`` as one value per image, (B,) fp64, whose mean each is.

    And the probabilities of ``Confidence``, as ``confidence_highest`` and so on.
    """
    counts = layer.chosen.sum(dim=1).double()
    probs = layer.probs.double()
    ordered = probs.sort(dim=-1, descending=True).values.mean(dim=1)
    experts = counts.shape[1]

    def cv2(mean: Tensor) -> Tensor:
        return experts * mean.square().sum() / mean.sum().square() - 1

    def violation(mean: Tensor) -> Tensor:
        return experts * mean.max() / mean.sum() - 1

    def entropy(mean: Tensor) -> Tensor:
        return torch.special.entr(mean / mean.sum()).sum() / math.log(experts)

    metrics = {}
    if counts.any():
        metrics["load_cv2"] = linearize_mean(cv2, counts)
        metrics["max_violation"] = linearize_mean(violation, counts)
        metrics["entropy"] = torch.ones(len(counts), dtype=torch.float64)
        if experts > 1:
            metrics["entropy"] = linearize_mean(entropy, counts)
    metrics |= {
        "confidence_highest": ordered[:, 0],
        "confidence_second": ordered[:, 1:2].sum(dim=1),
        "confidence_others": ordered[:, 2:].sum(dim=1),
        "token_entropy": torch.special.entr(probs).sum(dim=-1).mean(dim=1),
        **choices_by_image(layer.chosen),
    }
    if k is not None:
        metrics["tail_of_probs"] = tail_by_token(layer.probs, k).mean(dim=1)
    if threshold is not None:
        metrics["fallback"] = below_k_eligible_flags(layer.logits, threshold, 1).mean(dim=1)
    if threshold is not None and k is not None:
        metrics["below_k"] = below_k_eligible_flags(layer.logits, threshold, k).mean(dim=1)
        tail, some = eligible_tail_sums_by_image(layer.logits, threshold, k)
        if some.any():
            ratio = linearize_ratio(tail.numpy(), some.numpy())
            metrics["tail_mass"] = torch.from_numpy(ratio)
    return metrics
