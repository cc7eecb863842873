"""What the routing of a trace is like, layer by layer: every measure that needs records alone.

N items, T tokens of one, E experts; chosen, probs and combine are (N, T, E). Also what a trace
knows of each token, and the tokens that stand for an expert: those of the highest probability, and
drawn ones.
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
from moecore.measure.base import SEED
from moecore.measure.exploring.expert_gallery import FavouritePatch
from moecore.measure.exploring.expert_overlay_data import patch_crop
from moecore.measure.routing_metrics import expert_roles, expert_similarity
from moecore.measure.routing_metrics.choice_patterns import chance_violation
from moecore.measure.routing_metrics.expert_information import (
    MIN_IMAGES,
    check_exchangeable,
    mask_rare_words,
)
from moecore.measure.routing_metrics.layer_metrics import dead_expert_share, expert_counts
from moecore.measure.routing_metrics.layer_use import measure_layer_use_by_image
from moecore.measure.routing_metrics.purity import (
    expert_purity,
    expert_truth_tables,
    purity_by_image,
)
from moecore.measure.truth import permuted_truth_tables
from moecore.nn.routing_traces import coarse_patch_indices
from moecore.statistics.crossed import crossed_difference, linearize_ratio
from moecore.statistics.intervals import Interval


class TokenLabels:
    """Labels of some items of a trace, read once; ``remarks`` say what is left out, and why."""

    def __init__(self, trace: Trace, places: np.ndarray) -> None:
        """``places``: of the items, (N,)."""
        self.layers = trace.card.layers
        self.items = len(places)
        self.known: dict[str, Tensor] = {}
        self.remarks: list[str] = []
        for name, kind in (("positions", "position"), ("labels", "label"), ("tokens", "word")):
            values = trace.beside(name, places)
            if values is not None:
                self.known[kind] = values
        if "word" in self.known:
            self.known["word"] = torch.from_numpy(mask_rare_words(self.known["word"].numpy()))
        if self.items < MIN_IMAGES:
            problem = (
                f"found {self.items} items; allowed: {MIN_IMAGES} and more, as they are exchanged"
            )
            self.remarks.append(
                f"purity, and what experts tell of labels and words: {problem} to know chance"
            )
        elif "label" in self.known and len(self.known["label"].clamp_min(-1).unique()) < 2:
            self.remarks.append("purity: found one label; allowed: two and more")

    def by_kind(self, number: int, before: Tensor | None) -> dict[str, Tensor]:
        """Return kind → labels of a layer's tokens, (N or 1, T or 1), −1 where unknown.

        before: first experts of the layer before it, (N, T') or None.  Labels of other tokens than
        this layer's are left out, and of too few items all but positions.
        """
        tokens = self.layers[number].tokens
        labels = {"position": torch.arange(tokens)[None]}
        given = self.known if before is None else self.known | {"layer_before": before}
        for kind, values in given.items():
            values = values[:, None] if values.ndim == 1 else values
            fits = values.shape[1] in (1, tokens)
            if fits and values.max() >= 0 and (kind == "position" or self.items >= MIN_IMAGES):
                labels[kind] = number_from_zero(values)
        return labels


def number_from_zero(labels: Tensor) -> Tensor:
    """Return labels of any size as 0, 1, …, in their order, and −1 for those below 0."""
    known = labels >= 0
    places = torch.full_like(labels, -1)
    places[known] = labels[known].unique(return_inverse=True)[1]
    return places


EXAMPLES = 8  # of an expert, of each kind
AROUND = 4  # words before and after an example


class KeptTokens(NamedTuple):
    """Of each expert the tokens of the highest keys, one an item, the highest first, (K, E)."""

    keys: Tensor  # −1: no token
    items: Tensor
    patches: Tensor
    probabilities: Tensor  # that the router gave the expert


class Example(NamedTuple):
    """A token that chose an expert, and what stands there."""

    token: FavouritePatch  # its patch is one of the finest layer's
    crop: Tensor | None  # uint8 (C, h, w); None without pictures
    words: tuple[str, str, str]  # before it, it, after it; of a token without a word its place


def keep_highest(
    kept: KeptTokens, record: RoutingRecord, keys: Tensor, layout: TokenLayout, items: np.ndarray
) -> KeptTokens:
    """Return the EXAMPLES highest of what is kept and of new items: of each item and expert that
    of its patches that chose it with the highest key; the first of equal ones.

    keys: (N, T, E or 1), from 0.  items: their places, (N,), above those that are kept.
    """
    own = torch.where(record.chosen, keys, -1)[:, layout.special :]
    highest, patches = own.max(dim=1)
    probabilities = record.probs[:, layout.special :].gather(1, patches[:, None])[:, 0]
    places = torch.from_numpy(items)[:, None].expand_as(patches)
    pairs = zip(kept, (highest, places, patches, probabilities), strict=True)
    joined = [torch.cat([before.to(new.dtype), new]) for before, new in pairs]
    order = joined[0].sort(dim=0, descending=True, stable=True).indices[:EXAMPLES]
    return KeptTokens(*(one.gather(0, order) for one in joined))


def read_examples(
    trace: Trace, kept: KeptTokens, layout: TokenLayout, fine: TokenLayout
) -> list[list[Example]]:
    """Return for each expert of a layer the tokens that are kept, with what stands there.

    fine: the layout of the finest layer.
    """
    experts: list[list[Example]] = [[] for _ in range(kept.keys.shape[1])]
    items = kept.items[kept.keys >= 0].unique().numpy()
    if not len(items):
        return experts
    pictures, tokens = (trace.beside(name, items) for name in ("pictures", "tokens"))
    covers = coarse_patch_indices(layout, fine)
    for rank, expert in (kept.keys >= 0).nonzero().tolist():
        item, patch = (int(field[rank, expert]) for field in (kept.items, kept.patches))
        row = int(np.searchsorted(items, item))
        token = FavouritePatch(
            image=item,
            patch=int((covers == patch).nonzero()[0]),
            probability=round(float(kept.probabilities[rank, expert]), 4),
        )
        words = ("", f"item {item}, token {patch + 1}", "")
        if tokens is not None and tokens.shape[1] == layout.special + len(covers):
            words = words_around(trace, tokens[row].tolist(), layout.special + patch)
        crop = None
        if pictures is not None:  # a copy: the crop is a view of the whole picture
            crop = patch_crop(pictures[row], patch, layout).clone()
        experts[expert].append(Example(token, crop, words))
    return experts


def words_of_tokens(trace: Trace, tokens: Sequence[int]) -> list[str]:
    """Return the words of tokens; without a vocabulary their numbers."""
    vocabulary = trace.card.vocabulary
    return [vocabulary[one] if vocabulary else str(one) for one in tokens]


def words_around(trace: Trace, tokens: Sequence[int], place: int) -> tuple[str, str, str]:
    """Return words of an item's tokens: before a place, there and after it."""
    words = words_of_tokens(trace, tokens[max(0, place - AROUND) : place + AROUND + 1])
    there = min(place, AROUND)
    return " ".join(words[:there]), words[there], " ".join(words[there + 1 :])


# Of chosen, probs and combine of one layer: quantities by name, one value an item, (N,), whose
# mean is the quantity.
Analysis = Callable[[Tensor, Tensor, Tensor], Mapping[str, Tensor]]
PROBABILITIES = 2**23  # of a layer that is read at once: 32 MiB
ROLES = expert_roles.ExpertRoles()  # windows of neighbours, and items of a batch, as in our studies


class LayerNumbers(NamedTuple):
    """One layer's quantities by name, what chance gives for some of them, and shares of the load.

    coverage: of the choices, the share that the m most used experts have, m = 1 … E.  partners: of
    each expert that of the other trace, (E,); nothing where there is none.
    """

    quantities: dict[str, Interval]
    chances: dict[str, float]
    load: tuple[float, ...]
    coverage: tuple[float, ...]
    roles: expert_roles.RolesLayer
    partners: tuple[int, ...] = ()


class TraceNumbers(NamedTuple):
    """What was found of a trace."""

    items: int
    mean: dict[str, Interval]  # of each quantity, over the layers that have it
    chances: dict[str, float]  # the same
    layers: list[LayerNumbers]
    remarks: list[str]  # what could not be said, and why


def use_metrics_by_item(chosen: Tensor, probs: Tensor, combine: Tensor) -> Mapping[str, Tensor]:
    """Return load, entropies and confidence by item; k is what a token chose at most."""
    record = record_of_layer(LayerRouting(chosen, probs, combine))
    return measure_layer_use_by_image(record, None, int(chosen.sum(dim=-1).max()))


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


def coverage_by_item(chosen: Tensor, probs: Tensor, combine: Tensor) -> Mapping[str, Tensor]:
    """Return the share of the choices that the most used quarter of the experts has, by item."""
    counts = chosen.sum(dim=1).double()
    most = counts.sum(dim=0).topk(most_used_quarter(chosen.shape[-1])).indices
    share = linearize_ratio(counts[:, most].sum(dim=1).numpy(), counts.sum(dim=1).numpy())
    return {"coverage": torch.from_numpy(share)}


def most_used_quarter(experts: int) -> int:
    """Return how many experts are a quarter of them."""
    return max(1, experts // 4)


ANALYSES: tuple[Analysis, ...] = (use_metrics_by_item, dropped_by_item, coverage_by_item)


def analyse_trace(
    trace: Trace,
    items: int | None = None,
    against: Trace | None = None,
    analyses: Sequence[Analysis] = ANALYSES,
) -> TraceNumbers:
    """Return the quantities of all layers, with 95 % intervals over items, beside chance.

    items: so many at most, evenly spread; None: as many as PROBABILITIES allow.  against: a trace
    of the same items, whose experts are matched with these on half of the items and compared on
    the others.  What experts tell of positions, words, labels and the expert before is compared
    with permutations; of too few items it is left out, as ``remarks`` say.  Raises UserError where
    the traces differ, or are of too few items to be matched.
    """
    largest = max(layer.tokens * layer.experts for layer in trace.card.layers)
    places = evenly_spaced_indices(trace.items, items or max(1, PROBABILITIES // largest))
    if against is not None:
        check_same_items(trace, against, places)
    labels = TokenLabels(trace, places)
    layers: list[LayerNumbers] = []
    every: list[expert_roles.ByImage] = []
    before: Tensor | None = None
    beside = expert_roles.NO_INPUTS
    for number in range(len(trace.card.layers)):
        routing = trace.layer(number, places)
        theirs = None if against is None else against.layer(number, places)
        layout = trace.card.layers[number].layout()
        known = labels.by_kind(number, before)
        if beside.before is not None and beside.before.shape[1] != routing.chosen.shape[1]:
            beside = expert_roles.NO_INPUTS
        layer, by_item = analyse_layer(routing, layout, known, theirs, analyses, beside)
        layers.append(layer)
        every.append(by_item)
        before = first_choices(record_of_layer(routing))
        beside = expert_roles.RoleInputs(before=routing.chosen)
    chances = {
        name: fmean(layer.chances[name] for layer in layers if name in layer.chances)
        for name in dict.fromkeys(name for layer in layers for name in layer.chances)
    }
    mean = average_quantities(layers, every)
    return TraceNumbers(len(places), mean, chances, layers, labels.remarks)


def analyse_layer(
    routing: LayerRouting,
    layout: TokenLayout,
    labels: dict[str, Tensor],
    theirs: LayerRouting | None,
    analyses: Sequence[Analysis],
    beside: expert_roles.RoleInputs = expert_roles.NO_INPUTS,
) -> tuple[LayerNumbers, expert_roles.ByImage]:
    """Return one layer's numbers, and the values by item, (N,), of those that have any.

    layout: special tokens, in front, have no neighbours and tell nothing.  labels: kind → (N or 1,
    T or 1), −1 where unknown.  theirs: the layer in another trace.
    beside: what its tokens chose in the layer before.
    """
    record = record_of_layer(routing)
    counts = expert_counts(routing.chosen)
    dead = Interval(dead_expert_share(counts))  # refuses a layer in which nothing was chosen
    by_item = {name: one.numpy() for analyse in analyses for name, one in analyse(*routing).items()}
    roles, values = expert_roles.measure_layer_roles(record, layout, labels, ROLES, beside)
    by_item |= values
    chances = chances_of_layer(roles, int(counts.sum()))
    if "label" in roles.labels:
        purity = compare_with_labels(first_choices(record), labels["label"], len(counts))
        by_item["purity"], chances["purity"] = purity
    partners: tuple[int, ...] = ()
    if theirs is not None:
        partners, matched, by_chance = compare_matched(routing, theirs)
        by_item |= matched
        chances |= by_chance
    quantities = {name: item_mean(one) for name, one in by_item.items()}
    quantities |= {"dead": dead, **quantities_without_interval(roles)}
    load = tuple((counts / counts.sum()).tolist())
    return LayerNumbers(quantities, chances, load, roles.coverage, roles, partners), by_item


def average_quantities(
    layers: Sequence[LayerNumbers], every: Sequence[expert_roles.ByImage]
) -> dict[str, Interval]:
    """Return each quantity's mean over the layers that have it, with an interval where they do.

    every: the layers' values by item.  Those that are tests, ``p_…``, have no mean.
    """
    mean = {}
    for name in dict.fromkeys(name for layer in layers for name in layer.quantities):
        having = [number for number, layer in enumerate(layers) if name in layer.quantities]
        if name in every[having[0]]:
            mean[name] = item_mean(np.mean([every[number][name] for number in having], axis=0))
        elif not name.startswith("p_"):
            mean[name] = Interval(fmean(layers[number].quantities[name].value for number in having))
    return mean


def check_same_items(trace: Trace, against: Trace, places: np.ndarray) -> None:
    """Raise UserError where experts cannot be matched: other layers or tokens, too few items."""
    if against.shape != trace.shape:
        problem = f"found items, and (tokens, experts) of layers, {against.shape}"
        raise UserError(f"{against.folder}: {problem}; allowed: {trace.shape}")
    for name in ("tokens", "labels"):
        ours, theirs = trace.beside(name, places), against.beside(name, places)
        if ours is not None and theirs is not None and not torch.equal(ours, theirs):
            problem = f"found other {name} than in {trace.folder}"
            raise UserError(f"{against.folder}: {problem}; allowed: a trace of the same items")
    check_exchangeable(len(places))


def item_mean(values: np.ndarray) -> Interval:
    """Return the mean of (N,) values and its interval over items; that of one item has none."""
    if len(values) == 1:
        return Interval(float(values[0]))
    return crossed_difference(values[None]).interval()


def chances_of_layer(roles: expert_roles.RolesLayer, choices: int) -> dict[str, float]:
    """Return what chance gives for a layer's quantities: even random choices, exchanged items."""
    experts = len(roles.share)
    return {
        **roles.chances,
        "max_violation": chance_violation(choices, experts),
        "load_cv2": (experts - 1) / choices,
        "coverage": most_used_quarter(experts) / experts,
        **{f"information_{name}": 0.0 for name in roles.labels},  # it is taken off
    }


def quantities_without_interval(roles: expert_roles.RolesLayer) -> dict[str, Interval]:
    """Return what has no value an item: a quantile, a mean over batches, p of permutations."""
    names = ("smallest_margin", "batch_violation")
    values = {name: roles.values[name] for name in names if name in roles.values}
    values |= {f"p_{name}": told.p for name, told in roles.labels.items()}
    return {name: Interval(value) for name, value in values.items()}


def compare_with_labels(first: Tensor, labels: Tensor, experts: int) -> tuple[np.ndarray, float]:
    """Return how pure a token's first expert is, one value an item (N,), and by chance.

    first: (N, T), −1 for none.  labels: (N, 1 or T), −1 where unknown.  By chance: with the labels
    of other items.
    """
    chosen, kinds = first.numpy(), labels.expand(first.shape).numpy() + 1
    number = int(kinds.max())
    tables = expert_truth_tables(chosen, kinds, experts, number)
    null = permuted_truth_tables(chosen, kinds, experts, number)
    return purity_by_image(tables), fmean(map(expert_purity, null))


def compare_matched(
    ours: LayerRouting, theirs: LayerRouting
) -> tuple[tuple[int, ...], dict[str, np.ndarray], dict[str, float]]:
    """Return partners, how far they agree, one value an item of a drawn half, and by chance."""
    pair = ours.chosen.numpy(), theirs.chosen.numpy()
    items = len(pair[0])
    is_fit = np.random.default_rng(SEED).permutation(items) < items // 2
    partners = expert_similarity.seed_agreement(*pair, is_fit).partners
    by_item = expert_similarity.matched_agreement_by_image(
        pair[0][~is_fit], pair[1][~is_fit], partners
    )
    names = {"correlation": "matched_correlation", "overlap": "matched_overlap"}
    chance = expert_similarity.chance_agreement(*pair, is_fit)._asdict()
    return (
        tuple(partners.tolist()),
        {names[name]: values for name, values in by_item.items()},
        {names[name]: value for name, value in chance.items()},
    )
