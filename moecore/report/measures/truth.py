"""Whether experts are what the data says they should be, on data whose truth is known."""

import numpy as np

from moecore.measure.truth import Result
from moecore.report.column import Column, mean_or_none
from moecore.report.figures.charts import Labels, draw_heatmap, format_shares
from moecore.report.figures.training_figures import row_shares
from moecore.report.measures.result_display import Figures, Shown
from moecore.statistics.intervals import Interval

NOTE = "over test images; mean over MoE layers"
NUMBERED = 20  # dialects: with more, the table has colours only

COLUMNS = (
    Column(
        "purity",
        "Purity",
        lambda result: only_or_mean(
            [Interval(row.purity, row.purity_low, row.purity_high) for row in result.layers]
        ),
        "higher",
        "share",
        f"tokens that are of their expert's most frequent kind, {NOTE}",
    ),
    Column(
        "purity_chance",
        "Purity by chance",
        lambda result: mean_or_none([row.purity_chance for row in result.layers]),
        "",
        "share",
        "the same with the images' truths permuted",
        detail=True,
    ),
    Column(
        "adjusted_mutual_information",
        "AMI of expert and truth",
        lambda result: mean_or_none([row.adjusted for row in result.layers]),
        "higher",
        note=f"adjusted mutual information, 0 by chance and 1 if equal, {NOTE}",
    ),
    Column(
        "normalised_mutual_information",
        "NMI of expert and truth",
        lambda result: mean_or_none([row.normalised for row in result.layers]),
        "higher",
        note=f"mutual information / mean entropy, {NOTE}",
        detail=True,
    ),
    Column(
        "matched_to_truth",
        "Matched to the truth",
        lambda result: mean_or_none([row.matched for row in result.layers]),
        "higher",
        "share",
        f"tokens that are right under the best one-to-one matching of experts and kinds, {NOTE}",
    ),
)


def only_or_mean(rows: list[Interval]) -> Interval | float | None:
    """Return the only layer's interval; of several, the mean of their values."""
    if len(rows) == 1:
        return rows[0]
    return mean_or_none([row.value for row in rows])


def figures(result: Result) -> Figures:
    """Yield a table for each MoE layer: which kinds each expert sees."""
    for index, row in enumerate(result.layers, 1):
        shares = row_shares(row.counts)
        texts = format_shares(shares, 0.005)
        if shares.shape[1] > NUMBERED:
            texts = np.full(shares.shape, "")
        columns = [str(kind + 1) for kind in range(shares.shape[1])]
        labels = Labels(f"MoE {index}", (), columns, "Kind of token", "Expert, best matched first")
        caption = "Percent of each expert's tokens."
        yield f"truth_{index}", draw_heatmap(shares, texts, labels, (4.8, 4.7), caption)


SHOWN = Shown("truth", "experts and truth", Result, COLUMNS, figures, place=7)
