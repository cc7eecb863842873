"""Errors with one tissue left, whether predictions follow age and ignore the scan, and what region
experts know.
"""

from collections.abc import Callable, Iterator

import numpy as np
from matplotlib.figure import Figure

from moecore.measure.cohort_checks import Ageing, Result, TissueErrors
from moecore.report.column import Column, Metric, decode_items
from moecore.report.figures.drawing import GUIDE, legend_of, line_look, new_figure, styled
from moecore.report.measured import Phase
from moecore.report.measures.region_blocks import (
    GENERALISATION,
    TISSUES,
    generalisation_table,
    mixture_table,
)
from moecore.report.measures.shown import Figures, each_method
from moecore.report.page.rows import format_column
from moecore.report.page.view import Block, Grid, Item, Line
from moecore.report.tables.cells import read_cell
from moecore.statistics.intervals import Interval

ORDER = {
    ("gm", "csf"): "grey matter alone than on fluid alone",
    ("wm", "gm"): "white matter alone than on grey matter alone",
}  # (more, less)
PROBE = (
    "a linear probe: a new linear head, fitted on such volumes of the training split, reads age "
    "from a model that stays as it is"
)
LEFT = "MAE in years where only this tissue is left of a volume"
PROBED = (
    f"{LEFT}, of {PROBE}; a model may be far off on such volumes, and still know much of age from "
    "them"
)
PROBED_PART = "probe_"  # before the names of the probe's numbers in a result
Read = Callable[[Result], Interval | None]


def tissue_errors(result: Result, tissue: str | None) -> TissueErrors | None:
    """The errors with one tissue left, or on whole volumes (None)."""
    return result.whole if tissue is None else (result.isolated or {}).get(tissue)


def read_error(tissue: str | None, part: str = "") -> Read:
    """Read the error of the model itself ("") or of the probe."""

    def read(result: Result) -> Interval | None:
        errors = tissue_errors(result, tissue)
        if errors is None:
            return None
        return Interval(*(getattr(errors, part + name) for name in ("mae", "low", "high")))

    return read


def read_tissue_items(tissue: str, part: str) -> Callable[[Result], np.ndarray | None]:
    """Read one error per person, of the model itself ("") or of the probe."""
    return lambda result: decode_items(getattr(tissue_errors(result, tissue), f"{part}items", None))


def read_difference(more: str, less: str) -> Read:
    """Read by how many years the probe errs more on one tissue alone than on another."""

    def read(result: Result) -> Interval | None:
        for row in result.order or ():
            if (row.more, row.less) == (more, less):
                return Interval(row.difference, row.low, row.high)
        return None

    return read


def read_rescan(result: Result) -> Interval | None:
    """Years between the predictions for two scans of a subject."""
    if (scans := result.rescan) is None:
        return None
    return Interval(scans.mean_abs_difference, scans.low, scans.high)


COLUMNS = (
    *(
        Column(
            f"{name}_{tissue}",
            f"MAE, {tissue.upper()} alone{words}",
            read_error(tissue, part),
            "lower",
            note=note,
            paper="ages",
            items=read_tissue_items(tissue, part),
        )
        for name, words, part, note in (
            ("isolated", "", "", LEFT),
            ("probe", ", probe", PROBED_PART, PROBED),
        )
        for tissue in TISSUES
    ),
    *(
        Column(
            f"{more}_over_{less}",
            f"{more.upper()} − {less.upper()}, probe",
            read_difference(more, less),
            note=f"years by which the probe errs more on {words}",
            paper="ages",
        )
        for (more, less), words in ORDER.items()
    ),
    Column(
        "monotone",
        "Ageing, rising steps",
        lambda result: result.ageing and result.ageing.monotone_share,
        "higher",
        "share",
        "steps from one age to the next in which the prediction for the same simulated subject "
        "rises",
        "ages",
    ),
    Column(
        "ageing_rank",
        "Ageing, rank correlation",
        lambda result: result.ageing and result.ageing.rank_correlation,
        "higher",
        note="of age and prediction",
        paper="ages",
    ),
    Column(
        "rescan",
        "Rescan, years apart",
        read_rescan,
        "lower",
        note="mean |difference| of two scans of one subject",
        paper="ages",
    ),
    *GENERALISATION,
)


def figures(result: Result) -> Figures:
    """Draw the same simulated subjects as they age."""
    if result.ageing is not None:
        yield "ageing", ageing_curves(result.ageing)


def part(phase: Phase) -> Iterator[Block]:
    """Tissues alone, ageing, rescans, region experts, and what could not be checked."""
    results = phase.first(Result)
    reasons = {name: why for one in results.values() for name, why in one.reasons.items()}
    tried = generalisation_table(phase)
    if tried is not None:
        reasons.pop("generalisation", None)  # that of the methods without region experts
        each_mixture = [
            mixture_table(result.generalisation, method)
            for method, result in results.items()
            if result.generalisation is not None
        ]
        yield Block(
            "Region experts where they were not taught",
            words=[f"Mixtures: of one model each.{phase.first_seed}"],
            grids=[tried, *each_mixture],
            folded=True,
            about="whole_over_chance",
        )
    grids = [] if not results else [tissue_table(phase)]
    yield Block(
        "Tissues alone, ageing, rescans",
        words=[f"Probe: {PROBE}."] * len(grids),
        grids=grids,
        pictures=each_method(phase, Result, figures),
        below=[f"Not checked, {name}: {reason}." for name, reason in reasons.items()],
        folded=True,
        about="isolated_gm",
    )


def tissue_table(phase: Phase) -> Grid:
    """Errors with one tissue left, of the model and of a linear probe; the rescans' difference."""
    left = {"Whole volume": None} | {f"{words} alone": name for name, words in TISSUES.items()}
    reads = {words: read_error(tissue) for words, tissue in left.items()}
    reads |= {f"{words}, probe": read_error(tissue, PROBED_PART) for words, tissue in left.items()}
    reads |= {
        f"{more.upper()} − {less.upper()}, probe": read_difference(more, less)
        for more, less in ORDER
    }
    reads["Rescan, years apart"] = read_rescan
    columns = {}
    for words, read in reads.items():
        metric = Metric(Column(words, words, read), Result)
        cells = [read_cell(metric, list(seeds.values())) for seeds in phase.models.values()]
        if any(metric.read(model) for model in phase.every):
            columns[words] = format_column(metric.column, cells)
    lines = [
        Line(Item(method), [column[row] for column in columns.values()])
        for row, method in enumerate(phase.models)
    ]
    return Grid(["MAE, years", *columns], lines)


@styled
def ageing_curves(ageing: Ageing) -> Figure:
    """Predicted age over age, one line per subject, with the identity."""
    figure = new_figure(4.4, 4.0, f"Rising steps: {ageing.monotone_share:.0%}.")
    axes = figure.subplots()
    ends = [ageing.ages[0], ageing.ages[-1]]
    axes.plot(ends, ends, color=GUIDE, linewidth=1, linestyle=":", label="identity")
    look = {"color": line_look(0)["color"], "linewidth": 0.8, "alpha": 0.6}
    for row in ageing.predictions:
        axes.plot(ageing.ages, row, marker="o", markersize=2, **look)
    axes.set(xlabel="Age in years", ylabel="Predicted age in years")
    axes.set_title("Simulated subjects, aged")
    legend_of(figure, axes)
    return figure
