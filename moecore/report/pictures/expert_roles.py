"""Roles of experts: coactivation, similarity, information about tokens, stability over seeds."""

from collections.abc import Iterator, Sequence

import numpy as np

from moecore.measure.routing_metrics import expert_roles
from moecore.measure.values import Found
from moecore.report.column import MetricColumns, column_context
from moecore.report.figures.charts import NUMBERED, Labels, draw_heatmap, percent_annotations
from moecore.report.figures.drawing import Figure
from moecore.report.page.page_objects import Block, method_rows_table
from moecore.report.results import Figures, Pictures
from moecore.report.study_results import Phase
from moecore.report.tables.cells import cell_over_seeds

Pairs = Sequence[Sequence[float | None]]  # (E, E')
SURE = 0.05  # p-value below which a figure marks the information
WORDS = (
    "The experts of two seeds are matched one to one on half of the images and compared on the "
    "others."
)


def figures(result: Found) -> Figures:
    """Yield (name, heatmap): information by layer, then coactivation and similarity per layer."""
    layers = expert_roles.read_layers(result)
    if any(layer.labels for layer in layers):
        yield "expert_information", draw_expert_information(layers)
    for number, layer in enumerate(layers, 1):
        if np.any(layer.together):
            axes = "Also chose expert", "Chose expert"
            caption = "Percent of the tokens that chose the row's expert."
            figure = expert_pair_table(layer.together, f"MoE {number}", axes, caption, 0.005)
            yield f"coactivation_{number}", figure
        if layer.after:  # experts of this layer that tokens chose after each of the previous one
            axes = f"Chose expert in MoE {number}", f"Chose expert in MoE {number - 1}"
            caption = "Percent of the tokens that chose the row's expert a layer earlier."
            title = f"MoE {number - 1} to {number}"
            figure = expert_pair_table(layer.after, title, axes, caption, 0.005)
            yield f"coactivation_{number - 1}_{number}", figure
        if layer.cka:
            caption = "Linear CKA of two experts' outputs for the same tokens, in percent."
            title = f"Similarity, MoE {number}"
            figure = expert_pair_table(layer.cka, title, ("Expert", "Expert"), caption)
            yield f"expert_similarity_{number}", figure


def draw_expert_information(layers: Sequence[expert_roles.RolesLayer]) -> Figure:
    """Draw a heatmap of how much experts reveal about each label of a token, a row per layer."""
    names = [name for name in expert_roles.LABELS if any(name in layer.labels for layer in layers)]
    shares = np.full((len(layers), len(names)), np.nan)
    texts = np.full(shares.shape, "", dtype=object)
    for (row, column), _ in np.ndenumerate(shares):
        label = layers[row].labels.get(names[column])
        if label is not None:
            shares[row, column] = max(0, label.normalised)
            mark = "*" if label.p < SURE else ""
            texts[row, column] = f"{100 * shares[row, column]:.0f}{mark}"
    rows = [f"MoE {number}" for number in range(1, len(layers) + 1)]
    heads = [expert_roles.LABELS[name] for name in names]
    labels = Labels("What an expert tells", rows, heads, "of a token's")
    caption = f"Percent of the label's entropy, above chance. *: p < {SURE}."
    return draw_heatmap(shares, texts, labels, (4.8, 1.3 + 0.35 * len(rows)), caption)


def expert_pair_table(
    pairs: Pairs, title: str, axes: tuple[str, str], caption: str, minimum: float = 0.0
) -> Figure:
    """Draw a heatmap of one share per pair of experts, (E, E'); shares ≥ ``minimum`` as text."""
    values = np.array(pairs, dtype=float)
    texts = percent_annotations(values, minimum, NUMBERED)
    rows, columns = ([str(expert) for expert in range(number)] for number in values.shape)
    return draw_heatmap(values, texts, Labels(title, rows, columns, *axes), (4.8, 4.7), caption)


def seed_table(phase: Phase) -> Iterator[Block]:
    """Yield a block with a table of metrics that compare the experts of a method's seeds."""
    context = column_context(phase, expert_roles.ExpertRoles)
    columns = MetricColumns("routing", expert_roles.ExpertRoles, "roles").columns(context)
    columns = [column for column in columns if column.of_pairs]
    cells = {
        method: {metric.name: cell_over_seeds(metric, list(seeds.values())) for metric in columns}
        for method, seeds in phase.models.items()
    }
    having = {method: row for method, row in cells.items() if all(row.values())}
    if having:
        table = method_rows_table(columns, having)
        yield Block("Do seeds find the same experts?", [WORDS], [table], about="seed_stability")


PICTURES = Pictures("routing.roles", figures, more=seed_table)
