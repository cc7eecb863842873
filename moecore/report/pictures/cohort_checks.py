"""Errors with single tissues, simulated ageing and rescans, accuracy of region experts."""

from collections.abc import Iterator, Mapping
from operator import methodcaller
from typing import Any

import numpy as np

from moecore.measure.cohort_checks import CohortChecks
from moecore.measure.probes.ageing_and_rescans import rising_step_share
from moecore.measure.trained import TISSUES
from moecore.measure.values import Found
from moecore.report.column import Column
from moecore.report.figures import drawing
from moecore.report.figures.drawing import Figure
from moecore.report.page.page_objects import NONE, Block, PageCell, PageTable, TableRow, list_cells
from moecore.report.results import Figures, Pictures, first_seed_pictures
from moecore.report.study_results import Models, Phase, list_without_none
from moecore.report.tables.cells import NumberFormat

PROBE = (
    "Probe: a new linear head that predicts age from the frozen model, fitted on such volumes of "
    "the training split."
)
ERRORS = {  # label → metric
    "Whole volume": "whole_mae",
    **{f"{label} alone": f"isolated_{name}" for name, label in TISSUES.items()},
    "Whole volume, probe": "whole_probe_mae",
    **{f"{label} alone, probe": f"probe_{name}" for name, label in TISSUES.items()},
    "GM − CSF, probe": "gm_over_csf",
    "WM − GM, probe": "wm_over_gm",
    "Rescan, years apart": "rescan",
}
WHOLE_PERCENTS = NumberFormat("share", 0)
GENERALISED = (
    "Share of tokens whose first region expert is the expert of the cube's most frequent tissue. "
    "Isolated volumes of the training's generator were taught, so their row is no finding; the "
    "other rows were not taught. Chance: the same decisions against the person's cubes in another "
    "order, the best fixed answer, and the decisions against other people's cubes of the same "
    "places, which experts that depend only on the place reach, too."
)
TRIED = {  # label → volumes
    "Isolated, as taught": "isolated",
    "Two tissues mixed": "mixed",
    "Whole volumes": "whole",
    "Other generator, isolated": "other_generator_isolated",
    "Other generator, whole": "other_generator",
}
NUMBERS = {
    "agreement": "Agreement",
    "permuted": "Cubes permuted",
    "over_chance": "Agreement − permuted",
    "fixed": "Best fixed answer",
    "same_place": "Same place, other person",
}


def figures(result: Found) -> Figures:
    if ageing := result.facts.get("ageing"):
        yield "ageing", draw_ageing(ageing)


def cohort_blocks(phase: Phase) -> Iterator[Block]:
    """Yield blocks: region experts on other volumes; single tissues, ageing and rescans."""
    reasons: dict[str, str] = {}
    mixtures = []
    for method, result in phase.first(CohortChecks).items():
        reasons |= result.facts["not_checked"]
        if result.find("whole_agreement"):
            mixtures.append(mixture_table(result, method))
    if tried := region_experts_by_volume_kind(phase):
        reasons.pop("generalisation", None)  # the reason of methods without region experts
        title = "Region experts where they were not taught"
        notes = [f"Mixtures: one model per method.{phase.first_seed}"]
        yield Block(title, notes, [tried, *mixtures], about="whole_over_chance")
    grid = tissue_error_table(phase)
    probed = grid is not None and any(name.endswith(", probe") for name in grid.columns)
    notes = [PROBE] if probed else []
    pictures = first_seed_pictures(phase, CohortChecks, figures)
    below = [f"Not checked, {name}: {reason}." for name, reason in reasons.items()]
    block = Block("Tissues alone, ageing, rescans", notes, list_without_none([grid]), pictures)
    yield block._replace(below=below, about="isolated_gm")


def metric_cells(models: Models, metric: str, form: str = "number") -> list[PageCell]:
    read = methodcaller("interval", metric)
    return list_cells(Column(metric, metric, read, form=form, kind=CohortChecks), models)


def tissue_error_table(phase: Phase) -> PageTable | None:
    """Return a table of errors in years per method (``ERRORS``); None if none was measured."""
    cells = {label: metric_cells(phase.models, metric) for label, metric in ERRORS.items()}
    having = {label: items for label, items in cells.items() if set(items) != {NONE}}
    if not having:
        return None
    rows = zip(phase.models, *having.values(), strict=True)
    lines = [TableRow(PageCell(method), items) for method, *items in rows]
    return PageTable(["MAE, years", *having], lines)


def region_experts_by_volume_kind(phase: Phase) -> PageTable | None:
    """Return a table of region experts' agreement per method and volumes; None without any."""
    lines = []
    measured = phase.of(CohortChecks)
    for method, seeds in phase.models.items():
        if not any(result.find("whole_agreement") for result in measured[method]):
            continue
        lines.append(TableRow(PageCell(method), look="group"))
        for label, volumes in TRIED.items():
            items = []
            for number in NUMBERS:
                form = "number" if number == "over_chance" else "share"
                items += metric_cells({method: seeds}, f"{volumes}_{number}", form)
            lines.append(TableRow(PageCell(label), items))
    if not lines:
        return None
    return PageTable(["First region expert", *NUMBERS.values()], lines, below=GENERALISED)


def mixture_table(result: Found, method: str) -> PageTable:
    """Return a table of agreement: a row per pair of tissues, a column per share of the second."""
    shares = result.all("mixture_agreement")
    chances = result.all("mixture_permuted")
    remaining: list[Any] = sorted({value.at["left"] for value in shares})
    items: dict[str, list[PageCell]] = {}
    for share, chance in zip(shares, chances, strict=True):
        pair = " with ".join(str(share.at[name]).upper() for name in ("whole", "thinned"))
        note = f"chance {WHOLE_PERCENTS.value(chance.value)}"
        items.setdefault(pair, []).append(PageCell(WHOLE_PERCENTS.value(share.value), note))
    lines = [TableRow(PageCell(pair), of_pair) for pair, of_pair in items.items()]
    heads = [f"{WHOLE_PERCENTS.value(value)} of the second" for value in remaining]
    number = NumberFormat("number", 2)
    text = "Rank correlation of a tissue's share of a cube and its expert's score"
    for volumes, label in {"whole": "whole volumes", "other_generator": "other generator"}.items():
        ranks = [
            f"{str(value.at['tissue']).upper()} {number.value(value.value)}"
            for value in result.all("expert_correlation")
            if value.at["volumes"] == volumes
        ]
        text += f"; {label}: {', '.join(ranks) or 'none'}"
    return PageTable(["Mixture", *heads], lines, title=method, below=f"{text}.")


@drawing.styled_drawing
def draw_ageing(ageing: Mapping[str, Any]) -> Figure:
    """Draw predicted age over simulated age, a line per subject, and the identity."""
    ages, predictions = ageing["ages"], ageing["predictions"]
    rising = rising_step_share(np.array(predictions))
    figure = drawing.empty_figure(4.4, 4.0, f"Rising steps: {rising:.0%}.")
    axes = figure.subplots()
    ends = [ages[0], ages[-1]]
    axes.plot(ends, ends, color=drawing.GUIDE, linewidth=1, linestyle=":", label="identity")
    style = {"color": drawing.line_look(0)["color"], "linewidth": 0.8, "alpha": 0.6}
    for row in predictions:
        axes.plot(ages, row, marker="o", markersize=2, **style)
    axes.set(xlabel="Age in years", ylabel="Predicted age in years")
    axes.set_title("Simulated subjects, aged")
    drawing.add_legend_below(figure, axes)
    return figure


PICTURES = Pictures("cohort_checks", figures, is_on_page=False, more=cohort_blocks)
