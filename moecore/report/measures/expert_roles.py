"""What experts are for: who is chosen with whom, who is like whom, what they tell of a token."""

from collections.abc import Iterator, Sequence

import numpy as np
from matplotlib.figure import Figure

from moecore.measure.routing import Result as Routing
from moecore.measure.routing_metrics.expert_roles import Result, RolesLayer, roles_refusal
from moecore.report.column import Column, ContextDependentColumns, PlannedPhase, mean_or_none
from moecore.report.figures.charts import Labels, draw_heatmap, percent_annotations
from moecore.report.measures.result_display import (
    Figures,
    PartOf,
    Shown,
    first_seed_pictures,
    item_mean_column,
)
from moecore.report.measures.seed_stability import COLUMNS as STABILITY_COLUMNS
from moecore.report.measures.seed_stability import stability_blocks
from moecore.report.page.view import Block
from moecore.report.typed_results import Phase, list_without_none

NUMBERED = 20  # experts: with more, the table has colours only
QUARTER = 4  # of the experts, whose load is shown
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
SURE = 0.05  # p of what experts tell, below which a figure marks it
WINDOW = "consistency_"


def layer_mean_column(name: str, label: str, form: str, note: str, kind: str = "values") -> Column:
    """Return the detailed column of a number of every layer, values or chances: their mean."""
    own = name.removesuffix("_chance")

    def read(result: Result) -> float | None:
        return mean_or_none(
            list_without_none(getattr(layer, kind).get(own) for layer in result.layers)
        )

    return Column(name, label, read, form=form, note=f"{note}; mean over layers", detail=True)


def value_and_chance_columns(
    name: str, label: str, form: str, note: str, chance: str
) -> list[Column]:
    """Return the column of a value with its items, and that of what chance gives."""
    return [
        item_mean_column(name, label, "", form, f"{note}; mean over layers"),
        layer_mean_column(f"{name}_chance", f"{label}, by chance", form, chance, "chances"),
    ]


def largest_p_column(name: str, words: str) -> Column:
    """Return the detailed column of the p of what experts tell of a label, the layers' largest."""

    def read(result: Result) -> float | None:
        return max(
            (layer.labels[name].p for layer in result.layers if name in layer.labels), default=None
        )

    note = "share of permutations of the labels with as much information; largest of the layers"
    label = f"Experts tell the {words}, p"
    return Column(f"information_{name}_p", label, read, form="number", note=note, detail=True)


def local_consistency_columns(windows: Sequence[int]) -> list[Column]:
    """Return the local consistency in windows of each length, and by chance."""
    note = "F1 of the best sets of experts for windows of {} neighbouring tokens"
    return [
        column
        for length in windows
        for column in value_and_chance_columns(
            f"consistency_{length}",
            f"Local consistency, {length} tokens",
            "share",
            note.format(length),
            "the same with each image's tokens exchanged",
        )
    ]


def measured_windows(results: Sequence[Result]) -> list[int]:
    """Return the lengths of windows that any result has, in order."""
    names = {name for result in results for name in result.values if name.startswith(WINDOW)}
    return sorted(int(name.removeprefix(WINDOW)) for name in names)


def planned_consistency_names(ahead: PlannedPhase) -> list[str]:
    """Return the names of their columns."""
    windows = ahead.study.routing.roles.windows
    return [column.name for column in local_consistency_columns(windows)]


COLUMNS = (
    *(
        item_mean_column(f"information_{name}", f"Experts tell the {words}", "", "share", TELLS)
        for name, words in LABELS.items()
    ),
    *(largest_p_column(name, words) for name, words in LABELS.items()),
    *(
        item_mean_column(
            f"specialisation_{name}",
            f"Specialisation by {words}",
            "",
            "share",
            f"{SPECIAL}; mean over labels and layers",
        )
        for name, words in LABELS.items()
    ),
    *value_and_chance_columns(
        "pair_lift",
        "Co-activation lift",
        "number",
        "P(b | a) / P(b) of the pairs of experts that tokens chose",
        "of experts chosen independently at an even load",
    ),
    *value_and_chance_columns(
        "expert_cka",
        "Similarity of experts, CKA",
        "share",
        "linear CKA of what two experts make of the same tokens, mean over pairs",
        "the same of tokens of two images",
    ),
    *value_and_chance_columns(
        "expert_cosine",
        "Similarity of experts, cosine",
        "number",
        "cosine of what two experts make of a token, mean over pairs",
        "the same of tokens of two images",
    ),
    item_mean_column(
        "margin",
        "Margin",
        note="lowest score of a chosen expert − highest of another, by what the router chooses "
        "by (of a trace: probabilities); mean over layers",
    ),
    layer_mean_column(
        "smallest_margin", "Margin, smallest", "number", "its 1 % quantile over tokens"
    ),
    *value_and_chance_columns(
        "early_choice",
        "Choice foretold a layer earlier",
        "share",
        "of a token's experts those that the layer's router chooses from what came to the layer "
        "before",
        "k / number of experts",
    ),
    *value_and_chance_columns(
        "early_load",
        "Load foretold a layer earlier",
        "number",
        "cosine of the experts' loads by these choices and by the layer's own",
        "of an even load",
    ),
    layer_mean_column(
        "early_load_rank", "Load foretold, ranks", "number", "Spearman's correlation of the same"
    ),
    layer_mean_column(
        "early_hottest",
        "Hottest experts foretold",
        "share",
        "of the most used eighth of the experts those that both loads have",
    ),
    layer_mean_column("batch_violation", "MaxVio of a batch", "number", "mean over batches"),
    layer_mean_column(
        "batch_violation_chance",
        "MaxVio by chance",
        "number",
        "of as many even random choices",
        "chances",
    ),
    Column(
        "coverage",
        "Load of the most used quarter",
        lambda result: mean_or_none(
            [layer.coverage[max(1, len(layer.coverage) // QUARTER) - 1] for layer in result.layers]
        ),
        form="share",
        note="share of the choices that a quarter of the experts has; mean over layers",
        detail=True,
    ),
    ContextDependentColumns(
        lambda seen: local_consistency_columns(measured_windows(seen.results)),
        planned_consistency_names,
        "share",
    ),
    *STABILITY_COLUMNS,
)


def figures(result: Result) -> Figures:
    """Yield what experts tell, by layer, and of each layer who is chosen with whom (where k ≥ 2),
    who after whom of the layer before, and who is like whom.
    """
    if any(layer.labels for layer in result.layers):
        yield "expert_information", draw_expert_information(result.layers)
    for number, layer in enumerate(result.layers, 1):
        if np.any(layer.together):
            yield f"coactivation_{number}", draw_coactivation(layer, f"MoE {number}")
        if layer.after:
            name = f"coactivation_{number - 1}_{number}"
            yield name, draw_follow_ups(layer.after, number)
        if layer.cka:
            yield f"expert_similarity_{number}", similarity_table(layer, f"MoE {number}")


def draw_expert_information(layers: Sequence[RolesLayer]) -> Figure:
    """Draw what experts tell of each label, a row a layer."""
    names = [name for name in LABELS if any(name in layer.labels for layer in layers)]
    told = np.full((len(layers), len(names)), np.nan)
    texts = np.full(told.shape, "", dtype=object)
    for (row, column), _ in np.ndenumerate(told):
        label = layers[row].labels.get(names[column])
        if label is not None:
            told[row, column] = max(0, label.normalised)
            texts[row, column] = f"{100 * told[row, column]:.0f}{'*' * (label.p < SURE)}"
    rows = [f"MoE {number}" for number in range(1, len(layers) + 1)]
    labels = Labels("What an expert tells", rows, [LABELS[name] for name in names], "of a token's")
    caption = f"Percent of the label's entropy, above chance. *: p < {SURE}."
    return draw_heatmap(told, texts, labels, (4.8, 1.3 + 0.35 * len(rows)), caption)


def draw_coactivation(layer: RolesLayer, title: str) -> Figure:
    """Draw which experts a token chose beside each expert."""
    caption = "Percent of the tokens that chose the row's expert."
    return expert_pair_table(
        layer.together, title, ("Also chose expert", "Chose expert"), caption, 0.005
    )


def draw_follow_ups(after: Sequence[Sequence[float]], number: int) -> Figure:
    """Draw which experts of a layer of this number tokens chose after each of the one before."""
    axes = f"Chose expert in MoE {number}", f"Chose expert in MoE {number - 1}"
    caption = "Percent of the tokens that chose the row's expert a layer earlier."
    return expert_pair_table(after, f"MoE {number - 1} to {number}", axes, caption, 0.005)


def similarity_table(layer: RolesLayer, title: str) -> Figure:
    """Draw how alike what two experts make of the same tokens is."""
    caption = "Linear CKA of what two experts make of the same tokens, in percent."
    return expert_pair_table(layer.cka, f"Similarity, {title}", ("Expert", "Expert"), caption)


def expert_pair_table(
    pairs: Sequence[Sequence[float | None]],
    title: str,
    axes: tuple[str, str],
    caption: str,
    least: float = 0.0,
) -> Figure:
    """Draw a share for each pair of experts, (E, E'), as percent from ``least`` on."""
    values = np.array(pairs, dtype=float)
    texts = percent_annotations(values, least)
    if max(values.shape) > NUMBERED:
        texts = np.full(values.shape, "")
    rows, columns = ([str(expert) for expert in range(number)] for number in values.shape)
    return draw_heatmap(values, texts, Labels(title, rows, columns, *axes), (4.8, 4.7), caption)


def phase_blocks(phase: Phase) -> Iterator[Block]:
    """Yield every method's figures, and whether its seeds find the same experts."""
    drawn = first_seed_pictures(phase, Result, figures)
    yield Block("What experts are for", pictures=drawn, about="information_class")
    yield from stability_blocks(phase)


SHOWN = Shown(
    "routing",
    "what experts are for",
    Result,
    COLUMNS,
    figures,
    phase_blocks,
    place=7,
    within=PartOf(Routing, "roles", roles_refusal),
)
