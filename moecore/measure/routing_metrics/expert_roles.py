"""Measure the roles of experts: co-activation, information about labels, similarity."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from moecore.core import arrays_as_text, config, routing_records
from moecore.data.prepared import evenly_spaced_indices
from moecore.measure.base import MeasuredModel, MeasuredPart, Number
from moecore.measure.routing_metrics import choice_patterns, expert_similarity, label_information
from moecore.measure.routing_metrics.interventions import unguided_model
from moecore.measure.routing_metrics.layer_metrics import expert_counts
from moecore.measure.values import Found, Metric, OnPage, Place, Values
from moecore.nn.backbones.base_model import Model
from moecore.nn.encoded_routing import regrid_record
from moecore.nn.predict import model_device
from moecore.statistics.intervals import People, indices_by_person

LABELS = {  # name → label in columns and figures
    "class": "class",
    "position": "position",
    "truth": "truth",
    "word": "word",
    "stop_word": "stop word or not",
    "tissue": "tissue",
    "layer_before": "expert before",
}
MI_NOTE = "mutual information above that of permuted labels / the label's entropy; mean over layers"
SHARE_NOTE = "largest share of a label's tokens that one expert has, above that of permuted labels"
TWO_IMAGES_NOTE = "the same of tokens of two images; mean over layers"
METRICS = {
    **{
        f"information_{name}": Metric(
            f"Experts tell the {label}", "", "share", MI_NOTE, signed=True
        )
        for name, label in LABELS.items()
    },
    **{
        f"information_{name}_p": Metric(
            f"Experts tell the {label}, p",
            note="share of permutations of the labels with as much information; largest of the "
            "layers",
            detail=True,
        )
        for name, label in LABELS.items()
    },
    **{
        f"specialisation_{name}": Metric(
            f"Specialisation by {label}",
            form="share",
            note=f"{SHARE_NOTE}; mean over labels and layers",
            signed=True,
        )
        for name, label in LABELS.items()
    },
    "pair_lift": Metric(
        "Co-activation lift",
        note="P(b | a) / P(b) of the pairs of experts that tokens chose; mean over layers",
        chance="of experts chosen independently at an even load; mean over layers",
        signed=True,
    ),
    "expert_cka": Metric(
        "Similarity of experts, CKA",
        form="share",
        note="linear CKA of two experts' outputs for the same tokens, mean over pairs and layers",
        chance=TWO_IMAGES_NOTE,
        signed=True,
    ),
    "expert_cosine": Metric(
        "Similarity of experts, cosine",
        note="cosine of two experts' outputs for a token, mean over pairs and layers",
        chance=TWO_IMAGES_NOTE,
        signed=True,
    ),
    "margin": Metric(
        "Margin",
        note="lowest score of a chosen expert − highest score of another, in the scores that the "
        "router chooses by (of a trace: probabilities); mean over layers",
        signed=True,
    ),
    "smallest_margin": Metric("Margin, smallest", note="1 % quantile, mean of layers", detail=True),
    "early_choice": Metric(
        "Choice foretold a layer earlier",
        form="share",
        note="share of a token's experts that the layer's router also chooses from the inputs of "
        "the layer before; mean over layers",
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
        "Load foretold, ranks", note="Spearman's ρ of the same; mean over layers", detail=True
    ),
    "early_hottest": Metric(
        "Hottest experts foretold",
        form="share",
        note="of the most used eighth of the experts, the share that both loads have in common; "
        "mean over layers",
        detail=True,
    ),
    "batch_violation": Metric("MaxVio of a batch", note="mean of batches and layers", detail=True),
    "batch_violation_chance": Metric(
        "MaxVio by chance", note="of as many even random choices; mean over layers", detail=True
    ),
    "coverage": Metric(
        "Load of the most used quarter",
        form="share",
        note="share of the choices that go to the most used quarter of experts; mean over layers",
        detail=True,
    ),
    "consistency": Metric(
        "Local consistency, {} tokens",
        form="share",
        note="F1 of the best sets of experts for windows of {} neighbouring tokens; mean over "
        "layers",
        chance="the same with each image's tokens permuted; mean over layers",
        over="window",
        signed=True,
    ),
    "seed_stability": Metric(
        "Stability over seeds",
        note="correlation over tokens of choosing an expert of one seed and its matched expert of "
        "another seed, mean over experts, layers and pairs of seeds",
        of_pairs=lambda ours, theirs: compare_seeds(ours, theirs).correlation,
    ),
    "seed_stability_chance": Metric(
        "Stability over seeds, by chance",
        note="the same with one seed's images permuted",
        detail=True,
        of_pairs=lambda ours, theirs: compare_seeds(ours, theirs).chance,
    ),
    "seed_overlap": Metric(
        "Choices that seeds share",
        form="share",
        note="share of one seed's choices that the other seed also makes, experts matched",
        detail=True,
        of_pairs=lambda ours, theirs: compare_seeds(ours, theirs).overlap,
    ),
}
COVERAGE_PARTS = 4  # "coverage" is the load of the most used 1 / COVERAGE_PARTS of the experts
STORED_TOKENS = 2**13  # per layer, whose experts are stored to compare seeds


class ExpertRoles(MeasuredPart):
    """Settings and metrics of experts' roles: which tokens choose an expert, and with which others.

    information_{label}: mutual information of expert and label above that of permuted labels, over
    the label's entropy. pair_lift: mean P(b | a) / P(b) of chosen pairs; chance: at an even load.
    margin: lowest chosen − highest other score. consistency: F1 of one set of experts for a window
    of tokens. early_*: choices foretold from the layer before. batch_violation: MaxVio of batches.
    """

    metrics = METRICS
    page = OnPage("what experts are for", place=7, about="information_class")

    batch: int = Field(64, ge=1, description="Images per batch for MaxVio of a batch.")
    windows: tuple[Annotated[int, Field(ge=2)], ...] = Field(
        (2, 4, 8), description="Sizes of windows of neighbouring tokens, below the sequence length."
    )

    @classmethod
    def model_refusal(cls, model: Model) -> str | None:
        moe = model.moe
        if moe is None:
            return "a dense model has no experts"
        if not moe.router.chooses_per_token:
            return f"with the router {moe.router.kind} tokens choose no experts"
        return "there is one expert" if moe.experts.number < 2 else None

    def places(self) -> dict[str, Iterable[Place]]:
        return {"window": self.windows}


def put_roles(
    subject: MeasuredModel,
    indices: np.ndarray,
    records: Sequence[routing_records.RoutingRecord],
    tokens: Mapping[str, expert_similarity.LayerTokens],
    early: Mapping[str, list[Tensor]],
    settings: ExpertRoles,
    out: Values,
) -> None:
    """Put ``ExpertRoles.metrics`` as means over layers, and each ``LayerRoles`` in facts.roles."""
    # All are of one pass over the test images with these indices, (N,). tokens, early: what
    # ``store_layer_tokens`` and ``record_choices_from_earlier_layer`` stored.
    test = subject.data.test
    images = np.array(test.images[indices])
    people = test.people_at(indices)
    similarity = [
        expert_similarity.compare_experts(layer_tokens.outputs(len(images)), people)
        for layer_tokens in tokens.values()
    ]
    predicted = [
        expert_similarity.cat_last_calls(parts, len(images)) if parts else None
        for parts in early.values()
    ]
    scores = selection_scores(subject.model, list(early), records)
    labels = torch.from_numpy(np.array(test.labels[indices]))
    classes = label_information.class_label_of_images(subject, labels)
    labels_on_grid = {
        layout: classes | label_information.token_labels_by_name(subject, indices, images, layout)
        for layout in dict.fromkeys(subject.model.layouts)
    }
    layers: list[LayerRoles] = []
    by_image: list[ByImage] = []
    for index, (record, layout) in enumerate(zip(records, subject.model.layouts, strict=True)):
        layer_labels = dict(labels_on_grid[layout])
        inputs = OptionalLayerRoleInputs(
            people, similarity[index], predicted[index], scores=scores[index]
        )
        if index > 0:
            before = regrid_record(records[index - 1], subject.model.layouts[index - 1], layout)
            layer_labels["layer_before"] = routing_records.first_choices(before)
            inputs = inputs._replace(before=before.chosen)
        layer, values = measure_layer_roles(record, layout, layer_labels, settings, inputs)
        layers.append(layer)
        by_image.append(values)
    out.people = people
    # The first layer has no metrics that compare it with the layer before.
    for name in by_image[-1]:
        if all(name in values for values in by_image[1:]):
            metric, at = metric_and_place(name)
            having = [values[name] for values in by_image if name in values]
            out.put(metric, np.mean(having, axis=0), **at)
    put_mean_metrics(layers, out)
    out.facts["roles"] = {"images": len(images), "batch": settings.batch, "layers": layers}


def metric_and_place(name: str, suffix: str = "") -> tuple[str, dict[str, Place]]:
    """Return metric and place: "consistency_2" → ("consistency" + suffix, {"window": 2})."""
    metric, _, window = name.rpartition("_")
    if metric != "consistency":
        return f"{name}{suffix}", {}
    return f"{metric}{suffix}", {"window": int(window)}


def put_mean_metrics(layers: Sequence["LayerRoles"], out: Values) -> None:
    """Put layer means of chances, and of metrics without values per image; layers' largest p."""
    for name in ("smallest_margin", "early_load_rank", "early_hottest", "batch_violation"):
        if values := [layer.values[name] for layer in layers if name in layer.values]:
            out.put(name, sum(values) / len(values))
    for name in dict.fromkeys(name for layer in layers for name in layer.chances):
        values = [layer.chances[name] for layer in layers if name in layer.chances]
        metric, at = metric_and_place(name, "_chance")
        out.put(metric, sum(values) / len(values), **at)
    for name in LABELS:
        if values := [layer.labels[name].p for layer in layers if name in layer.labels]:
            out.put(f"information_{name}_p", max(values))
    shares = [layer.coverage[max(1, len(layer.coverage) // COVERAGE_PARTS) - 1] for layer in layers]
    out.put("coverage", sum(shares) / len(shares))


class LayerRoles(config.Config):
    """Roles of one MoE layer's experts."""

    share: tuple[float, ...]  # of tokens that chose the expert
    together: tuple[tuple[float, ...], ...]  # P(b chosen | a chosen), rows a
    # P(b chosen here | a chosen in the layer before), rows a, and P(a there | b here), rows b
    after: tuple[tuple[float, ...], ...] = ()
    before: tuple[tuple[float, ...], ...] = ()
    labels: dict[str, label_information.LabelInformation]
    values: dict[str, float]
    chances: dict[str, float]
    coverage: tuple[float, ...]  # share of the choices that the m most used experts have
    # similarity of the outputs of experts a and b; () for too few tokens
    cka: tuple[tuple[Number, ...], ...] = ()
    cosine: tuple[tuple[Number, ...], ...] = ()
    kept: expert_similarity.EncodedChoices


def read_layer_roles(result: Found) -> list[LayerRoles]:
    return [LayerRoles.model_validate(layer) for layer in result.facts["roles"]["layers"]]


def read_encoded_choices(result: Found) -> tuple[expert_similarity.EncodedChoices, ...]:
    layers = result.facts["roles"]["layers"]
    return tuple(expert_similarity.EncodedChoices.model_validate(layer["kept"]) for layer in layers)


def compare_seeds(ours: Found, theirs: Found) -> expert_similarity.PairAgreement:
    """Return how far the choices of two seeds' matched experts agree, mean over layers; cached."""
    choices = read_encoded_choices(ours), read_encoded_choices(theirs)
    return expert_similarity.compare_encoded_choices(*choices)


ByImage = dict[str, np.ndarray]  # name → one value per image, (N,)


class OptionalLayerRoleInputs(NamedTuple):
    """Inputs of a layer's analysis in addition to its record; None if not available."""

    people: People = None  # (N,), the person of each image
    similarity: expert_similarity.ExpertSimilarity | None = None
    predicted: Tensor | None = None  # (N, T, E) bool, choices from the tokens of the layer before
    before: Tensor | None = None  # (N, T, E') bool, choices of the tokens in the layer before
    scores: Tensor | None = None  # (N, T, E), that decide the choice; None: the probabilities


def measure_layer_roles(
    record: routing_records.RoutingRecord,
    layout: routing_records.TokenLayout,
    labels: dict[str, Tensor],
    settings: ExpertRoles,
    inputs: OptionalLayerRoleInputs,
) -> tuple[LayerRoles, ByImage]:
    """Return one layer's roles, and metric → values per image, (N,)."""
    # labels: name → (N or 1, T or 1), -1 if unknown; special tokens have none.
    chosen = record.chosen
    counts = expert_counts(chosen)
    tokens = chosen[..., 0].numel()
    experts = len(counts)
    known = (chosen, layout, labels, inputs.people)
    information, by_image = label_information.information_by_label(*known)
    patches = chosen[:, layout.special :]
    consistency, chances = choice_patterns.measure_consistency_by_window(patches, settings.windows)
    by_image |= consistency
    extra = {"batch_violation": choice_patterns.mean_batch_maxvio(chosen, settings.batch)}
    in_batch = round(int(counts.sum()) * min(1, settings.batch / len(chosen)))
    chances["batch_violation"] = choice_patterns.chance_maxvio(in_batch, experts)
    if int(chosen.sum(dim=-1).max()) > 1:
        by_image["pair_lift"] = choice_patterns.mean_pair_lift_by_image(chosen).numpy()
        k = float(counts.sum() / tokens)
        chances["pair_lift"] = (k - 1) * experts / ((experts - 1) * k)
    scores = record.probs if inputs.scores is None else inputs.scores
    margins, smallest = choice_patterns.mean_and_low_quantile_margin(scores, chosen)
    by_image |= margins
    extra |= smallest
    if inputs.predicted is not None:
        early = choice_patterns.choice_predictability(inputs.predicted, chosen)
        for values, early_values in zip((by_image, chances, extra), early, strict=True):
            values |= early_values
    matrices = {}
    if (similarity := inputs.similarity) is not None:
        by_image |= similarity.by_image
        chances |= similarity.chances
        matrices = {"cka": similarity.cka.tolist(), "cosine": similarity.cosine.tolist()}
    if inputs.before is not None:
        matrices["after"] = choice_patterns.layer_transitions(inputs.before, chosen).tolist()
        matrices["before"] = choice_patterns.layer_transitions(chosen, inputs.before).tolist()
    coactivation = choice_patterns.count_coactivation(chosen).sum(dim=0)
    layer = LayerRoles(
        share=(counts / tokens).tolist(),
        together=choice_patterns.conditional_coactivation(coactivation).tolist(),
        labels=information,
        values={name: float(values.mean()) for name, values in by_image.items()} | extra,
        chances=chances,
        coverage=choice_patterns.cumulative_load_shares(counts).tolist(),
        **matrices,
        kept=encode_choice_sample(chosen, inputs.people),
    )
    return layer, by_image


def encode_choice_sample(chosen: Tensor, people: People) -> expert_similarity.EncodedChoices:
    """Return the choices (N, T, E) of some images, evenly spread, to compare seeds."""
    few = evenly_spaced_indices(len(chosen), max(2, STORED_TOKENS // chosen.shape[1]))
    numbers = None
    if people is not None and indices_by_person(people) is not None:
        numbers = np.unique(people, return_inverse=True)[1][few].tolist()
    return expert_similarity.EncodedChoices(
        shape=(len(few), *chosen.shape[1:]),
        bits=arrays_as_text.encode_concatenated_arrays(np.packbits(chosen[few].numpy())),
        people=numbers,
    )


def selection_scores(
    model: Model, layers: Sequence[str], records: Sequence[routing_records.RoutingRecord]
) -> list[Tensor]:
    """Return the scores by which the router of each layer (a module name) chose, (N, T, E)."""
    device = model_device(model)
    scores = []
    for name, record in zip(layers, records, strict=True):
        router = unguided_model(model).get_submodule(name).router
        score_record = getattr(router, "selection_scores", None)
        if score_record is None:
            scores.append(record.probs)
        else:
            scores.append(score_record(record.map_tensors(lambda field: field.to(device))).cpu())
    return scores
