"""Pictures of trainings: curves, settling of the routing, confusions, experts of tissues."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from moecore.measure.base import Skipped, read_result
from moecore.measure.trained import CONTROL, TISSUES, Trained, collect_outcome_values, outcome_of
from moecore.measure.values import Found
from moecore.report.column import score_slug
from moecore.report.figures.charts import (
    Labels,
    draw_heatmap,
    interval_caption,
    percent_annotations,
)
from moecore.report.figures.training_figures import (
    AGREEMENTS,
    NUMBERED,
    agreement_points,
    confusion_matrix,
    describe_strongest_preference,
    draw_class_routing_by_epoch,
    routing_agreement,
    row_shares,
    training_curves,
)
from moecore.report.page.view import (
    NONE,
    Block,
    PageCell,
    PageTable,
    Picture,
    TableRow,
    percent_grid,
)
from moecore.report.results import Figures, Pictures, first_seed_pictures
from moecore.report.typed_results import Phase
from moecore.training.outcome import EpochTissueRouting, Outcome, TissueRoutingRow

LISTED = 10  # confusions of a method with many classes
TISSUE_WORDS = (
    "For each tissue the two experts with the highest mean score over its tokens, at three epochs. "
    "Control: equally many random tokens of the brain. An expert knows its tissue if its "
    "share of the tokens is well above the control's."
)


def figures(result: Found) -> Figures:
    outcome = outcome_of(result)
    if outcome.curve:
        yield "training_curves", training_curves({"": [outcome]})
    if outcome.confusion is not None:
        yield "confusion_matrix", confusion_matrix(outcome.confusion, outcome.task.classes)
    yield from class_routing_figures(result)


def class_routing_figures(result: Found) -> Figures:
    if (outcome := outcome_of(result)).class_maps:
        yield "class_maps", draw_class_routing_by_epoch(outcome)


def phase_blocks(phase: Phase) -> Iterator[Block]:
    """Yield curves, settling of the routing, warnings, experts of tissues and classes."""
    outcomes = phase.outcomes
    if any(outcome.curve for seeds in outcomes.values() for outcome in seeds):
        chart = training_curves(outcomes)
        caption = "One line per seed." if phase.seeds > 1 else ""
        picture = Picture(chart, f"{phase.name}: training", caption)
        score = f"test_{score_slug(phase.task.score)}"
        yield Block("Training", pictures=[picture], about=score)
    yield agreement_block(phase)
    yield warnings_block(phase)
    yield from tissue_blocks(phase)
    maps = first_seed_pictures(phase, Trained, class_routing_figures)
    finding = describe_strongest_preference(phase.first_outcomes)
    yield Block("Which class goes to which expert", pictures=maps, finding=finding)
    yield confusion_block(phase)


def agreement_block(phase: Phase) -> Block:
    curves = {
        name: {method: agreement_points(seeds, name) for method, seeds in phase.outcomes.items()}
        for name in AGREEMENTS
    }
    title = "How the routing settles"
    if not any(any(points.values()) for points in curves.values()):
        return Block(title)
    caption = (
        "Share of tokens with the same first expert as at the end, and as one epoch before; "
        "saturation: share of a token's final experts. Mean over MoE layers. "
        f"{interval_caption(phase.outcomes)}"
    )
    picture = Picture(routing_agreement(curves), f"{phase.name}: agreement", caption)
    return Block(title, pictures=[picture], about="agreement_with_final")


def warnings_block(phase: Phase) -> Block:
    lines = [
        f"{method}, seed {seed}: {line}."
        for method, seeds in phase.models.items()
        for seed, model in seeds.items()
        if model.outcome is not None
        for line in model.outcome.routing_warnings
    ]
    finding = f"warnings while training: {len(lines)}"
    return Block("Experts without tokens, loads that collapsed", below=lines, finding=finding)


def confusion_block(phase: Phase) -> Block:
    """Return each method's share of each true class that was predicted as each class."""
    tables = {
        method: row_shares(result.confusion)
        for method, result in phase.first_outcomes.items()
        if result.confusion is not None
    }
    if not tables:
        return Block("")
    classes = phase.task.answers
    tiles = [
        confusion_table(shares, classes)._replace(
            title=method, below="Percent of each true class." + phase.first_seed
        )
        for method, shares in tables.items()
    ]
    finding = commonest_mistake(list(tables.values()), classes)
    return Block("Confusion of classes", tiles=tiles, finding=finding)


def confusion_table(shares: np.ndarray, classes: Sequence[str]) -> PageTable:
    """Return a method's table; shares: (true, predicted)."""
    if len(classes) <= NUMBERED:
        rows = dict(zip(classes, shares.tolist(), strict=True))
        return percent_grid("True, predicted", rows, classes)
    lines = [
        TableRow(
            PageCell(classes[true]),
            [PageCell(classes[predicted], look="words"), PageCell(f"{100 * share:.0f}")],
        )
        for share, true, predicted in list_confusions(shares)
    ]
    return PageTable(["True class", "Taken for", "Percent"], lines)


def list_confusions(shares: np.ndarray) -> Iterator[tuple[float, int, int]]:
    """Yield the commonest (share, true class, predicted class); shares: (true, predicted)."""
    wrong = shares * (1 - np.eye(len(shares)))
    order = np.argsort(-wrong, axis=None, kind="stable")[:LISTED]
    for true, predicted in zip(*np.unravel_index(order, wrong.shape), strict=True):
        if wrong[true, predicted] > 0:
            yield float(wrong[true, predicted]), int(true), int(predicted)


def commonest_mistake(tables: Sequence[np.ndarray], classes: Sequence[str]) -> str:
    """Describe the commonest confusion, averaged over methods."""
    worst = next(list_confusions(np.mean(tables, axis=0)), None)
    if worst is None:
        return "no test image was taken for another class"
    share, true, predicted = worst
    methods = ", mean over methods" if len(tables) > 1 else ""
    pair = f"{classes[true]} is taken for {classes[predicted]}"
    return f"{pair} most often ({100 * share:.0f} %{methods})"


def tissue_blocks(phase: Phase) -> Iterator[Block]:
    """Yield the two best experts of each tissue at three epochs, and the last choices."""
    probed = {
        method: result.region_routing
        for method, result in phase.first_outcomes.items()
        if result.region_routing
    }
    grids = [tissue_experts_by_epoch(probes, method) for method, probes in probed.items()]
    pictures = [
        Picture(
            region_share_heatmap(max(probes, key=lambda probe: probe.epoch).rows),
            f"{phase.name}: regions of {method}",
            f"{method}. Last epoch, percent of the tokens.",
        )
        for method, probes in probed.items()
    ]
    yield Block(
        "Which expert answers for which tissue",
        [TISSUE_WORDS + phase.first_seed],
        grids,
        pictures,
        about="own_expert_gain",
    )


def tissue_experts_by_epoch(probes: Sequence[EpochTissueRouting], method: str) -> PageTable:
    """Return a row per tissue, with two columns per epoch."""
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
    """Return the experts with their scores, and the share of tokens that choose them."""
    if row is None:
        return NONE
    experts = "\n".join(f"{name} {score:.3f}" for name, score in row.experts)
    shares = [f"{row.share[name]:.0%}" for name, _ in row.experts if name in row.share]
    return PageCell(experts, f"chosen by {', '.join(shares)}" if shares else "", look="lines")


def region_share_heatmap(rows: Sequence[TissueRoutingRow]) -> Figure:
    """Draw the share of tokens of each tissue and control that choose each expert."""
    experts = list(dict.fromkeys(name for row in rows for name in row.share))
    table = np.array([[row.share.get(name, 0.0) for name in experts] for row in rows])
    names = [row.region.replace(CONTROL, "random, as ") for row in rows]
    labels = Labels("Choices by tissue", names, experts, "Expert", slanted=len(experts) > 6)
    size = (1.6 + 0.62 * len(experts), 0.9 + 0.36 * len(rows))
    return draw_heatmap(table, percent_annotations(table), labels, size)


def read_outcome(path: Path, stage: str) -> Found | Skipped:
    outcome = read_result(path, Outcome, stage)
    return outcome if isinstance(outcome, Skipped) else collect_outcome_values(outcome)


PICTURES = Pictures(
    "", figures, is_on_page=False, more=phase_blocks, kind=Trained, read=read_outcome
)
