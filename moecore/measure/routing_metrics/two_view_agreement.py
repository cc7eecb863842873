"""How often corresponding patches in two views of an image get the same experts (PRC, tables 4, 5).

N images, T tokens per view, E experts.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moecore.core.config import Config
from moecore.core.routing_records import RoutingRecord, TokenLayout, chosen_first_scores
from moecore.data.views.views import ViewsWithAffines
from moecore.measure.routing_metrics.consistency import match_counts_by_image, match_ratios
from moecore.measure.routing_metrics.layer_metrics import average_layers, kept_choices
from moecore.nn.backbones.base_model import Model
from moecore.nn.correspondence import TokenPairs, token_pair_values, token_pairs_by_layer
from moecore.nn.predict import predict_in_batches
from moecore.statistics.crossed import encode_item_values, linearize_ratio
from moecore.statistics.intervals import bootstrap_interval

NAMES = ("match_top1", "match_top2_ordered", "match_top2_sets")


class TwoViewMatchShares(Config):
    """What corresponding patches of two views share; None of text, which has no views."""

    match_top1: float | None = None  # share of pairs with the same best expert
    match_top2_ordered: float | None = None  # the same two best in this order
    match_top2_sets: float | None = None  # the same two best
    switch_fraction: float | None = None  # share of the second's experts that the first has not


class AugmentedRow(TwoViewMatchShares):
    """Means over the MoE layers under one augmentation, with 95 % limits.

    items: of each match ratio one number an item, as ``encode_item_values`` packs them.
    """

    name: str
    match_top1_low: float
    match_top1_high: float
    match_top2_ordered_low: float
    match_top2_ordered_high: float
    match_top2_sets_low: float
    match_top2_sets_high: float
    items: dict[str, str] = {}


def augmented_row(
    name: str, model: Model, views: ViewsWithAffines, batch: int, people: np.ndarray | None = None
) -> AugmentedRow:
    """Return what partners in both ``views`` share, as means over the MoE layers."""
    _, records = predict_in_batches(model, views.images, batch)
    paired = token_pairs_by_layer(views.affines, model.layouts, special=False)
    layers = [
        layer_match_shares(record, *pairs) for record, pairs in zip(records, paired, strict=True)
    ]
    by_image = [
        match_ratios_by_image(record, *pairs) for record, pairs in zip(records, paired, strict=True)
    ]
    return AugmentedRow(
        name=name,
        **average_layers(layers, TwoViewMatchShares.model_fields),
        **match_intervals(records, paired, people),
        items=encode_means_over_layers(by_image, people),
    )


def choice_ranking_scores(record: RoutingRecord) -> Tensor:
    """Return the scores (B, T, E) that experts are ranked by: the chosen first, each by its logit.

    Logits have no ties where an eigenbasis router clamps probs.
    """
    return chosen_first_scores(record.logits, record.chosen)


def layer_match_shares(
    record: RoutingRecord, pairs: TokenPairs, layout: TokenLayout
) -> TwoViewMatchShares:
    """Return what partners of one MoE layer share; record: fields (2N, T, E), first views first."""
    ratios = match_ratios(
        *token_pair_values(choice_ranking_scores(record), pairs, layout), pairs.found
    )
    switched = (switched_by_token(record, pairs, layout) * pairs.found).sum() / pairs.found.sum()
    return TwoViewMatchShares(
        **dict(zip(NAMES, ratios, strict=True)), switch_fraction=float(switched)
    )


def switched_by_token(record: RoutingRecord, pairs: TokenPairs, layout: TokenLayout) -> Tensor:
    """Return the switch fraction of each pair's chosen experts, (N, T) fp64."""
    return 1 - kept_choices(*token_pair_values(record.chosen, pairs, layout))


def match_ratios_by_image(
    record: RoutingRecord, pairs: TokenPairs, layout: TokenLayout
) -> dict[str, Tensor]:
    """Return what ``layer_match_shares`` does as one value per image, (N,), whose mean each is."""
    counts = match_counts_by_image(
        *token_pair_values(choice_ranking_scores(record), pairs, layout), pairs.found
    ).double()
    switched = (switched_by_token(record, pairs, layout) * pairs.found).sum(dim=1)
    number = pairs.found.sum(dim=1).double().numpy()
    sums = torch.cat([counts, switched.unsqueeze(-1)], dim=1).numpy()
    return {
        name: torch.from_numpy(linearize_ratio(sums[:, place], number))
        for place, name in enumerate(TwoViewMatchShares.model_fields)
    }


def encode_means_over_layers(
    layers: Sequence[Mapping[str, Tensor]], people: np.ndarray | None
) -> dict[str, str]:
    """The means over the layers of what all of them have, packed; layers: name → (N,)."""
    names = [name for name in layers[0] if all(name in layer for layer in layers)]
    return {
        name: encode_item_values(
            torch.stack([layer[name] for layer in layers]).mean(dim=0).numpy(), people
        )
        for name in names
    }


def match_intervals(
    records: tuple[RoutingRecord, ...],
    paired: Sequence[tuple[TokenPairs, TokenLayout]],
    people: np.ndarray | None = None,
) -> dict[str, Any]:
    """Intervals by the bootstrap over images, as an image's pairs are not independent.

    Over people where they are given and have several images. Where layers have other numbers of
    pairs, each layer's are counted as if they were as many as the last one's.
    """
    number = paired[-1][0].found.sum(dim=1)
    by_layer = []
    for record, (pairs, layout) in zip(records, paired, strict=True):
        values = token_pair_values(choice_ranking_scores(record), pairs, layout)
        hits = match_counts_by_image(*values, pairs.found)
        share = number / pairs.found.sum(dim=1).clamp(min=1)
        by_layer.append(hits * share[:, None])
    counts = torch.stack(by_layer).double().mean(dim=0).numpy()
    number = number.numpy()
    whose = None if people is None else people[number > 0]
    counts = counts[number > 0]
    number = number[number > 0]
    limits = {}
    for column, name in enumerate(NAMES):
        interval = bootstrap_interval(
            lambda chosen, hits=counts[:, column]: float(hits[chosen].sum() / number[chosen].sum()),
            len(number),
            lowest=0.0,
            highest=1.0,
            people=whose,
        )
        limits[f"{name}_low"] = interval.low
        limits[f"{name}_high"] = interval.high
    return limits
