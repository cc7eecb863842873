"""What experts are for: who goes with whom, who is like whom, what they specialise in, how sure.

All from the pass of ``Routing``. N images, T tokens per image, E experts, k chosen per token.
"""

from collections.abc import Iterable, Iterator, Sequence
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
from moecore.measure.base import MeasuredModel, MeasuredPart, Number
from moecore.measure.routing_metrics.barred_experts import find_own_model
from moecore.measure.routing_metrics.choice_patterns import (
    EarlyChoices,
    chance_violation,
    choice_predictability,
    choose_one_layer_early,
    conditional_coactivation,
    count_coactivation,
    cumulative_load_shares,
    follow_up_shares,
    margin_values,
    mean_batch_violation,
    pair_lift_by_image,
    window_consistency,
)
from moecore.measure.routing_metrics.expert_information import (
    LabelInformation,
    label_information,
)
from moecore.measure.routing_metrics.expert_similarity import (
    CountedImages,
    KeptChoices,
    KeptTokens,
    PairAgreement,
    Similarity,
    compare_kept_choices,
    expert_similarity,
    keep_layer_tokens,
)
from moecore.measure.routing_metrics.layer_metrics import expert_counts
from moecore.measure.routing_metrics.token_labels import (
    image_labels_by_kind,
    token_labels_by_kind,
)
from moecore.measure.values import Found, Metric, OnPage, Place, Values
from moecore.nn.backbones.base_model import Model
from moecore.nn.predict import model_device
from moecore.nn.routing_traces import record_on_finer_grid
from moecore.statistics.intervals import indices_by_person

LABELS = {  # name → the words of a column and of a figure
    "class": "class",
    "position": "position",
    "truth": "truth",
    "word": "word",
    "stop_word": "stop word or not",
    "tissue": "tissue",
    "layer_before": "expert before",
}
TELLS = "mutual information above that of permuted labels / the label's entropy; mean over layers"
SPECIAL = "largest share of a label's tokens that one expert has, above that of permuted labels"
TWO_IMAGES = "the same of tokens of two images; mean over layers"
METRICS = {
    **{
        f"information_{name}": Metric(
            f"Experts tell the {words}", "", "share", note=TELLS, signed=True
        )
        for name, words in LABELS.items()
    },
    **{
        f"information_{name}_p": Metric(
            f"Experts tell the {words}, p",
            note="share of permutations of the labels with as much information; largest of the "
            "layers",
            detail=True,
        )
        for name, words in LABELS.items()
    },
    **{
        f"specialisation_{name}": Metric(
            f"Specialisation by {words}",
            "",
            "share",
            note=f"{SPECIAL}; mean over labels and layers",
            signed=True,
        )
        for name, words in LABELS.items()
    },
    "pair_lift": Metric(
        "Co-activation lift",
        note="P(b | a) / P(b) of the pairs of experts that tokens chose; mean over layers",
        chance="of experts chosen independently at an even load; mean over layers",
        signed=True,
    ),
    "expert_cka": Metric(
        "Similarity of experts, CKA",
        "",
        "share",
        note="linear CKA of what two experts make of the same tokens, mean over pairs; mean over "
        "layers",
        chance=TWO_IMAGES,
        signed=True,
    ),
    "expert_cosine": Metric(
        "Similarity of experts, cosine",
        note="cosine of what two experts make of a token, mean over pairs; mean over layers",
        chance=TWO_IMAGES,
        signed=True,
    ),
    "margin": Metric(
        "Margin",
        note="lowest score of a chosen expert − highest of another, by what the router chooses "
        "by (of a trace: probabilities); mean over layers",
        signed=True,
    ),
    "smallest_margin": Metric(
        "Margin, smallest", note="its 1 % quantile over tokens; mean over layers", detail=True
    ),
    "early_choice": Metric(
        "Choice foretold a layer earlier",
        "",
        "share",
        note="of a token's experts those that the layer's router chooses from what came to the "
        "layer before; mean over layers",
        chance="k / number of experts; mean over layers",
        signed=True,
    ),
    "early_load": Metric(
        "Load foretold a layer earlier",
        note="cosine of the experts' loads by these choices and by the layer's own; mean over "
        "layers",
        chance="of an even load; mean over layers",
        signed=True,
    ),
    "early_load_rank": Metric(
        "Load foretold, ranks",
        note="Spearman's correlation of the same; mean over layers",
        detail=True,
    ),
    "early_hottest": Metric(
        "Hottest experts foretold",
        "",
        "share",
        note="of the most used eighth of the experts those that both loads have; mean over layers",
        detail=True,
    ),
    "batch_violation": Metric(
        "MaxVio of a batch", note="mean over batches; mean over layers", detail=True
    ),
    "batch_violation_chance": Metric(
        "MaxVio by chance", note="of as many even random choices; mean over layers", detail=True
    ),
    "coverage": Metric(
        "Load of the most used quarter",
        "",
        "share",
        note="share of the choices that a quarter of the experts has; mean over layers",
        detail=True,
    ),
    "consistency": Metric(
        "Local consistency, {} tokens",
        "",
        "share",
        note="F1 of the best sets of experts for windows of {} neighbouring tokens; mean over "
        "layers",
        chance="the same with each image's tokens exchanged; mean over layers",
        over="window",
        signed=True,
    ),
    "seed_stability": Metric(
        "Stability over seeds",
        note="correlation over tokens of who chose an expert of one seed and its partner of "
        "another, mean over experts, layers and pairs of seeds",
        of_pairs=lambda ours, theirs: compare_seeds(ours, theirs).correlation,
    ),
    "seed_stability_chance": Metric(
        "Stability over seeds, by chance",
        note="the same with one seed's images exchanged",
        detail=True,
        of_pairs=lambda ours, theirs: compare_seeds(ours, theirs).chance,
    ),
    "seed_overlap": Metric(
        "Choices that seeds share",
        "",
        "share",
        note="of one seed's experts those that the other chose too, once matched",
        detail=True,
        of_pairs=lambda ours, theirs: compare_seeds(ours, theirs).overlap,
    ),
}
QUARTER = 4  # of the experts, whose load is told
KEPT = 2**13  # tokens of a layer whose experts are kept, for a comparison of seeds


class ExpertRoles(MeasuredPart):
    """The sizes that some numbers depend on.

    information_{label} is above chance and over the label's entropy, specialisation_{label} less
    its chance. pair_lift: mean of P(b | a) / P(b) over pairs of experts that tokens chose; its
    chance is at an even load. margin: see ``selection_scores``. consistency: F1 of the best sets
    for windows of so many tokens; its chance with the tokens of each image exchanged. expert_cka,
    expert_cosine: of what two make of the same tokens, mean over pairs; their chance of tokens of
    two images. early_choice, early_load, early_load_rank, early_hottest: see
    ``choice_predictability``. batch_violation: the mean MaxVio of batches, beside that of even
    random choices.
    """

    metrics = METRICS
    page = OnPage("what experts are for", place=7, about="information_class")

    batch: int = Field(64, ge=1, description="Images of a batch whose MaxVio is taken.")
    windows: tuple[Annotated[int, Field(ge=2)], ...] = Field(
        (2, 4, 8), description="Neighbouring tokens that share a set of experts; fewer than all."
    )

    @classmethod
    def model_refusal(cls, model: Model) -> str | None:
        """Return why a model's experts have no roles, in words: tokens choose among experts."""
        moe = model.moe
        if moe is None:
            return "a dense model has no experts"
        if not moe.router.chooses_per_token:
            return f"with the router {moe.router.kind} tokens choose no experts"
        return "there is one expert" if moe.experts.number < 2 else None

    def places(self) -> dict[str, Iterable[Place]]:
        """Return the windows."""
        return {"window": self.windows}


class WatchedPass(NamedTuple):
    """What a pass tells beside its records, by the names of the layers."""

    tokens: dict[str, KeptTokens]
    early: dict[str, EarlyChoices]


@contextmanager
def watch_experts(model: Model, images: CountedImages) -> Iterator[WatchedPass]:
    """Keep, of the pass over these images inside, what ``tell_roles`` needs of it."""
    with keep_layer_tokens(model, images) as tokens, choose_one_layer_early(model) as early:
        yield WatchedPass(tokens, early)


def put_roles(
    subject: MeasuredModel,
    where: np.ndarray,
    records: Sequence[RoutingRecord],
    watched: WatchedPass,
    settings: ExpertRoles,
    out: Values,
) -> None:
    """Put means over the layers, with intervals over images; facts.roles: each layer's roles.

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

    layers: list[RolesLayer] = []
    by_image: list[ByImage] = []
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
    out.people = people
    # the first layer has none before it
    for name in [name for name in by_image[-1] if all(name in one for one in by_image[1:])]:
        metric, at = metric_and_place(name)
        out.put(metric, mean_over_layers_with_name(by_image, name), **at)
    put_without_items(layers, out)
    out.facts["roles"] = {"images": len(images), "batch": settings.batch, "layers": layers}


def metric_and_place(name: str, suffix: str = "") -> tuple[str, dict[str, Place]]:
    """Return the metric of a layer's number, followed by ``suffix``, and its place.

    That of consistency_2 is the window of two tokens.
    """
    metric, _, window = name.rpartition("_")
    if metric != "consistency":
        return f"{name}{suffix}", {}
    return f"{metric}{suffix}", {"window": int(window)}


def put_without_items(layers: Sequence["RolesLayer"], out: Values) -> None:
    """Put means over the layers of what has no value an image, and the largest p of each label."""
    for name in ("smallest_margin", "early_load_rank", "early_hottest", "batch_violation"):
        if known := [layer.values[name] for layer in layers if name in layer.values]:
            out.put(name, sum(known) / len(known))
    for name in dict.fromkeys(name for layer in layers for name in layer.chances):
        known = [layer.chances[name] for layer in layers if name in layer.chances]
        metric, at = metric_and_place(name, "_chance")
        out.put(metric, sum(known) / len(known), **at)
    for name in LABELS:
        if known := [layer.labels[name].p for layer in layers if name in layer.labels]:
            out.put(f"information_{name}_p", max(known))
    shares = [layer.coverage[max(1, len(layer.coverage) // QUARTER) - 1] for layer in layers]
    out.put("coverage", sum(shares) / len(shares))


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


def read_layers(result: Found) -> list[RolesLayer]:
    """Return each layer's roles."""
    return [RolesLayer.model_validate(layer) for layer in result.facts["roles"]["layers"]]


def read_kept_choices(result: Found) -> tuple[KeptChoices, ...]:
    """Return the choices that each layer kept."""
    layers = result.facts["roles"]["layers"]
    return tuple(KeptChoices.model_validate(layer["kept"]) for layer in layers)


def compare_seeds(ours: Found, theirs: Found) -> PairAgreement:
    """Return how far two seeds agree; the same two are compared once."""
    return compare_kept_choices(read_kept_choices(ours), read_kept_choices(theirs))


ByImage = dict[str, np.ndarray]  # name → one value an image, (N,)


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
) -> tuple[RolesLayer, ByImage]:
    """Return one layer's roles, and its numbers by image; consistency_2: of windows of two.

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


def mean_over_layers_with_name(layers: list[ByImage], name: str) -> np.ndarray:
    """Return the mean over the layers that have the name: all, or all but the first, (N,)."""
    return np.mean([layer[name] for layer in layers if name in layer], axis=0)
