"""What experts are for: who is chosen with whom, what they tell of a token, how sure and steady."""

from collections.abc import Iterator, Sequence

import numpy as np
from matplotlib.figure import Figure

from moecore.measure.expert_roles import ExpertRoles, Result, RolesLayer
from moecore.report.column import Column, ContextDependentColumns, PlannedPhase, mean_or_none
from moecore.report.figures.charts import Labels, draw_heatmap, percent_annotations
from moecore.report.measures.result_display import (
    Figures,
    Shown,
    first_seed_pictures,
    items_reader,
)
from moecore.report.measures.seed_stability import stability_blocks
from moecore.report.page.view import Block
from moecore.report.typed_results import Phase, drop_none

NUMBERED = 20  # experts: with more, the table has colours only
QUARTER = 4  # of the experts, whose load is shown
LABELS = {  # name → the words of a column and of a figure
    "class": "class",
    "position": "position",
    "truth": "truth",
    "word": "word",
    "layer_before": "expert before",
}
TELLS = "mutual information with it above that of permuted labels, as a share of its entropy"


def mean_with_items(
    name: str, label: str, better: str = "", form: str = "number", note: str = ""
) -> Column:
    """Return the column of a value that the result has under this name, with its items."""
    return Column(
        name,
        label,
        lambda result: result.values.get(name),
        better,
        form,
        f"{note}; mean over layers",
        items=items_reader(name),
    )


def layer_mean(
    name: str, label: str, form: str = "number", note: str = "", better: str = ""
) -> Column:
    """Return the detailed column of a number of every layer, their mean."""
    return Column(
        name,
        label,
        lambda result: mean_or_none(drop_none(getattr(layer, name) for layer in result.layers)),
        better,
        form,
        f"{note}; mean over layers",
        detail=True,
    )


def most_used_load(result: Result) -> float | None:
    """Return the share of the choices that the most used quarter of the experts has."""
    return mean_or_none(
        [layer.coverage[max(1, len(layer.coverage) // QUARTER) - 1] for layer in result.layers]
    )


def window_columns(windows: Sequence[int]) -> list[Column]:
    """Return the local consistency in windows of each length, and by chance."""
    columns = []
    for length in windows:
        note = f"F1 of the best sets of experts for windows of {length} neighbouring tokens"
        name, label = f"consistency_{length}", f"Local consistency, {length} tokens"
        columns.append(mean_with_items(name, label, "", "share", note))
        columns.append(
            Column(
                f"{name}_chance",
                f"{label}, by chance",
                lambda result, length=length: mean_or_none(
                    [
                        row.chance
                        for layer in result.layers
                        for row in layer.windows
                        if row.length == length
                    ]
                ),
                form="share",
                note="the same with each image's tokens exchanged; mean over layers",
                detail=True,
            )
        )
    return columns


def measured_windows(results: Sequence[Result]) -> list[int]:
    """Return the windows that any result has, in order."""
    rows = [row for result in results for layer in result.layers for row in layer.windows]
    return sorted({row.length for row in rows})


def planned_windows(ahead: PlannedPhase) -> list[str]:
    """Return the names of their columns."""
    settings = ahead.study.expert_roles or ExpertRoles()
    return [column.name for column in window_columns(settings.windows)]


COLUMNS = (
    *(
        mean_with_items(f"information_{name}", f"Experts tell the {words}", "", "share", TELLS)
        for name, words in LABELS.items()
    ),
    mean_with_items(
        "pair_lift", "Co-activation lift", note="P(b | a) / P(b) of the pairs of experts chosen"
    ),
    layer_mean("pair_lift_chance", "Lift at an even load", note="experts chosen independently"),
    mean_with_items(
        "margin", "Margin", note="lowest probability of a chosen expert − highest of another"
    ),
    layer_mean("smallest_margin", "Margin, smallest", note="its 1 % quantile over tokens"),
    layer_mean("batch_violation", "MaxVio of a batch", note="mean over batches", better="lower"),
    layer_mean("batch_violation_chance", "MaxVio by chance", note="of as many even random choices"),
    Column(
        "coverage",
        "Load of the most used quarter",
        most_used_load,
        form="share",
        note="share of the choices that a quarter of the experts has; mean over layers",
        detail=True,
    ),
    ContextDependentColumns(
        lambda seen: window_columns(measured_windows(seen.results)),
        planned_windows,
        "share",
    ),
)


def figures(result: Result) -> Figures:
    """Yield what experts tell, by layer, and of each layer of k ≥ 2 who is chosen with whom."""
    if any(layer.labels for layer in result.layers):
        yield "expert_information", information_table(result.layers)
    for number, layer in enumerate(result.layers, 1):
        if layer.pair_lift is not None:
            yield f"coactivation_{number}", coactivation_table(layer, f"MoE {number}")


def information_table(layers: Sequence[RolesLayer]) -> Figure:
    """Draw what experts tell of each label, a row a layer."""
    names = [name for name in LABELS if any(name in layer.labels for layer in layers)]
    told = np.full((len(layers), len(names)), np.nan)
    for (row, column), _ in np.ndenumerate(told):
        if names[column] in layers[row].labels:
            told[row, column] = max(0, layers[row].labels[names[column]].normalised)
    rows = [f"MoE {number}" for number in range(1, len(layers) + 1)]
    labels = Labels("What an expert tells", rows, [LABELS[name] for name in names], "of a token's")
    caption = "Percent of the label's entropy, above chance."
    return draw_heatmap(
        told, percent_annotations(told), labels, (4.8, 1.3 + 0.35 * len(rows)), caption
    )


def coactivation_table(layer: RolesLayer, title: str) -> Figure:
    """Draw which experts a token chose beside each expert."""
    together = np.array(layer.together)
    texts = percent_annotations(together, 0.005)
    if len(together) > NUMBERED:
        texts = np.full(together.shape, "")
    experts = [str(expert) for expert in range(len(together))]
    labels = Labels(title, experts, experts, "Also chose expert", "Chose expert")
    caption = "Percent of the tokens that chose the row's expert."
    return draw_heatmap(together, texts, labels, (4.8, 4.7), caption)


def phase_blocks(phase: Phase) -> Iterator[Block]:
    """Yield every method's figures, and whether its seeds find the same experts."""
    drawn = first_seed_pictures(phase, Result, figures)
    yield Block("What experts are for", pictures=drawn, about="information_class")
    yield from stability_blocks(phase)


SHOWN = Shown(
    "expert_roles", "what experts are for", Result, COLUMNS, figures, phase_blocks, place=7
)
