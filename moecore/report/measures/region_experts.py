"""Which expert answers for which tissue (figure S1)."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from matplotlib.figure import Figure

from moecore.report.column import Column, mean_or_none
from moecore.report.figures.charts import Labels, draw_heatmap, percent_annotations
from moecore.report.page.view import NONE, Block, PageCell, PageTable, Picture, TableRow
from moecore.report.typed_results import Phase, list_without_none
from moecore.training.outcome import EpochTissueRouting, Outcome, TissueRoutingRow

# What region experts are named after.
TISSUES = {"wm": "White matter", "gm": "Grey matter", "csf": "CSF"}
CONTROL = "random_"  # before a tissue's name: random masks of its size

WORDS = (
    "For each tissue the two experts with the highest mean score over its tokens, at three epochs. "
    "Control: as many tokens drawn at random from the brain. An expert knows its tissue where its "
    "share of the tokens is well above the control's."
)


def own_expert_share_reader(prefix: str) -> Callable[[Outcome], float | None]:
    """Mean share of a tissue's tokens that choose the expert of the same name, at the last epoch.

    prefix: "" for the tissues themselves, CONTROL for random masks of their size. None where no
    expert has a tissue's name.
    """

    def read(result: Outcome) -> float | None:
        shares = {row.region: row.share for row in last_probe_rows(result)}
        own = (shares.get(prefix + tissue, {}).get(tissue) for tissue in TISSUES)
        return mean_or_none(list_without_none(own))

    return read


def last_probe_rows(result: Outcome) -> Sequence[TissueRoutingRow]:
    """The rows at the last epoch; () where there is no probe."""
    if not result.region_routing:
        return ()
    return max(result.region_routing, key=lambda probe: probe.epoch).rows


def own_expert_above_chance(result: Outcome) -> float | None:
    """Return how much more often than by chance."""
    own = own_expert_share_reader("")(result)
    control = own_expert_share_reader(CONTROL)(result)
    return None if own is None or control is None else own - control


COLUMNS = (
    Column(
        "own_expert",
        "Own expert",
        own_expert_share_reader(""),
        "higher",
        "share",
        "tokens of a region that choose the expert of that region, mean over wm, gm, csf",
        "ages",
    ),
    Column(
        "own_expert_random",
        "Own expert, random masks",
        own_expert_share_reader(CONTROL),
        form="share",
        note="the same share under random masks of that size",
        paper="ages",
    ),
    Column(
        "own_expert_gain",
        "Own expert − random",
        own_expert_above_chance,
        "higher",
        note="above 0: experts know their tissue",
        paper="ages",
    ),
)


def phase_blocks(phase: Phase) -> Iterator[Block]:
    """The two best experts of each tissue at three epochs, and the choices at the last."""
    probed = {
        method: result.region_routing
        for method, result in phase.first(Outcome).items()
        if result.region_routing
    }
    grids = [tissue_experts_by_epoch(probes, method) for method, probes in probed.items()]
    drawn = [
        Picture(
            region_share_heatmap(max(probes, key=lambda probe: probe.epoch).rows),
            f"{phase.name}: regions of {method}",
            f"{method}. Last epoch, percent of the tokens.",
        )
        for method, probes in probed.items()
    ]
    yield Block(
        "Which expert answers for which tissue",
        [WORDS + phase.first_seed],
        grids,
        drawn,
        about="own_expert_gain",
    )


def tissue_experts_by_epoch(probes: Sequence[EpochTissueRouting], method: str) -> PageTable:
    """A row per tissue, two columns per epoch."""
    columns = ["Tissue"]
    for probe in probes:
        columns += [f"Epoch {probe.epoch}", "Control"]
    rows = [row.region.removeprefix(CONTROL) for probe in probes for row in probe.rows]
    lines = []
    for region in dict.fromkeys(rows):
        items = []
        for probe in probes:
            of_region = {row.region: row for row in probe.rows}
            items += [
                tissue_experts_cell(of_region.get(prefix + region)) for prefix in ("", CONTROL)
            ]
        lines.append(TableRow(PageCell(TISSUES.get(region, region)), items))
    return PageTable(columns, lines, title=method)


def tissue_experts_cell(row: TissueRoutingRow | None) -> PageCell:
    """The experts with their scores, and the share of the tokens that choose them."""
    if row is None:
        return NONE
    experts = "\n".join(f"{name} {score:.3f}" for name, score in row.experts)
    shares = [f"{row.share[name]:.0%}" for name, _ in row.experts if name in row.share]
    return PageCell(experts, f"chosen by {', '.join(shares)}" if shares else "", look="lines")


def region_share_heatmap(rows: Sequence[TissueRoutingRow]) -> Figure:
    """Share of the tokens of each tissue, and of its control, that choose each expert."""
    experts = list(dict.fromkeys(name for row in rows for name in row.share))
    table = np.array([[row.share.get(name, 0.0) for name in experts] for row in rows])
    names = [row.region.replace(CONTROL, "random, as ") for row in rows]
    labels = Labels("Choices by tissue", names, experts, "Expert", slanted=len(experts) > 6)
    size = (1.6 + 0.62 * len(experts), 0.9 + 0.36 * len(rows))
    return draw_heatmap(table, percent_annotations(table), labels, size)
