"""Pictures of training: curves, routing agreement, confusions, and experts of tissues."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from moecore.measure.base import SkipReason, read_result
from moecore.measure.training import (
    RANDOM_MASK_PREFIX,
    TISSUES,
    Trained,
    collect_outcome_values,
    get_outcome,
)
from moecore.measure.values import Found
from moecore.report import column, result_types
from moecore.report.figures import charts, drawing, model_figures
from moecore.report.figures.model_figures import draw_expert_grids_by_class
from moecore.report.page import page_objects
from moecore.report.results_and_displays import Figures, Pictures, first_seed_pictures
from moecore.training.outcome import EpochTissueRouting, Outcome, TissueRoutingRow

MAX_LISTED_CONFUSIONS = 10  # confusions of a method with many classes
TISSUE_NOTE = (
    "For each tissue the two experts with the highest mean score over its tokens, at three epochs. "
    "Control: equally many random tokens of the brain. An expert knows its tissue if its "
    "share of the tokens is well above the control's."
)


def figures(result: Found) -> Figures:
    outcome = get_outcome(result)
    if outcome.curve:
        yield "training_curves", model_figures.draw_training_curves({"": [outcome]})
    if outcome.confusion is not None:
        classes = outcome.task.classes
        yield ("confusion_matrix", model_figures.draw_confusion_matrix(outcome.confusion, classes))
    yield from draw_class_routing_over_epochs(result)


def draw_class_routing_over_epochs(result: Found) -> Figures:
    outcome = get_outcome(result)
    rows = {
        f"epoch {epoch}": [layers[-1] for layers in classes]
        for epoch, classes in outcome.class_maps.items()
    }
    if rows:
        classes = outcome.task.classes
        yield "class_maps", draw_expert_grids_by_class(rows, classes, "Last MoE layer.")


def training_blocks(phase: result_types.PhaseResults) -> Iterator[page_objects.PageBlock]:
    outcomes = phase.outcomes
    if any(outcome.curve for seeds in outcomes.values() for outcome in seeds):
        chart = model_figures.draw_training_curves(outcomes)
        caption = "One line per seed." if phase.seeds > 1 else ""
        picture = page_objects.Picture(chart, f"{phase.name}: training", caption)
        score = f"test_{column.score_slug(phase.task.score)}"
        yield page_objects.PageBlock("Training", pictures=[picture], about=score)
    yield agreement_block(phase)
    warnings = []
    for method, seeds in phase.models.items():
        for seed, outcome in ((seed, model.outcome) for seed, model in seeds.items()):
            lines = () if outcome is None else outcome.routing_warnings
            warnings += [f"{method}, seed {seed}: {line}." for line in lines]
    finding = f"warnings while training: {len(warnings)}"
    title = "Experts without tokens, loads that collapsed"
    yield page_objects.PageBlock(title, below=warnings, finding=finding)
    yield from tissue_blocks(phase)
    maps = first_seed_pictures(phase, Trained, draw_class_routing_over_epochs)
    finding = model_figures.describe_strongest_preference(phase.first_outcomes)
    yield page_objects.PageBlock("Which class goes to which expert", pictures=maps, finding=finding)
    yield confusion_block(phase)


def agreement_block(phase: result_types.PhaseResults) -> page_objects.PageBlock:
    curves = {}
    points = model_figures.agreement_points
    for name in model_figures.AGREEMENTS:
        curves[name] = {method: points(seeds, name) for method, seeds in phase.outcomes.items()}
    title = "How the routing settles"
    if not any(any(points.values()) for points in curves.values()):
        return page_objects.PageBlock(title)
    caption = (
        "Share of tokens with the same first expert as at the end, and as one epoch before; "
        "saturation: share of a token's final experts. Mean over MoE layers. "
        f"{charts.interval_caption(phase.outcomes)}"
    )
    chart = model_figures.draw_routing_agreement(curves)
    picture = page_objects.Picture(chart, f"{phase.name}: agreement", caption)
    return page_objects.PageBlock(title, pictures=[picture], about="agreement_with_final")


def confusion_block(phase: result_types.PhaseResults) -> page_objects.PageBlock:
    counts = {method: result.confusion for method, result in phase.first_outcomes.items()}
    shares = model_figures.normalise_rows
    tables = {name: shares(table) for name, table in counts.items() if table is not None}
    if not tables:
        return page_objects.PageBlock("")
    classes = phase.task.answers
    below = "Percent of each true class." + phase.seed_note
    tiles = [
        confusion_table(shares, classes)._replace(title=method, below=below)
        for method, shares in tables.items()
    ]
    finding = "no test image was taken for another class"
    worst = next(list_confusions(np.mean(list(tables.values()), axis=0)), None)
    if worst is not None:
        share, true, predicted = worst
        over = ", mean over methods" if len(tables) > 1 else ""
        pair = f"{classes[true]} is taken for {classes[predicted]}"
        finding = f"{pair} most often ({100 * share:.0f} %{over})"
    return page_objects.PageBlock("Confusion of classes", tiles=tiles, finding=finding)


def confusion_table(shares: np.ndarray, classes: Sequence[str]) -> page_objects.PageTable:
    # shares: of each true class (row) predicted as each class (column).
    if len(classes) <= charts.MAX_ANNOTATED_COLUMNS:
        rows = dict(zip(classes, shares.tolist(), strict=True))
        return page_objects.percent_table("True, predicted", rows, classes)
    lines = []
    for share, true, predicted in list_confusions(shares):
        other = page_objects.PageCell(classes[predicted], look="words")
        percent = page_objects.PageCell(f"{100 * share:.0f}")
        lines.append(page_objects.TableRow(page_objects.PageCell(classes[true]), [other, percent]))
    return page_objects.PageTable(["True class", "Taken for", "Percent"], lines)


def list_confusions(shares: np.ndarray) -> Iterator[tuple[float, int, int]]:
    """Yield (share, true class, predicted class), largest first; shares: (K true, K predicted)."""
    wrong = shares * (1 - np.eye(len(shares)))
    order = np.argsort(-wrong, axis=None, kind="stable")[:MAX_LISTED_CONFUSIONS]
    for true, predicted in zip(*np.unravel_index(order, wrong.shape), strict=True):
        if wrong[true, predicted] > 0:
            yield float(wrong[true, predicted]), int(true), int(predicted)


def tissue_blocks(phase: result_types.PhaseResults) -> Iterator[page_objects.PageBlock]:
    """Yield a block on the experts that each brain tissue is routed to, over epochs."""
    probed = {name: result.region_routing for name, result in phase.first_outcomes.items()}
    probed = {name: probes for name, probes in probed.items() if probes}
    grids = [tissue_expert_table(probes, method) for method, probes in probed.items()]
    pictures = []
    for method, probes in probed.items():
        chart = region_share_heatmap(max(probes, key=lambda probe: probe.epoch).rows)
        caption = f"{method}. Last epoch, percent of the tokens."
        pictures.append(page_objects.Picture(chart, f"{phase.name}: regions of {method}", caption))
    notes = [TISSUE_NOTE + phase.seed_note]
    title = "Which expert answers for which tissue"
    yield page_objects.PageBlock(title, notes, grids, pictures, about="own_expert_gain")


def tissue_expert_table(probes: Sequence[EpochTissueRouting], title: str) -> page_objects.PageTable:
    """Return a table, a row per tissue: per epoch, its top experts and those of random tokens."""
    columns = ["Tissue"]
    for probe in probes:
        columns += [f"Epoch {probe.epoch}", "Control"]
    rows = [row.region.removeprefix(RANDOM_MASK_PREFIX) for probe in probes for row in probe.rows]
    lines = []
    for region in dict.fromkeys(rows):
        items = []
        for probe in probes:
            by_region = {row.region: row for row in probe.rows}
            pair = by_region.get(region), by_region.get(RANDOM_MASK_PREFIX + region)
            items += map(tissue_experts_cell, pair)
        name = page_objects.PageCell(TISSUES.get(region, region))
        lines.append(page_objects.TableRow(name, items))
    return page_objects.PageTable(columns, lines, title=title)


def tissue_experts_cell(row: TissueRoutingRow | None) -> page_objects.PageCell:
    if row is None:
        return page_objects.DASH
    experts = "\n".join(f"{name} {score:.3f}" for name, score in row.experts)
    shares = [f"{row.share[name]:.0%}" for name, _ in row.experts if name in row.share]
    share = f"chosen by {', '.join(shares)}" if shares else ""
    return page_objects.PageCell(experts, share, look="lines")


def region_share_heatmap(rows: Sequence[TissueRoutingRow]) -> drawing.Figure:
    experts = list(dict.fromkeys(name for row in rows for name in row.share))
    table = np.array([[row.share.get(name, 0.0) for name in experts] for row in rows])
    names = [row.region.replace(RANDOM_MASK_PREFIX, "random, as ") for row in rows]
    axes = ("Choices by tissue", names, experts, "Expert")
    labels = charts.HeatmapLabels(*axes, slanted=len(experts) > 6)
    size = (1.6 + 0.62 * len(experts), 0.9 + 0.36 * len(rows))
    return charts.draw_heatmap(table, charts.percent_annotations(table), labels, size)


def read_outcome(path: Path, stage: str) -> Found | SkipReason:
    outcome = read_result(path, Outcome, stage)
    if isinstance(outcome, SkipReason):
        return outcome
    return collect_outcome_values(outcome)


PICTURES = Pictures(
    "", figures, is_on_page=False, more=training_blocks, kind=Trained, read=read_outcome
)
