"""Which expert answers for which tissue, as the trainings of region experts saw it (figure S1)."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from matplotlib.figure import Figure

from moecore.report.charts import Labels, heat_table, texts_of
from moecore.report.column import Column, mean
from moecore.report.measured import Phase
from moecore.report.view import NONE, Block, Grid, Item, Line, Picture
from moecore.training.outcome import Outcome, Probed, RegionRow

# What region experts are named after.
TISSUES = {"wm": "White matter", "gm": "Grey matter", "csf": "CSF"}
CONTROL = "random_"  # before a tissue's name: random masks of its size

WORDS = (
    "For each tissue the two experts with the highest mean score over its tokens, at three epochs. "
    "Control: as many tokens drawn at random from the brain. An expert knows its tissue where its "
    "share of the tokens is well above the control's."
)


def own_expert(prefix: str) -> Callable[[Outcome], float | None]:
    """Mean share of a tissue's tokens that choose the expert of the same name, at the last epoch.

    prefix: "" for the tissues themselves, CONTROL for random masks of their size. None where no
    expert has a tissue's name.
    """

    def read(result: Outcome) -> float | None:
        shares = {row.region: row.share for row in last_probe(result)}
        own = [shares.get(prefix + tissue, {}).get(tissue) for tissue in TISSUES]
        return mean([share for share in own if share is not None])

    return read


def last_probe(result: Outcome) -> Sequence[RegionRow]:
    """The rows at the last epoch; () where there is no probe."""
    if not result.region_routing:
        return ()
    return max(result.region_routing, key=lambda probe: probe.epoch).rows


def gain(result: Outcome) -> float | None:
    """How much more often than by chance."""
    own = own_expert("")(result)
    control = own_expert(CONTROL)(result)
    return None if own is None or control is None else own - control


COLUMNS = (
    Column(
        "own_expert",
        "Own expert",
        own_expert(""),
        "higher",
        "share",
        "tokens of a region that choose the expert of that region, mean over wm, gm, csf",
        "ages",
    ),
    Column(
        "own_expert_random",
        "Own expert, random masks",
        own_expert(CONTROL),
        form="share",
        note="the same share under random masks of that size",
        paper="ages",
    ),
    Column(
        "own_expert_gain",
        "Own expert − random",
        gain,
        "higher",
        note="above 0: experts know their tissue",
        paper="ages",
    ),
)


def part(phase: Phase) -> Iterator[Block]:
    """The two best experts of each tissue at three epochs, and the choices at the last."""
    probed = {
        method: result.region_routing
        for method, result in phase.first(Outcome).items()
        if result.region_routing
    }
    grids = [table_of(probes, method) for method, probes in probed.items()]
    drawn = [
        Picture(
            region_shares(max(probes, key=lambda probe: probe.epoch).rows),
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
        folded=True,
        about="own_expert_gain",
    )


def table_of(probes: Sequence[Probed], method: str) -> Grid:
    """A row a tissue, two columns an epoch."""
    columns = ["Tissue"]
    for probe in probes:
        columns += [f"Epoch {probe.epoch}", "Control"]
    rows = [row.region.removeprefix(CONTROL) for probe in probes for row in probe.rows]
    lines = []
    for region in dict.fromkeys(rows):
        items = []
        for probe in probes:
            of_region = {row.region: row for row in probe.rows}
            items += [top_two(of_region.get(prefix + region)) for prefix in ("", CONTROL)]
        lines.append(Line(Item(TISSUES.get(region, region)), items))
    return Grid(columns, lines, title=method)


def top_two(row: RegionRow | None) -> Item:
    """The experts with their scores, and the share of the tokens that choose them."""
    if row is None:
        return NONE
    experts = "\n".join(f"{name} {score:.3f}" for name, score in row.experts)
    shares = [f"{row.share[name]:.0%}" for name, _ in row.experts if name in row.share]
    return Item(experts, f"chosen by {', '.join(shares)}" if shares else "", look="lines")


def region_shares(rows: Sequence[RegionRow]) -> Figure:
    """Share of the tokens of each tissue, and of its control, that choose each expert."""
    experts = list(dict.fromkeys(name for row in rows for name in row.share))
    table = np.array([[row.share.get(name, 0.0) for name in experts] for row in rows])
    names = [row.region.replace(CONTROL, "random, as ") for row in rows]
    labels = Labels("Choices by tissue", names, experts, "Expert", slanted=len(experts) > 6)
    size = (1.6 + 0.62 * len(experts), 0.9 + 0.36 * len(rows))
    return heat_table(table, texts_of(table), labels, size)
