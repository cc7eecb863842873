"""Analyse a trace: metrics of routing per layer, and example tokens of each expert.

N items, T tokens per item, E experts; chosen, probs and combine are (N, T, E).
"""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from moecore.core.files import UserError
from moecore.core.routing_records import RoutingRecord, TokenLayout, first_choices
from moecore.data.prepared import evenly_spaced_indices
from moecore.lens.traces import LayerRouting, Trace
from moecore.measure import base, truth
from moecore.measure.routing_metrics import (
    epoch_routing,
    expert_roles,
    expert_similarity,
    label_information,
    layer_metrics,
)
from moecore.measure.routing_metrics.choice_patterns import chance_maxvio
from moecore.measure.routing_metrics.expert_profiles import FavouritePatch, crop_patch
from moecore.measure.routing_metrics.label_information import MIN_IMAGES
from moecore.nn.encoded_routing import coarse_patch_indices
from moecore.statistics.comparisons import crossed_difference, linearize_ratio
from moecore.statistics.intervals import Interval


class TokenLabels:
    """A trace's positions, words and labels of tokens; ``remarks``: what cannot be measured."""

    def __init__(self, trace: Trace, items: np.ndarray) -> None:
        self.layers = trace.card.layers
        self.items = len(items)
        self.values: dict[str, Tensor] = {}
        self.remarks: list[str] = []
        for name, kind in (("positions", "position"), ("labels", "label"), ("tokens", "word")):
            values = trace.item_tensor(name, items)
            if values is not None:
                self.values[kind] = values
        if "word" in self.values:
            word_ids = label_information.mask_rare_words(self.values["word"].numpy())
            self.values["word"] = torch.from_numpy(word_ids)
        if self.items < MIN_IMAGES:
            what = "purity, and what experts tell about labels and words"
            allowed = f"{MIN_IMAGES} or more, as chance is computed by permuting items"
            self.remarks.append(f"{what}: found {self.items} items; allowed: {allowed}")
        elif "label" in self.values and len(self.values["label"].clamp_min(-1).unique()) < 2:
            self.remarks.append("purity: found one label; allowed: two or more")

    def by_kind(self, number: int, previous_experts: Tensor | None) -> dict[str, Tensor]:
        """Return kind → labels, (N or 1, T or 1; 1: shared), −1: unknown; also previous experts."""
        # previous_experts: the first experts of the previous layer's tokens, (N, T').
        tokens = self.layers[number].tokens
        labels = {"position": torch.arange(tokens)[None]}
        by_kind = dict(self.values)
        if previous_experts is not None:
            by_kind["layer_before"] = previous_experts
        for kind, values in by_kind.items():
            values = values[:, None] if values.ndim == 1 else values
            fits = values.shape[1] in (1, tokens)
            if fits and values.max() >= 0 and (kind == "position" or self.items >= MIN_IMAGES):
                # Labels become 0, 1, … in ascending order.
                is_known = values >= 0
                labels[kind] = torch.full_like(values, -1)
                labels[kind][is_known] = values[is_known].unique(return_inverse=True)[1]
        return labels


MAX_EXAMPLES = 8  # per expert and kind
CONTEXT_WORDS = 4  # words before and after an example


class TopTokens(NamedTuple):
    """Per expert, K tokens of highest key (probability or random), one per item; each (K, E)."""

    keys: Tensor  # descending along K; −1: no token
    items: Tensor
    patches: Tensor
    probabilities: Tensor  # of the expert

    @classmethod
    def of_none(cls, experts: int) -> "TopTokens":
        return cls(*torch.zeros(4, 0, experts).unbind())


class Example(NamedTuple):
    token: FavouritePatch  # with the index of a patch in the finest layer
    crop: Tensor | None  # uint8 (C, h, w); None without pictures
    context: tuple[str, str, str]  # before the token, of it (or its position), and after it


def update_top_tokens(
    top: TopTokens, record: RoutingRecord, keys: Tensor, layout: TokenLayout, items: np.ndarray
) -> TopTokens:
    """Merge new items into ``top``; keep each expert's ``MAX_EXAMPLES`` tokens of highest keys."""
    # Per item, an expert's candidate is its token with the highest key; ties go to the earlier
    # item. keys: (N, T, E or 1), ≥ 0; items: (N,), higher than in ``top``.
    highest, patches = torch.where(record.chosen, keys, -1)[:, layout.special :].max(dim=1)
    probabilities = record.probs[:, layout.special :].gather(1, patches[:, None])[:, 0]
    indices = torch.from_numpy(items)[:, None].expand_as(patches)
    pairs = zip(top, (highest, indices, patches, probabilities), strict=True)
    joined = [torch.cat([before.to(new.dtype), new]) for before, new in pairs]
    order = joined[0].sort(dim=0, descending=True, stable=True).indices[:MAX_EXAMPLES]
    return TopTokens(*(field.gather(0, order) for field in joined))


def read_examples(
    trace: Trace, top: TopTokens, layout: TokenLayout, fine: TokenLayout
) -> list[list[Example]]:
    """Read each expert's ``top`` tokens, best first, with crop or words; patches: of ``fine``."""
    experts: list[list[Example]] = [[] for _ in range(top.keys.shape[1])]
    items = top.items[top.keys >= 0].unique().numpy()
    if not len(items):
        return experts
    pictures, tokens = (trace.item_tensor(name, items) for name in ("pictures", "tokens"))
    covers = coarse_patch_indices(layout, fine)
    for rank, expert in (top.keys >= 0).nonzero().tolist():
        item, patch = (int(field[rank, expert]) for field in (top.items, top.patches))
        row = int(np.searchsorted(items, item))
        fine_patch = int((covers == patch).nonzero()[0])
        probability = round(float(top.probabilities[rank, expert]), 4)
        token = FavouritePatch(image=item, patch=fine_patch, probability=probability)
        context = ("", f"item {item}, token {patch + 1}", "")
        if tokens is not None and tokens.shape[1] == layout.special + len(covers):
            place = layout.special + patch
            near = tokens[row, max(0, place - CONTEXT_WORDS) : place + CONTEXT_WORDS + 1].tolist()
            near_words = words_of_tokens(trace, near)
            middle = min(place, CONTEXT_WORDS)
            before, after = near_words[:middle], near_words[middle:]
            context = " ".join(before), after[0], " ".join(after[1:])
        crop = None
        if pictures is not None:  # a copy: a view would keep all pictures in memory
            crop = crop_patch(pictures[row], patch, layout).clone()
        experts[expert].append(Example(token, crop, context))
    return experts


def words_of_tokens(trace: Trace, tokens: Sequence[int]) -> list[str]:
    vocabulary = trace.card.vocabulary
    return [vocabulary[token] if vocabulary else str(token) for token in tokens]


# Of chosen, probs and combine of one layer: name → values (N,), whose mean is the quantity.
Analysis = Callable[[Tensor, Tensor, Tensor], Mapping[str, Tensor]]
MAX_PROBABILITIES = 2**23  # of one layer in memory, 32 MiB
ROLE_SETTINGS = expert_roles.ExpertRoles()


# values and levels under chance, by name of a quantity
Column = tuple[Mapping[str, Interval], Mapping[str, float]]


class LayerQuantities(NamedTuple):
    quantities: dict[str, Interval]  # by name
    chances: dict[str, float]  # expectation under chance, by name of a quantity
    load: tuple[float, ...]  # share of the choices per expert, (E,)
    roles: expert_roles.LayerRoles  # result of the measurement ``expert_roles``
    partners: tuple[int, ...] = ()  # matched expert of the other trace, (E,); () without one


class TraceQuantities(NamedTuple):
    items: int  # number of analysed items
    mean: dict[str, Interval]  # each quantity's mean over the layers that have it
    chances: dict[str, float]  # expectation under chance, the mean over layers
    layers: list[LayerQuantities]
    remarks: list[str]  # omitted quantities, and why

    @property
    def columns(self) -> list[Column]:
        """Return the columns of the page's table: the mean over layers, then one per layer."""
        layers = [(layer.quantities, layer.chances) for layer in self.layers]
        return [(self.mean, self.chances), *layers]


def convert_to_routing_record(routing: LayerRouting) -> RoutingRecord:
    """Build a record whose logits are the probabilities, for metrics that do not read logits."""
    chosen, probs, combine = routing
    return RoutingRecord(probs, probs, chosen.float(), chosen, combine)


def expert_use_metrics_by_item(record: RoutingRecord) -> dict[str, np.ndarray]:
    """Return expert-use metric → value per item (N,), for the record of one layer."""
    k = int(record.chosen.sum(dim=-1).max())
    metrics = layer_metrics.measure_layer_use_by_image(record, None, k)
    counts = record.chosen.sum(dim=1).double()
    most_used = counts.sum(dim=0).topk(count_quarter_of_experts(counts.shape[1])).indices
    choices = counts.sum(dim=1).numpy()
    dropped = (record.chosen & (record.combine == 0)).sum(dim=(1, 2)).double()  # over capacity
    parts = {"dropped": dropped, "coverage": counts[:, most_used].sum(dim=1)}
    shares = {name: linearize_ratio(part.numpy(), choices) for name, part in parts.items()}
    return {name: values.numpy() for name, values in metrics.items()} | shares


def count_quarter_of_experts(experts: int) -> int:
    return max(1, experts // 4)


def analyse_trace(
    trace: Trace,
    items: int | None = None,
    against: Trace | None = None,
    analyses: Sequence[Analysis] = (),
) -> TraceQuantities:
    """Return quantities per layer and averaged, with 95 % intervals over items and chance levels.

    Among them is what a token's experts tell about its position, word, label, and first expert in
    the previous layer: the mutual information minus its mean over permutations of these values, as
    a share of the values' entropy. With too few items, it is measured for positions only.

    Args:
        trace: the trace.
        items: largest number of items, evenly spread; None: as many as fit into memory.
        against: a trace of the same items. Its experts are matched on half of the items and
            compared on the other half.
        analyses: additional functions of chosen, probs and combine (N, T, E) of a layer, which
            return values (N,) by name.

    Raises:
        UserError: the traces differ in items or layers, or have too few items to match experts.
    """
    largest = max(layer.tokens * layer.experts for layer in trace.card.layers)
    indices = evenly_spaced_indices(trace.items, items or max(1, MAX_PROBABILITIES // largest))
    if against is not None:
        check_traces_comparable(trace, against, indices)
    labels = TokenLabels(trace, indices)
    layers: list[LayerQuantities] = []
    values_by_layer: list[expert_roles.ByImage] = []
    previous_experts: Tensor | None = None
    context = expert_roles.OptionalLayerRoleInputs()
    for number in range(len(trace.card.layers)):
        routing = trace.layer(number, indices)
        theirs = None if against is None else against.layer(number, indices)
        layout = trace.card.layers[number].layout()
        layer_labels = labels.by_kind(number, previous_experts)
        if context.before is not None and context.before.shape[1] != routing.chosen.shape[1]:
            context = expert_roles.OptionalLayerRoleInputs()
        layer, by_item = analyse_layer(routing, layout, layer_labels, theirs, analyses, context)
        layers.append(layer)
        values_by_layer.append(by_item)
        previous_experts = first_choices(convert_to_routing_record(routing))
        context = expert_roles.OptionalLayerRoleInputs(before=routing.chosen)
    chances = {
        name: fmean(layer.chances[name] for layer in layers if name in layer.chances)
        for name in dict.fromkeys(name for layer in layers for name in layer.chances)
    }
    mean = average_quantities_over_layers(layers, values_by_layer)
    return TraceQuantities(len(indices), mean, chances, layers, labels.remarks)


def analyse_layer(
    routing: LayerRouting,
    layout: TokenLayout,
    labels: dict[str, Tensor],  # see ``TokenLabels.by_kind``
    theirs: LayerRouting | None,  # the same layer in the other trace
    analyses: Sequence[Analysis],
    context: expert_roles.OptionalLayerRoleInputs,  # choices of the previous layer
) -> tuple[LayerQuantities, expert_roles.ByImage]:
    """Return a layer's quantities, also against labels, theirs and context; name → values (N,)."""
    record = convert_to_routing_record(routing)
    counts = layer_metrics.expert_counts(routing.chosen)
    dead = layer_metrics.dead_expert_share(counts)  # refuses a layer in which nothing was chosen
    by_item = expert_use_metrics_by_item(record)
    for analyse in analyses:
        by_item |= {name: values.numpy() for name, values in analyse(*routing).items()}
    roles, values = expert_roles.measure_layer_roles(record, layout, labels, ROLE_SETTINGS, context)
    by_item |= values
    choices = int(counts.sum())
    experts = len(counts)
    chances = {
        **roles.chances,
        "max_violation": chance_maxvio(choices, experts),
        "load_cv2": (experts - 1) / choices,
        "coverage": count_quarter_of_experts(experts) / experts,
        # Chance is already subtracted from the information.
        **{f"information_{name}": 0.0 for name in roles.labels},
    }
    if "label" in roles.labels:
        purity = measure_label_purity(first_choices(record), labels["label"], experts)
        by_item["purity"], chances["purity"] = purity
    partners: tuple[int, ...] = ()
    if theirs is not None:
        partners, matched, by_chance = match_and_compare_experts(routing, theirs)
        by_item |= matched
        chances |= by_chance
    names = [name for name in ("smallest_margin", "batch_violation") if name in roles.values]
    single = {"dead": dead} | {name: roles.values[name] for name in names}
    single |= {f"p_{name}": told.p for name, told in roles.labels.items()}
    quantities = {name: mean_and_limits(values) for name, values in by_item.items()}
    quantities |= {name: Interval(value) for name, value in single.items()}
    load = tuple((counts / counts.sum()).tolist())
    return LayerQuantities(quantities, chances, load, roles, partners), by_item


def average_quantities_over_layers(
    layers: Sequence[LayerQuantities], values_by_layer: Sequence[expert_roles.ByImage]
) -> dict[str, Interval]:
    """Average each quantity, except p values (``p_…``), over the layers that have it."""
    mean = {}
    for name in dict.fromkeys(name for layer in layers for name in layer.quantities):
        by_item = [values[name] for values in values_by_layer if name in values]
        if by_item:
            mean[name] = mean_and_limits(np.mean(by_item, axis=0))
        elif not name.startswith("p_"):
            having = [layer.quantities[name] for layer in layers if name in layer.quantities]
            mean[name] = Interval(fmean(quantity.value for quantity in having))
    return mean


def check_traces_comparable(trace: Trace, against: Trace, indices: np.ndarray) -> None:
    if against.shape != trace.shape:
        shape = f"items, and (tokens, experts) of layers, {against.shape}"
        raise UserError.at(against.folder, found=shape, allowed=trace.shape)
    for name in ("tokens", "labels"):
        ours, theirs = (trace.item_tensor(name, indices), against.item_tensor(name, indices))
        if ours is not None and theirs is not None and not torch.equal(ours, theirs):
            text = f"other {name} than in {trace.folder}"
            raise UserError.at(against.folder, found=text, allowed="a trace of the same items")
    label_information.check_enough_images(len(indices))


def mean_and_limits(values: np.ndarray) -> Interval:
    """Return the mean of values (N,) with its 95 % interval; if N is 1, without an interval."""
    if len(values) == 1:
        return Interval(float(values[0]))
    return crossed_difference(values[None]).interval()


def measure_label_purity(first: Tensor, labels: Tensor, experts: int) -> tuple[np.ndarray, float]:
    """Return the share of tokens with their first expert's main label: values (N,); by chance."""
    # The share is the mean of the items' values; by chance: its mean after permuting labels. first:
    # the tokens' first experts (N, T), −1 for none; labels: (N, 1 or T), −1 if unknown.
    chosen = first.numpy()
    kinds = labels.expand(first.shape).numpy() + 1
    number = int(kinds.max())
    tables = epoch_routing.expert_kind_counts(chosen, kinds, experts, number)
    null = truth.permuted_truth_tables(chosen, kinds, experts, number)
    return epoch_routing.purity_by_image(tables), fmean(map(epoch_routing.expert_purity, null))


def match_and_compare_experts(
    ours: LayerRouting, theirs: LayerRouting
) -> tuple[tuple[int, ...], dict[str, np.ndarray], dict[str, float]]:
    """Match experts on half of the items; return matches, agreement on the other half, chance."""
    # Matches: (E,). Agreement: how equally matched experts are chosen, name → values per item.
    pair = ours.chosen.numpy(), theirs.chosen.numpy()
    items = len(pair[0])
    is_fit = np.random.default_rng(base.SEED).permutation(items) < items // 2
    partners = expert_similarity.seed_agreement(*pair, is_fit).partners
    first, second = (chosen[~is_fit] for chosen in pair)
    by_item = expert_similarity.matched_agreement_by_image(first, second, partners)
    matched = {f"matched_{name}": values for name, values in by_item.items()}
    chances = expert_similarity.chance_agreement(*pair, is_fit)
    by_chance = dict(zip(("matched_correlation", "matched_overlap"), chances, strict=True))
    return tuple(partners.tolist()), matched, by_chance
