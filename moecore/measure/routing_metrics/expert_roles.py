"""What experts are for: who goes with whom, who is like whom, what they specialise in, how sure.

All from the pass of ``Routing``. N images, T tokens per image, E experts, k chosen per token.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Annotated, NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from moecore.core.config import Config
from moecore.core.encoded_arrays import encode_arrays
from moecore.core.routing_records import RoutingRecord, TokenLayout, first_choices
from moecore.data.prepared import evenly_spaced_indices
from moecore.measure.base import SEED, MeasuredModel, Number
from moecore.measure.item_mean_result import ItemMeans
from moecore.measure.routing_metrics.barred_experts import find_own_model
from moecore.measure.routing_metrics.coactivation import (
    conditional_coactivation,
    count_coactivation,
    follow_up_shares,
    pair_lift_by_image,
)
from moecore.measure.routing_metrics.expert_information import (
    expert_information,
    permute_images,
    permute_positions,
)
from moecore.measure.routing_metrics.expert_similarity import (
    CountedImages,
    KeptTokens,
    Similarity,
    expert_similarity,
    keep_layer_tokens,
)
from moecore.measure.routing_metrics.layer_metrics import expert_counts
from moecore.measure.routing_metrics.load_concentration import (
    chance_violation,
    choice_margin,
    cumulative_load_shares,
    mean_batch_violation,
)
from moecore.measure.routing_metrics.local_consistency import (
    consistency_by_image,
    consistency_by_threshold,
    window_use_histogram,
)
from moecore.measure.routing_metrics.predictability import (
    EarlyChoices,
    choice_predictability,
    choose_one_layer_early,
)
from moecore.measure.routing_metrics.token_labels import (
    RARE,
    image_labels_by_kind,
    token_labels_by_kind,
)
from moecore.nn.backbones.base_model import Model
from moecore.nn.predict import model_device
from moecore.nn.routing_traces import record_on_finer_grid
from moecore.statistics.crossed import linearize_ratio
from moecore.statistics.intervals import indices_by_person

PERMUTATIONS = 200
SMALLEST = 0.01  # quantile of the margins
KEPT = 2**13  # tokens of a layer whose experts are kept, for a comparison of seeds


class ExpertRoles(Config):
    """The sizes that some numbers depend on."""

    batch: int = Field(64, ge=1, description="Images of a batch whose MaxVio is taken.")
    windows: tuple[Annotated[int, Field(ge=2)], ...] = Field(
        (2, 4, 8), description="Neighbouring tokens that share a set of experts; fewer than all."
    )


def roles_refusal(model: Model) -> str | None:
    """Return why a model's experts have no roles, in words: tokens must choose among experts."""
    moe = model.moe
    if moe is None:
        return "a dense model has no experts"
    if not moe.router.chooses_per_token:
        return f"with the router {moe.router.kind} tokens choose no experts"
    return "there is one expert" if moe.experts.number < 2 else None


class WatchedPass(NamedTuple):
    """What a pass tells beside its records, by the names of the layers."""

    tokens: dict[str, KeptTokens]
    early: dict[str, EarlyChoices]


@contextmanager
def watch_experts(model: Model, images: CountedImages) -> Iterator[WatchedPass]:
    """Keep, of the pass over these images inside, what ``tell_roles`` needs of it."""
    with keep_layer_tokens(model, images) as tokens, choose_one_layer_early(model) as early:
        yield WatchedPass(tokens, early)


def tell_roles(
    subject: MeasuredModel,
    where: np.ndarray,
    records: Sequence[RoutingRecord],
    watched: WatchedPass,
    settings: ExpertRoles,
) -> "Result":
    """Return each layer's roles, and means over the layers with intervals over images.

    records: of a pass over the test images at these places, (N,), which was watched.
    """
    test = subject.data.test
    images = np.array(test.images[where])
    people = test.people_at(where)
    alike = [
        expert_similarity(kept.outputs(len(images)), people) for kept in watched.tokens.values()
    ]
    predicted = [one.chosen(len(images)) for one in watched.early.values()]
    scores = selection_scores(subject.model, list(watched.early), records)
    classes = image_labels_by_kind(subject, torch.from_numpy(np.array(test.labels[where])))

    @cache
    def known_labels(layout: TokenLayout) -> dict[str, Tensor]:
        return classes | token_labels_by_kind(subject, where, images, layout)

    layers = []
    by_image = []
    for index, (record, layout) in enumerate(zip(records, subject.model.layouts, strict=True)):
        labels = dict(known_labels(layout))
        beside = BesideRecord(people, alike[index], predicted[index], scores=scores[index])
        if index:
            before = records[index - 1], subject.model.layouts[index - 1]
            there = record_on_finer_grid(*before, layout)
            labels["layer_before"] = first_choices(there)
            beside = beside._replace(before=there.chosen)
        layer, values = layer_roles(record, layout, labels, settings, beside)
        layers.append(layer)
        by_image.append(values)
    # the first layer has none before it
    shared = [name for name in by_image[-1] if all(name in one for one in by_image[1:])]
    return Result.of(
        {name: mean_over_layers_with_name(by_image, name) for name in shared},
        people,
        images=len(images),
        batch=settings.batch,
        layers=layers,
    )


class LabelSpecialisation(Config):
    """The largest share of a label's tokens that one expert has."""

    share: float  # mean over the labels of RARE tokens at least
    chance: float  # of permuted labels, mean
    labels: int  # how many are of as many tokens


class LabelInformation(Config):
    """What the experts of a token tell of one kind of label, in nats."""

    information: float  # plug-in mutual information
    chance: float  # of permuted labels, mean
    p: float  # share of permutations, itself among them, with as much information
    normalised: float  # (information − chance) / entropy of the labels
    specialisation: LabelSpecialisation | None = None  # None where no label has RARE tokens


class KeptChoices(Config):
    """Which experts some tokens chose: bits of (images, tokens, experts), by ``encode_arrays``."""

    shape: tuple[int, int, int]
    bits: str
    people: tuple[int, ...] | None = None  # whose image each is, where people have several


class RolesLayer(Config):
    """One MoE layer's."""

    share: tuple[float, ...]  # of tokens that chose the expert
    together: tuple[tuple[float, ...], ...]  # P(b chosen | a chosen), rows a
    # P(b chosen here | a chosen in the layer before), rows a, and P(a there | b here), rows b
    after: tuple[tuple[float, ...], ...] = ()
    before: tuple[tuple[float, ...], ...] = ()
    labels: dict[str, LabelInformation]
    values: dict[str, float]
    chances: dict[str, float]
    coverage: tuple[float, ...]  # share of the choices that the m most used experts have
    # similarity of the outputs of networks a and b; nothing of too few tokens
    cka: tuple[tuple[Number, ...], ...] = ()
    cosine: tuple[tuple[Number, ...], ...] = ()
    kept: KeptChoices


class Result(ItemMeans):
    """Means over the MoE layers with intervals over images, and each layer.

    information_{label}: as ``normalised``.  specialisation_{label}: less its chance.  pair_lift:
    mean of P(b | a) / P(b) over pairs of experts that tokens chose; its chance is at an even load.
    margin: lowest score of a chosen expert − highest of another, see ``selection_scores``.
    consistency_{m}: F1 of the best sets for windows of m tokens; its chance with the tokens of
    each image exchanged.  expert_cka, expert_cosine: of what two make of the same tokens, mean over
    pairs; their chance of tokens of two images.  early_choice, early_load: see
    ``choice_predictability``, as early_load_rank and early_hottest of layers alone.
    Of layers alone, too: smallest_margin, a 1 % quantile; batch_violation, the mean MaxVio of
    batches, beside that of even random choices.
    """

    images: int
    batch: int  # images of a batch of batch_violation
    layers: tuple[RolesLayer, ...]


Values = dict[str, np.ndarray]  # name → one value an image, (N,)


class BesideRecord(NamedTuple):
    """What is known of a layer's tokens and experts beside its record; None where it is not."""

    people: np.ndarray | None = None  # (N,) whose image each is
    alike: Similarity | None = None
    # (N, T, E) bool, what its router would have chosen a layer earlier
    predicted: Tensor | None = None
    before: Tensor | None = None  # (N, T, E') bool, what its tokens chose in the layer before
    scores: Tensor | None = None  # (N, T, E), what the choice is by; None: the probabilities


NOTHING_BESIDE = BesideRecord()


def layer_roles(
    record: RoutingRecord,
    layout: TokenLayout,
    labels: dict[str, Tensor],
    settings: ExpertRoles,
    beside: BesideRecord = NOTHING_BESIDE,
) -> tuple[RolesLayer, Values]:
    """Return one layer's roles, and the values by image of what ``Result`` has.

    labels: name → (N or 1, T or 1), -1 where unknown; special tokens have none.
    """
    chosen = record.chosen
    counts = expert_counts(chosen)
    tokens, experts = chosen[..., 0].numel(), len(counts)
    information, by_image = label_information(chosen, layout, labels, beside.people)
    consistency, chances = window_consistency(chosen[:, layout.special :], settings.windows)
    by_image |= consistency
    extra = {"batch_violation": mean_batch_violation(chosen, settings.batch)}
    in_batch = round(int(counts.sum()) * min(1, settings.batch / len(chosen)))
    chances["batch_violation"] = chance_violation(in_batch, experts)
    if int(chosen.sum(dim=-1).max()) > 1:
        by_image["pair_lift"] = pair_lift_by_image(chosen).numpy()
        k = float(counts.sum() / tokens)
        chances["pair_lift"] = (k - 1) * experts / ((experts - 1) * k)
    scores = record.probs if beside.scores is None else beside.scores
    margins, smallest = margin_values(scores, record.chosen)
    by_image |= margins
    extra |= smallest
    if beside.predicted is not None:
        told = choice_predictability(beside.predicted, chosen)
        by_image |= told.by_image
        chances |= told.chances
        extra |= told.of_layer
    matrices = {}
    if (alike := beside.alike) is not None:
        by_image |= alike.by_image
        chances |= alike.chances
        matrices = {"cka": alike.cka.tolist(), "cosine": alike.cosine.tolist()}
    if beside.before is not None:
        matrices["after"] = follow_up_shares(beside.before, chosen).tolist()
        matrices["before"] = follow_up_shares(chosen, beside.before).tolist()
    few = evenly_spaced_indices(len(chosen), max(2, KEPT // chosen.shape[1]))
    layer = RolesLayer(
        share=(counts / tokens).tolist(),
        together=conditional_coactivation(count_coactivation(chosen).sum(dim=0)).tolist(),
        labels=information,
        values={name: float(values.mean()) for name, values in by_image.items()} | extra,
        chances=chances,
        coverage=cumulative_load_shares(counts).tolist(),
        **matrices,
        kept=KeptChoices(
            shape=(len(few), *chosen.shape[1:]),
            bits=encode_arrays(np.packbits(chosen[few].numpy())),
            people=people_numbers(beside.people, few),
        ),
    )
    return layer, by_image


def people_numbers(people: np.ndarray | None, few: np.ndarray) -> list[int] | None:
    """Return a number for the person of each of a few images; None where none has several."""
    if people is None or indices_by_person(people) is None:
        return None
    return np.unique(people, return_inverse=True)[1][few].tolist()


def selection_scores(
    model: Model, layers: Sequence[str], records: Sequence[RoutingRecord]
) -> list[Tensor]:
    """Return what each of these layers' router chose by, (N, T, E) on the CPU."""
    scores = []
    for name, record in zip(layers, records, strict=True):
        router = find_own_model(model).get_submodule(name).router
        choice = getattr(router, "selection_scores", None)
        if choice is None:
            scores.append(record.probs)
        else:
            there = record.map_tensors(lambda field: field.to(model_device(model)))
            scores.append(choice(there).cpu())
    return scores


def margin_values(scores: Tensor, chosen: Tensor) -> tuple[Values, dict[str, float]]:
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


def label_information(
    chosen: Tensor,
    layout: TokenLayout,
    labels: dict[str, Tensor],
    people: np.ndarray | None = None,
) -> tuple[dict[str, LabelInformation], Values]:
    """Return what experts tell of each kind of label of which they see two, and values by image.

    A position is exchanged within its image, every other label with its image's whole map, and with
    all images of the person.
    """
    rows, values = {}, {}
    patches = chosen[:, layout.special :].numpy()
    for name, given in labels.items():
        of_tokens = given.expand(chosen.shape[:2])[:, layout.special :].numpy()
        is_told = (of_tokens >= 0) & patches.any(axis=-1)
        if len(np.unique(of_tokens[is_told])) < 2:
            continue
        if name == "position":
            permuted = permute_positions(of_tokens, PERMUTATIONS, SEED)
        else:
            permuted = permute_images(of_tokens, PERMUTATIONS, SEED, people)
        told = expert_information(patches, of_tokens, permuted, RARE)
        values[f"information_{name}"] = told.excess_by_image / told.label_entropy
        rows[name] = LabelInformation(
            information=told.information,
            chance=told.chance,
            p=told.p,
            normalised=(told.information - told.chance) / told.label_entropy,
        )
        if special := told.specialisation:
            values[f"specialisation_{name}"] = special.excess_by_image
            shares = LabelSpecialisation(
                share=special.share, chance=special.chance, labels=special.labels
            )
            rows[name] = rows[name].model_copy(update={"specialisation": shares})
    return rows, values


def window_consistency(patches: Tensor, windows: Sequence[int]) -> tuple[Values, dict[str, float]]:
    """Return values by image, and the mean by chance, of windows shorter than tokens (N, T, E)."""
    values, chances = {}, {}
    number, length = patches.shape[:2]
    order = np.random.default_rng(SEED).permuted(np.tile(np.arange(length), (number, 1)), axis=1)
    shuffled = patches[torch.arange(number).unsqueeze(-1), torch.from_numpy(order)]
    for window in [window for window in windows if window < length]:
        name = f"consistency_{window}"
        values[name] = consistency_by_image(window_use_histogram(patches, window).numpy())
        uses = window_use_histogram(shuffled, window).sum(dim=0).numpy()
        chances[name] = float(consistency_by_threshold(uses).max())
    return values, chances


def mean_over_layers_with_name(layers: list[Values], name: str) -> np.ndarray:
    """Return the mean over the layers that have the name: all, or all but the first, (N,)."""
    return np.mean([layer[name] for layer in layers if name in layer], axis=0)
