"""What the routing of a trace is like, layer by layer: every measure that needs records alone.

N items, T tokens of one, E experts; chosen, probs and combine are (N, T, E).
"""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor

from moecore.core.files import UserError
from moecore.core.routing_records import RoutingRecord, first_choices
from moecore.data.prepared import evenly_spaced_indices
from moecore.lens.trace_reader import LayerRouting, Trace
from moecore.measure.routing_metrics.coactivation import pair_lift_by_image
from moecore.measure.routing_metrics.layer_metrics import (
    agreement_by_image,
    dead_expert_share,
    expert_counts,
    iou_by_image,
)
from moecore.measure.routing_metrics.layer_use import use_metrics_by_image
from moecore.measure.routing_metrics.load_concentration import choice_margin
from moecore.measure.routing_metrics.local_consistency import (
    consistency_by_image,
    window_use_histogram,
)
from moecore.measure.truth import truth_layer
from moecore.statistics.crossed import crossed_difference, linearize_ratio
from moecore.statistics.intervals import Interval

# Of chosen, probs and combine of one layer: quantities by name, one value an item, (N,), whose
# mean is the quantity.
Analysis = Callable[[Tensor, Tensor, Tensor], Mapping[str, Tensor]]
WINDOW = 4  # neighbours whose experts are compared
PROBABILITIES = 2**25  # of a layer that is read at once: 128 MiB


class LayerNumbers(NamedTuple):
    """One layer's quantities by name, and each expert's share of the choices."""

    quantities: dict[str, Interval]
    load: tuple[float, ...]


class TraceNumbers(NamedTuple):
    """What was found of a trace."""

    items: int
    mean: dict[str, Interval]  # over the layers, of those quantities that all of them have
    layers: list[LayerNumbers]


def use_metrics_by_item(chosen: Tensor, probs: Tensor, combine: Tensor) -> Mapping[str, Tensor]:
    """Return load, entropies and confidence by item; k is what a token chose at most."""
    record = record_of_layer(LayerRouting(chosen, probs, combine))
    return use_metrics_by_image(record, None, int(chosen.sum(dim=-1).max()))


def record_of_layer(routing: LayerRouting) -> RoutingRecord:
    """Return a record for what reads no logits: probabilities stand in their place."""
    chosen, probs, combine = routing
    return RoutingRecord(probs, probs, chosen.float(), chosen, combine)


def dropped_by_item(chosen: Tensor, probs: Tensor, combine: Tensor) -> Mapping[str, Tensor]:
    """Return the share of the choices that no expert had room for, by item."""
    lost, every = (
        mask.flatten(1).sum(dim=1).double().numpy() for mask in (chosen & (combine == 0), chosen)
    )
    return {"dropped": torch.from_numpy(linearize_ratio(lost, every))}


def pair_lift_by_item(chosen: Tensor, probs: Tensor, combine: Tensor) -> Mapping[str, Tensor]:
    """Return how often tokens choose the same pairs, over chance; {} of routers of k = 1."""
    if int(chosen.sum(dim=-1).max()) < 2:
        return {}
    return {"pair_lift": pair_lift_by_image(chosen)}


def margin_by_item(chosen: Tensor, probs: Tensor, combine: Tensor) -> Mapping[str, Tensor]:
    """Return how far the lowest chosen probability lies above the next; {} where one has none."""
    margin = choice_margin(probs, chosen).nanmean(dim=1)
    return {} if margin.isnan().any() else {"margin": margin}


def local_consistency_by_item(
    chosen: Tensor, probs: Tensor, combine: Tensor
) -> Mapping[str, Tensor]:
    """Return how well one set of experts serves WINDOW neighbours; {} of shorter items."""
    if chosen.shape[1] < WINDOW:
        return {}
    uses = window_use_histogram(chosen, WINDOW).numpy()
    return {"local_consistency": torch.from_numpy(consistency_by_image(uses))}


ANALYSES: tuple[Analysis, ...] = (
    use_metrics_by_item,
    dropped_by_item,
    pair_lift_by_item,
    margin_by_item,
    local_consistency_by_item,
)


def analyse_trace(
    trace: Trace,
    items: int | None = None,
    against: Trace | None = None,
    analyses: Sequence[Analysis] = ANALYSES,
) -> TraceNumbers:
    """Return the quantities of all layers, with 95 % intervals over items.

    items: so many at most, evenly spread; None: as many as PROBABILITIES allow.  against: a trace
    of the same items, with which the choice of experts is compared.  Labels, where the trace has
    any, are compared with each token's first expert.  Raises UserError where the traces differ.
    """
    largest = max(layer.tokens * layer.experts for layer in trace.card.layers)
    places = evenly_spaced_indices(trace.items, items or max(1, PROBABILITIES // largest))
    if against is not None and against.shape != trace.shape:
        problem = f"found items, and (tokens, experts) of layers, {against.shape}"
        raise UserError(f"{against.folder}: {problem}; allowed: {trace.shape}")
    labels = trace.beside("labels", places)
    layers: list[LayerNumbers] = []
    every: list[dict[str, Tensor]] = []
    for number in range(len(trace.card.layers)):
        routing = trace.layer(number, places)
        counts = expert_counts(routing.chosen)
        dead = Interval(dead_expert_share(counts))  # refuses a layer in which nothing was chosen
        by_item = {name: one for analyse in analyses for name, one in analyse(*routing).items()}
        if against is not None:
            theirs = against.layer(number, places)
            first = (first_choices(record_of_layer(one)) for one in (routing, theirs))
            by_item["agreement"] = agreement_by_image(*first)
            by_item["same_experts"] = iou_by_image(routing.chosen, theirs.chosen)
        quantities = {name: item_mean(values) for name, values in by_item.items()}
        quantities |= {"dead": dead, **compare_with_labels(routing, labels)}
        layers.append(LayerNumbers(quantities, tuple((counts / counts.sum()).tolist())))
        every.append(by_item)
    mean = {}
    for name in set.intersection(*(set(layer.quantities) for layer in layers)):
        if name in every[0]:
            mean[name] = item_mean(torch.stack([one[name] for one in every]).mean(dim=0))
        else:
            mean[name] = Interval(fmean(layer.quantities[name].value for layer in layers))
    return TraceNumbers(len(places), mean, layers)


def item_mean(values: Tensor) -> Interval:
    """Return the mean of (N,) values and its interval over items; that of one item has none."""
    if len(values) == 1:
        return Interval(float(values[0]))
    return crossed_difference(values[None].numpy()).interval()


def compare_with_labels(routing: LayerRouting, labels: Tensor | None) -> dict[str, Interval]:
    """Return what a token's first expert says of its label, (N,) or (N, T); {} where none fit."""
    items, tokens, experts = routing.probs.shape
    if labels is not None and labels.ndim == 1:
        labels = labels[:, None].expand(items, tokens)
    if labels is None or labels.shape != (items, tokens) or labels.max() < 0:
        return {}
    first = first_choices(record_of_layer(routing))
    told = truth_layer(first, labels.clamp_min(-1) + 1, experts, int(labels.max()) + 1)
    return {
        "purity": Interval(told.purity, told.purity_low, told.purity_high),
        "purity_chance": Interval(told.purity_chance),
        "label_information": Interval(told.adjusted),
    }
