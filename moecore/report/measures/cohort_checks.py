"""Errors with one tissue left; ages of shells and rescans; what region experts know."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from matplotlib.figure import Figure

from moecore.measure.cohort_checks import Ageing, MeanAgeErrors, Result
from moecore.report.column import Column, decode_items
from moecore.report.figures.drawing import (
    GUIDE,
    add_legend_below,
    empty_figure,
    line_look,
    styled_drawing,
)
from moecore.report.measures.region_experts import (
    GENERALISATION,
    TISSUES,
    mixture_table,
    region_experts_by_volume_kind,
)
from moecore.report.measures.result_display import Figures, Shown, first_seed_pictures, path_reader
from moecore.report.page.rows import cells_of_methods
from moecore.report.page.view import NONE, Block, PageCell, PageTable, TableRow
from moecore.report.typed_results import Phase, list_without_none
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
WHOLE = ""  # instead of a tissue's name: nothing is left out


def tissue_error_reader(name: str, read: Callable[[MeanAgeErrors], Any]) -> Callable[[Result], Any]:
    """Return what reads the errors with one tissue left; None where they were not measured."""

    def read_errors(result: Result) -> Any:
        errors = {WHOLE: result.whole, **(result.isolated or {})}.get(name)
        return None if errors is None else read(errors)

    return read_errors


def isolated_tissue_mae(errors: MeanAgeErrors) -> Interval:
    return Interval(errors.mae, errors.low, errors.high)


def probe_error(errors: MeanAgeErrors) -> Interval:
    return Interval(errors.probe_mae, errors.probe_low, errors.probe_high)


ERRORS = {  # name → label, what reads them, one error per person, note
    "isolated": ("", isolated_tissue_mae, lambda errors: decode_items(errors.items), LEFT),
    "probe": (", probe", probe_error, lambda errors: decode_items(errors.probe_items), PROBED),
}


def probe_tissue_difference_reader(more: str, less: str) -> Callable[[Result], Interval | None]:
    """Years by which the probe errs more on one tissue alone than on another."""

    def read(result: Result) -> Interval | None:
        rows = [row for row in result.order or () if (row.more, row.less) == (more, less)]
        return next((Interval(row.difference, row.low, row.high) for row in rows), None)

    return read


def rescan_change(result: Result) -> Interval | None:
    scans = result.rescan
    return None if scans is None else Interval(scans.mean_abs_difference, scans.low, scans.high)


age_column = partial(Column, paper="ages")
COLUMNS = (
    *(
        age_column(
            f"{kind}_{name}",
            f"MAE, {name.upper()} alone{end}",
            tissue_error_reader(name, read),
            "lower",
            note=note,
            items=tissue_error_reader(name, items),
        )
        for kind, (end, read, items, note) in ERRORS.items()
        for name in TISSUES
    ),
    *(
        age_column(
            f"{more}_over_{less}",
            f"{more.upper()} − {less.upper()}, probe",
            probe_tissue_difference_reader(more, less),
            note=f"years by which the probe errs more on {words}",
        )
        for (more, less), words in ORDER.items()
    ),
    age_column(
        "monotone",
        "Ageing, rising steps",
        path_reader("ageing.monotone_share"),
        "higher",
        "share",
        "steps from one age to the next in which the prediction for the same simulated subject "
        "rises",
    ),
    age_column(
        "ageing_rank",
        "Ageing, rank correlation",
        path_reader("ageing.rank_correlation"),
        "higher",
        note="of age and prediction",
    ),
    age_column(
        "rescan",
        "Rescan, years apart",
        rescan_change,
        "lower",
        note="mean |difference| of two scans of one subject",
    ),
    *GENERALISATION,
)


def figures(result: Result) -> Figures:
    if result.ageing is not None:
        yield "ageing", ageing_curves(result.ageing)


def phase_blocks(phase: Phase) -> Iterator[Block]:
    """Tissues alone, ageing, rescans, region experts, and what could not be checked."""
    reasons: dict[str, str] = {}
    each_mixture = []
    for method, result in phase.first(Result).items():
        reasons |= result.reasons
        if result.generalisation is not None:
            each_mixture.append(mixture_table(result.generalisation, method))
    grid = tissue_error_table(phase)
    probed = grid is not None and any(name.endswith(", probe") for name in grid.columns)
    tried = region_experts_by_volume_kind(phase)
    if tried is not None:
        reasons.pop("generalisation", None)  # that of the methods without region experts
        yield Block(
            "Region experts where they were not taught",
            words=[f"Mixtures: of one model each.{phase.first_seed}"],
            grids=[tried, *each_mixture],
            about="whole_over_chance",
        )
    yield Block(
        "Tissues alone, ageing, rescans",
        words=[f"Probe: {PROBE}."] if probed else [],
        grids=list_without_none([grid]),
        pictures=first_seed_pictures(phase, Result, figures),
        below=[f"Not checked, {name}: {reason}." for name, reason in reasons.items()],
        about="isolated_gm",
    )


def tissue_error_table(phase: Phase) -> PageTable | None:
    """Errors with one tissue left, of the model and of a linear probe; the rescans' difference."""
    names = {"Whole volume": WHOLE} | {f"{words} alone": name for name, words in TISSUES.items()}
    reads = {
        f"{words}{end}": tissue_error_reader(name, read)
        for end, read, *_ in ERRORS.values()
        for words, name in names.items()
    }
    reads |= {
        f"{more.upper()} − {less.upper()}, probe": probe_tissue_difference_reader(more, less)
        for more, less in ORDER
    }
    reads["Rescan, years apart"] = rescan_change
    columns = {words: Column(words, words, read) for words, read in reads.items()}
    cells = {
        words: cells_of_methods(column, Result, phase.models) for words, column in columns.items()
    }
    having = {words: items for words, items in cells.items() if set(items) != {NONE}}
    if not having:
        return None
    lines = [
        TableRow(PageCell(method), items)
        for method, *items in zip(phase.models, *having.values(), strict=True)
    ]
    return PageTable(["MAE, years", *having], lines)


@styled_drawing
def ageing_curves(ageing: Ageing) -> Figure:
    """Predicted age over age, one line per subject, with the identity."""
    figure = empty_figure(4.4, 4.0, f"Rising steps: {ageing.monotone_share:.0%}.")
    axes = figure.subplots()
    ends = [ageing.ages[0], ageing.ages[-1]]
    axes.plot(ends, ends, color=GUIDE, linewidth=1, linestyle=":", label="identity")
    look = {"color": line_look(0)["color"], "linewidth": 0.8, "alpha": 0.6}
    for row in ageing.predictions:
        axes.plot(ageing.ages, row, marker="o", markersize=2, **look)
    axes.set(xlabel="Age in years", ylabel="Predicted age in years")
    axes.set_title("Simulated subjects, aged")
    add_legend_below(figure, axes)
    return figure


SHOWN = Shown(
    "cohort_checks", "checks on the cohort", Result, COLUMNS, figures, phase_blocks, place=16
)
