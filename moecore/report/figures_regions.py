"""Figure of the experts that the tokens of each tissue choose: plain data in, a matplotlib Figure out."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from moecore.report.style import new_figure, styled


@styled
def region_shares(rows: Sequence[Mapping[str, Any]], title: str = "Choices by tissue") -> Figure:
    """Share of the tokens of each region (and of its random control) that choose each expert, as a table in colour; ``rows`` of one epoch."""
    experts = list(dict.fromkeys(name for row in rows for name in row["share"]))
    table = np.array([[row["share"].get(name, 0.0) for name in experts] for row in rows])
    figure = new_figure(1.6 + 0.62 * len(experts), 0.9 + 0.36 * len(rows))
    axes = figure.subplots()
    axes.imshow(table, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    axes.grid(visible=False)
    axes.set_xticks(range(len(experts)), experts, fontsize=8.5, rotation=30 if len(experts) > 6 else 0)
    axes.set_yticks(range(len(rows)), [row["region"].replace("random_", "random, as ") for row in rows], fontsize=8.5)
    axes.set(xlabel="Expert", title=title)
    for (row, column), share in np.ndenumerate(table):
        axes.text(column, row, f"{share * 100:.0f}", ha="center", va="center", fontsize=8, color="white" if share > 0.55 else "#1c2733")
    return figure
