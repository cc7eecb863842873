"""What routers leave on the table: regret by layer, and what one set for all tokens would gain."""

from collections.abc import Iterator

from moecore.measure.router_regret import Result
from moecore.report.figures.charts import ChartSpec
from moecore.report.measures.result_display import Shown, draw_method_curves, item_mean_column
from moecore.report.page.view import Block
from moecore.report.typed_results import Phase

NOTE = "one token of one layer changes its experts; mean over tokens and layers"


COLUMNS = (
    item_mean_column(
        "router_regret",
        "Router regret",
        "lower",
        note="loss − smallest loss under any set of as many experts, which peeks at the label; "
        + NOTE,
        field="regret",
    ),
    item_mean_column(
        "router_regret_normalised",
        "Router regret, normalised",
        "lower",
        note=f"regret / that of a random set: 0 the best set, 1 as by chance; {NOTE}",
        field="normalised",
    ),
    item_mean_column(
        "better_sets",
        "Better sets",
        "lower",
        "share",
        f"sets of experts with a smaller loss; {NOTE}",
        "better",
    ),
    item_mean_column(
        "fixed_set_gain",
        "Gain of one set for all",
        note="loss − loss under the set that is best on the other half of the images; below 0 "
        f"where routing is better; {NOTE}",
        field="fixed_gain",
    ),
)


def phase_blocks(phase: Phase) -> Iterator[Block]:
    """Yield the normalised regret of each MoE layer, a line per method."""
    look = ChartSpec("Router regret", "MoE layer", "Regret / that of a random set")
    curves = draw_method_curves(
        phase,
        Result,
        lambda result: {
            number: layer.get("normalised") for number, layer in enumerate(result.layers, 1)
        },
        look,
        "0: the best set of experts for a token, which knows the label. 1: as a random set.",
    )
    yield Block("What routers leave on the table", pictures=curves, about="router_regret")


SHOWN = Shown("router_regret", "router regret", Result, COLUMNS, part=phase_blocks, place=8)
