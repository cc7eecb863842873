"""What experts are for: who is chosen with whom, who is like whom, what they tell of a token.

And whether the seeds of a method find the same experts.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from matplotlib.figure import Figure

from moecore.measure.routing_metrics.expert_roles import (
    LABELS,
    ExpertRoles,
    RolesLayer,
    read_layers,
)
from moecore.measure.values import Found
from moecore.report.column import MetricColumns, column_context
from moecore.report.figures.charts import Labels, draw_heatmap, percent_annotations
from moecore.report.page.view import Block, method_rows_table
from moecore.report.results import Figures, Pictures
from moecore.report.tables.cells import cell_over_seeds
from moecore.report.typed_results import Phase

NUMBERED = 20  # experts: with more, the table has colours only
SURE = 0.05  # p of what experts tell, below which a figure marks it
WORDS = (
    "The experts of two seeds are matched one to one on half of the images and compared on the "
    "others."
)


def figures(result: Found) -> Figures:
    """Yield what experts tell, by layer, and of each layer who is chosen with whom (where k ≥ 2),
    who after whom of the layer before, and who is like whom.
    """
    layers = read_layers(result)
    if any(layer.labels for layer in layers):
        yield "expert_information", draw_expert_information(layers)
    for number, layer in enumerate(layers, 1):
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


def seed_table(phase: Phase) -> Iterator[Block]:
    """Yield a table of the methods of which several seeds kept their choices."""
    every = MetricColumns("routing", ExpertRoles, "roles").columns(
        column_context(phase, ExpertRoles)
    )
    columns = [column for column in every if column.of_pairs]
    cells = {
        method: {metric.name: cell_over_seeds(metric, list(seeds.values())) for metric in columns}
        for method, seeds in phase.models.items()
    }
    having = {method: row for method, row in cells.items() if all(row.values())}
    if having:
        table = method_rows_table(columns, having)
        title = "Do seeds find the same experts?"
        yield Block(title, [WORDS], [table], about="seed_stability")


PICTURES = Pictures("routing.roles", figures, more=seed_table)
