"""Which expert answers for which tissue (figure S1)."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from matplotlib.figure import Figure

from moecore.measure.cohort_checks import Result as CohortChecks
from moecore.measure.probes.region_experts_on_new_data import RegionExpertResult
from moecore.report.column import Column, mean_or_none
from moecore.report.figures.charts import Labels, draw_heatmap, percent_annotations
from moecore.report.measures.result_display import path_reader
from moecore.report.page.rows import cells_of_methods
from moecore.report.page.view import NONE, Block, PageCell, PageTable, Picture, TableRow
from moecore.report.tables.number_format import NumberFormat
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

WHOLE_PERCENTS = NumberFormat("share", 0)
FIRST = "tokens whose first region expert is that of the tissue most of the cube is"
NOTE = f"{FIRST}; on isolated volumes experts follow the labels they were taught: no finding"
LESS = (
    "the same, less what is expected with the person's cubes (of all mixtures) in another order; "
    "at 0 the experts do not tell them apart"
)
GENERALISED = (
    f"Share of {FIRST}. On isolated volumes of the own generator this was taught, and is no "
    "finding; nothing else in the table was. Chance: the same decisions against the person's cubes "
    "in another order, the best answer that is the same everywhere, and the decisions against "
    "other people's cubes of the same places, which experts that go by the place reach too."
)
TRIED = {  # words → where it lies in the result
    "Isolated, as taught": "test.isolated",
    "Two tissues mixed": "mixed",
    "Whole volumes": "test.whole",
    "Other generator, isolated": "other.isolated",
    "Other generator, whole": "other.whole",
}
NUMBERS = {
    "share": "Agreement",
    "permuted": "Cubes permuted",
    "over_chance": "Agreement − permuted",
    "fixed": "Best fixed answer",
    "same_place": "Same place, other person",
}


def agreement_columns(name: str, label: str, path: str) -> tuple[Column, Column]:
    """The agreement, and by how much it is above chance."""
    share = path_reader(f"generalisation.{path}.share")
    over = path_reader(f"generalisation.{path}.over_chance")
    label = f"Own tissue, {label}"
    return (
        Column(f"{name}_agreement", label, share, "higher", "share", NOTE, "ages"),
        Column(f"{name}_over_chance", f"{label} − chance", over, "higher", "number", LESS, "ages"),
    )


GENERALISATION = (
    *agreement_columns("mixed", "two tissues mixed", "mixed"),
    *agreement_columns("whole", "whole volumes", "test.whole"),
    *agreement_columns("other_generator", "another generator's whole volumes", "other.whole"),
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


def region_experts_by_volume_kind(phase: Phase) -> PageTable | None:
    """A group of rows for each method with region experts, a row per sort of volumes."""
    lines = []
    for method, seeds in phase.models.items():
        results = phase.of(CohortChecks)[method]
        if not any(result.generalisation for result in results):
            continue
        lines.append(TableRow(PageCell(method), look="group"))
        for words, path in TRIED.items():
            items = []
            for name, label in NUMBERS.items():
                form = {"over_chance": "number"}.get(name, "share")
                read = path_reader(f"generalisation.{path}.{name}")
                column = Column(name, label, read, form=form)
                items += cells_of_methods(column, CohortChecks, {method: seeds})
            lines.append(TableRow(PageCell(words), items))
    if not lines:
        return None
    return PageTable(["First region expert", *NUMBERS.values()], lines, below=GENERALISED)


def mixture_table(result: RegionExpertResult, method: str) -> PageTable:
    """One model: a row per pair of tissues, a column per share that is left of the second."""
    lefts = sorted({row.left for row in result.mixtures})
    rows = {(row.whole, row.thinned, row.left): row.found for row in result.mixtures}
    lines = []
    for whole, thinned in dict.fromkeys(key[:2] for key in rows):
        of_pair = [rows[whole, thinned, left] for left in lefts]
        items = [
            PageCell(
                WHOLE_PERCENTS.value(one.share.value),
                f"chance {WHOLE_PERCENTS.value(one.permuted)}",
            )
            for one in of_pair
        ]
        lines.append(TableRow(PageCell(f"{whole.upper()} with {thinned.upper()}"), items))
    heads = [f"{WHOLE_PERCENTS.value(left)} left of the second" for left in lefts]
    two_decimals = NumberFormat("number", 2)
    below = "Rank correlation of a tissue's share of a cube and its expert's score"
    for name, volumes in {"whole volumes": result.test, "other generator": result.other}.items():
        ranks = getattr(volumes, "correlation", {})
        values = [
            f"{tissue.upper()} {two_decimals.value(rank.value)}" for tissue, rank in ranks.items()
        ]
        below += f"; {name}: {', '.join(values) or 'none'}"
    return PageTable(["Mixture", *heads], lines, title=method, below=f"{below}.")


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
