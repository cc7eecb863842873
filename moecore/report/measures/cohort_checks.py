"""Errors with one tissue left, whether predictions follow age and ignore the scan, and what region
experts know.
"""

from collections.abc import Callable, Iterator
from typing import Literal

import numpy as np
from matplotlib.figure import Figure

from moecore.measure.cohort_checks import Ageing, Result, TissueErrors
from moecore.report.column import Column, Metric, decode_items
from moecore.report.figures.drawing import GUIDE, legend_of, line_look, new_figure, styled
from moecore.report.measured import Phase
from moecore.report.measures.region_blocks import GENERALISATION, TISSUES, generalised, mixtures
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
Read = Callable[[Result], Interval | None]


def whole(result: Result) -> TissueErrors:
    return result.whole


def tissue(name: str) -> Callable[[Result], TissueErrors | None]:
    """The errors with one tissue left."""
    return lambda result: (result.isolated or {}).get(name)


def of_model(errors: Callable[[Result], TissueErrors | None]) -> Read:
    """The model's own error."""

    def read(result: Result) -> Interval | None:
        error = errors(result)
        return None if error is None else Interval(error.mae, error.low, error.high)

    return read


def of_probe(errors: Callable[[Result], TissueErrors | None]) -> Read:
    """The linear probe's error."""

    def read(result: Result) -> Interval | None:
        error = errors(result)
        if error is None:
            return None
        return Interval(error.probe_mae, error.probe_low, error.probe_high)

    return read


def items_of(
    errors: Callable[[Result], TissueErrors | None], name: Literal["items", "probe_items"]
) -> Callable[[Result], np.ndarray | None]:
    """One error a person, of the model or of the probe."""

    def read(result: Result) -> np.ndarray | None:
        error = errors(result)
        return None if error is None else decode_items(getattr(error, name))

    return read


def over(more: str, less: str) -> Read:
    """Years by which the probe errs more on one tissue alone than on another."""

    def read(result: Result) -> Interval | None:
        for row in result.order or ():
            if (row.more, row.less) == (more, less):
                return Interval(row.difference, row.low, row.high)
        return None

    return read


def rescan(result: Result) -> Interval | None:
    """Years between the predictions for two scans of a subject."""
    scans = result.rescan
    return None if scans is None else Interval(scans.mean_abs_difference, scans.low, scans.high)


def of_ageing(name: str) -> Callable[[Result], float | None]:
    """A number of the simulated subjects that age."""
    return lambda result: None if result.ageing is None else getattr(result.ageing, name)


COLUMNS = (
    *(
        Column(
            f"isolated_{name}",
            f"MAE, {name.upper()} alone",
            of_model(tissue(name)),
            "lower",
            note=LEFT,
            paper="ages",
            items=items_of(tissue(name), "items"),
        )
        for name in TISSUES
    ),
    *(
        Column(
            f"probe_{name}",
            f"MAE, {name.upper()} alone, probe",
            of_probe(tissue(name)),
            "lower",
            note=PROBED,
            paper="ages",
            items=items_of(tissue(name), "probe_items"),
        )
        for name in TISSUES
    ),
    *(
        Column(
            f"{more}_over_{less}",
            f"{more.upper()} − {less.upper()}, probe",
            over(more, less),
            note=f"years by which the probe errs more on {words}",
            paper="ages",
        )
        for (more, less), words in ORDER.items()
    ),
    Column(
        "monotone",
        "Ageing, rising steps",
        of_ageing("monotone_share"),
        "higher",
        "share",
        "steps from one age to the next in which the prediction for the same simulated subject "
        "rises",
        "ages",
    ),
    Column(
        "ageing_rank",
        "Ageing, rank correlation",
        of_ageing("rank_correlation"),
        "higher",
        note="of age and prediction",
        paper="ages",
    ),
    Column(
        "rescan",
        "Rescan, years apart",
        rescan,
        "lower",
        note="mean |difference| of two scans of one subject",
        paper="ages",
    ),
    *GENERALISATION,
)


def figures(result: Result) -> Figures:
    """The same simulated subjects as they age."""
    if result.ageing is not None:
        yield "ageing", ageing_curves(result.ageing)


def part(phase: Phase) -> Iterator[Block]:
    """Tissues alone, ageing, rescans, region experts, and what could not be checked."""
    reasons: dict[str, str] = {}
    each_mixture = []
    for method, result in phase.first(Result).items():
        reasons |= result.reasons
        if result.generalisation is not None:
            each_mixture.append(mixtures(result.generalisation, method))
    grid = tissues(phase)
    probed = grid is not None and any(name.endswith(", probe") for name in grid.columns)
    tried = generalised(phase)
    if tried is not None:
        reasons.pop("generalisation", None)  # that of the methods without region experts
        yield Block(
            "Region experts where they were not taught",
            words=[f"Mixtures: of one model each.{phase.first_seed}"],
            grids=[tried, *each_mixture],
            folded=True,
            about="whole_over_chance",
        )
    yield Block(
        "Tissues alone, ageing, rescans",
        words=[f"Probe: {PROBE}."] if probed else [],
        grids=[] if grid is None else [grid],
        pictures=each_method(phase, Result, figures),
        below=[f"Not checked, {name}: {reason}." for name, reason in reasons.items()],
        folded=True,
        about="isolated_gm",
    )


def tissues(phase: Phase) -> Grid | None:
    """Errors with one tissue left, of the model and of a linear probe; the rescans' difference."""
    errors = {"Whole volume": whole}
    errors |= {f"{words} alone": tissue(name) for name, words in TISSUES.items()}
    reads = {words: of_model(read) for words, read in errors.items()}
    reads |= {f"{words}, probe": of_probe(read) for words, read in errors.items()}
    reads |= {f"{more.upper()} − {less.upper()}, probe": over(more, less) for more, less in ORDER}
    reads["Rescan, years apart"] = rescan
    metrics = {words: Metric(Column(words, words, read), Result) for words, read in reads.items()}
    having = {
        words: metric
        for words, metric in metrics.items()
        if any(metric.read(model) for model in phase.every)
    }
    if not having:
        return None
    columns = [
        format_column(
            metric.column,
            [read_cell(metric, list(seeds.values())) for seeds in phase.models.values()],
        )
        for metric in having.values()
    ]
    lines = [
        Line(Item(method), [column[row] for column in columns])
        for row, method in enumerate(phase.models)
    ]
    return Grid(["MAE, years", *having], lines)


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
