"""How often corresponding patches in two views of an image get the same experts (PRC, tables 4, 5).

N images, T tokens per view, E experts.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from moecore.core.routing_records import RoutingRecord, TokenLayout, chosen_first_scores
from moecore.data.views.views import ViewSettings, ViewsWithAffines
from moecore.measure.base import SEED
from moecore.measure.routing_metrics.consistency import match_counts_by_image, match_ratios
from moecore.measure.routing_metrics.layer_metrics import average_layers, kept_choices
from moecore.measure.routing_metrics.two_view_augmentations import (
    TwoViewAugmentation,
    draw_two_views,
)
from moecore.nn.backbones.base_model import Model
from moecore.nn.correspondence import TokenPairs, token_pair_values, token_pairs_by_layer
from moecore.nn.predict import predict_in_batches
from moecore.statistics.crossed import linearize_ratio
from moecore.statistics.intervals import Interval, bootstrap_interval

TEXT = 3  # axes of blocks of text, (N, C, M): it has neither views nor pictures
NAMES = ("match_top1", "match_top2_ordered", "match_top2_sets")
SHARES = (*NAMES, "switch_fraction")  # of the second's experts those that the first has not


def view_match_shares(
    model: Model, images: np.ndarray, views: ViewSettings, batch: int
) -> Sequence[tuple[Mapping[str, float], Mapping[str, Tensor]]]:
    """Return how often corresponding patches in two views agree, per MoE layer (PRC, table 4).

    And the match ratios as one value an image, (N,). Text has none.
    """
    if images.ndim == TEXT:
        return [({}, {})] * len(model.experts_and_router.indices(model.config.depth))
    asked = TwoViewAugmentation(name="views", views=views)
    drawn = draw_two_views(images, asked, SEED)
    _, records = predict_in_batches(model, drawn.images, batch)
    paired = token_pairs_by_layer(drawn.affines, model.layouts, special=False)
    return [
        (layer_match_shares(record, *pairs), match_ratios_by_image(record, *pairs))
        for record, pairs in zip(records, paired, strict=True)
    ]


def augmented_row(
    model: Model, views: ViewsWithAffines, batch: int, people: np.ndarray | None = None
) -> dict[str, tuple[np.ndarray, Interval]]:
    """Return what partners in both ``views`` share: SHARES → one value an image, (N,), and the mean
    over the MoE layers with its interval.

    people: (N,), whose image each is, or None.
    """
    _, records = predict_in_batches(model, views.images, batch)
    paired = token_pairs_by_layer(views.affines, model.layouts, special=False)
    pairs = list(zip(records, paired, strict=True))
    means = average_layers([layer_match_shares(record, *pair) for record, pair in pairs])
    images = mean_items_over_layers(
        [match_ratios_by_image(record, *pair) for record, pair in pairs]
    )
    limits = match_intervals(records, paired, people)
    return {
        name: (images[name], Interval(mean, *limits.get(name, ()))) for name, mean in means.items()
    }


def choice_ranking_scores(record: RoutingRecord) -> Tensor:
    """Return the scores (B, T, E) that experts are ranked by: the chosen first, each by its logit.

    Logits have no ties where an eigenbasis router clamps probs.
    """
    return chosen_first_scores(record.logits, record.chosen)


def layer_match_shares(
    record: RoutingRecord, pairs: TokenPairs, layout: TokenLayout
) -> dict[str, float]:
    """Return what partners of one MoE layer share, by SHARES.

    match_top1: share of pairs with the same best expert; match_top2_ordered: the same two best in
    this order; match_top2_sets: the same two.  record: fields (2N, T, E), first views first.
    """
    ratios = match_ratios(
        *token_pair_values(choice_ranking_scores(record), pairs, layout), pairs.found
    )
    switched = (switched_by_token(record, pairs, layout) * pairs.found).sum() / pairs.found.sum()
    return dict(zip(SHARES, (*ratios, float(switched)), strict=True))


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
        for place, name in enumerate(SHARES)
    }


def mean_items_over_layers(layers: Sequence[Mapping[str, Tensor]]) -> dict[str, np.ndarray]:
    """Return the means over the layers of what all of them have, (N,); layers: name → (N,)."""
    names = [name for name in layers[0] if all(name in layer for layer in layers)]
    return {
        name: torch.stack([layer[name] for layer in layers]).mean(dim=0).numpy() for name in names
    }


def match_intervals(
    records: tuple[RoutingRecord, ...],
    paired: Sequence[tuple[TokenPairs, TokenLayout]],
    people: np.ndarray | None = None,
) -> dict[str, tuple[float | None, float | None]]:
    """Limits by the bootstrap over images, as an image's pairs are not independent, by NAMES.

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
        limits[name] = interval.low, interval.high
    return limits
