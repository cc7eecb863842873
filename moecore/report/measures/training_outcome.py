"""What trainings came to: scores on the test split, curves, how the routing settles, mistakes."""

from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter

import numpy as np

from moecore.measure import calibration
from moecore.report.column import (
    SCORE,
    Column,
    ColumnContext,
    ContextDependentColumns,
    decode_items,
    has_finetuned_routers,
    has_settling_routers,
    mean_or_none,
    score_interval_kind,
    score_slug,
    score_title,
    unit_suffix,
)
from moecore.report.figures.charts import interval_caption
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
from moecore.report.measures import region_experts as regions
from moecore.report.measures.result_display import Figures, Shown, first_seed_pictures
from moecore.report.page.rows import percent_grid
from moecore.report.page.view import Block, PageCell, PageTable, Picture, TableRow
from moecore.report.reference_methods import convergence_columns, overhead_columns
from moecore.report.typed_results import Measured, Phase, list_without_none
from moecore.training.outcome import Outcome

LISTED = 10  # mistakes of a method with many classes
LOSS = {
    "classification": "mean cross-entropy in nats",
    "cells": "mean over cells of the cross-entropy in nats",
    "multi_label": "mean over images of the sigmoids' cross-entropy in nats, summed over classes",
}
NOTES = {
    "precision_at_1": "1 − false discovery rate",
    "mae": "mean |predicted − known age|",
    "nats": "mean over blocks of words, each read with those before it",
}


def hits_reader(name: str) -> Callable[[Measured], np.ndarray | None]:
    """Return what reads which test images (N,) are right by these scores of the calibration."""

    def read(model: Measured) -> np.ndarray | None:
        trained = model.of(Outcome)
        calibrated = model.found(calibration.ClassCalibration)
        if trained is None or calibrated is None or (scores := calibrated.facts[name]) is None:
            return None
        return trained.task.decode_scores(scores, calibrated.facts["test_images"]).numpy()

    return read


def test_score_column(seen: ColumnContext) -> list[Column]:
    score = seen.task.score
    share = score.form == "share"
    title = score_title(score)
    label = {"precision_at_1": title}.get(score.name, f"Test {score.label}")
    if not share:
        what = title if title.isupper() else title.lower()
        label = f"Test {what}{unit_suffix(score)}"
    return [
        Column(
            f"test_{score_slug(score)}",
            label,
            lambda result: result.test_score,
            score.better,
            score.form,
            NOTES.get(score.name, ""),
            hits=hits_reader("scores") if share else None,
            items=lambda result: decode_items(result.test_items),
            limits=score_interval_kind(score),
        )
    ]


def test_loss_column(seen: ColumnContext) -> list[Column]:
    """Return the loss on the test split; of numbers and texts the score says the same."""
    if seen.task.kind not in LOSS:
        return []
    note = LOSS[seen.task.kind]
    return [Column("test_loss", "Test loss", lambda result: result.test_loss, "lower", note=note)]


def throughput_column(seen: ColumnContext) -> list[Column]:
    """Images, volumes, or blocks of words, a second."""
    what = {"share": "Images"}.get(seen.task.score.form, "Volumes")
    if seen.task.long:
        what = "Blocks"
    name = "images_per_second"
    return [Column(name, f"{what} / s", attrgetter(name), form="count", note="while training")]


def halfway_agreement(by_epoch: Sequence[float | None]) -> float | None:
    """At the epoch at whose end half of training is done: the 5th of 10, the 3rd of 5."""
    agreements = by_epoch or (None,)
    return agreements[(len(agreements) - 1) // 2]


def early_agreement(consecutive: Sequence[float | None]) -> float | None:
    """Return, of the epochs' agreement, that at whose end a quarter of training is done."""
    return (consecutive or (None,))[max(0, len(consecutive) - 1) // 4]


def agreement_items_reader(name: str) -> Callable[[Outcome], np.ndarray | None]:
    """The items of an agreement over time; None where an older training kept none."""
    return lambda result: decode_items(result.agreement_items.get(name))


PERPLEXITIES = (
    Column(
        "ppl",
        "Perplexity",
        lambda result: result.ppl,
        "lower",
        note="as papers count it: whole blocks of the training's number of streams, from an empty "
        "cache (MoGE, table 3)",
    ),
    Column(
        "ppl_all",
        "Perplexity, all",
        lambda result: result.ppl_all,
        "lower",
        note="every word once, in one stream",
    ),
)


def unswapped_perplexity_columns(seen: ColumnContext) -> list[Column]:
    return list(PERPLEXITIES) if seen.task.long else []


COLUMNS = (
    ContextDependentColumns(test_score_column, lambda ahead: [f"test_{ahead.score}"], SCORE, SCORE),
    ContextDependentColumns(test_loss_column, lambda ahead: ["test_loss"], better="lower"),
    ContextDependentColumns(
        unswapped_perplexity_columns,
        lambda ahead: ["ppl", "ppl_all"] if ahead.score == "nats" else [],
        better="lower",
    ),
    Column(
        "parameters", "Parameters", lambda result: result.parameters, form="count", is_fixed=True
    ),
    Column(
        "active_parameters",
        "Active parameters",
        lambda result: result.active_parameters,
        form="count",
        note="used for one token",
        is_fixed=True,
    ),
    ContextDependentColumns(throughput_column, lambda ahead: ["images_per_second"], "count"),
    Column("seconds", "Training time", lambda result: result.seconds, form="seconds"),
    ContextDependentColumns(overhead_columns, lambda ahead: ["training_overhead"]),
    ContextDependentColumns(
        convergence_columns, lambda ahead: ["steps_to_baseline_loss"], "count", "lower"
    ),
    Column(
        "agreement_with_final",
        "Agreement with final model",
        lambda result: halfway_agreement(result.agreement_with_final),
        "higher",
        "share",
        "tokens, once half of training is done",
        "tgr",
        items=agreement_items_reader("with_final_half"),
        is_expected=has_settling_routers,
    ),
    Column(
        "saturation",
        "Saturation",
        lambda result: halfway_agreement(result.saturation),
        "higher",
        "share",
        "experts of a token at the end that it has once half of training is done; k/E by chance",
        items=agreement_items_reader("saturation_half"),
        is_expected=has_settling_routers,
    ),
    Column(
        "agreement_consecutive",
        "Agreement of epochs",
        lambda result: (result.agreement_consecutive or (None,))[-1],
        "higher",
        "share",
        "tokens, between the last two epochs",
        "tgr",
        items=agreement_items_reader("consecutive_last"),
        is_expected=has_settling_routers,
    ),
    Column(
        "agreement_consecutive_early",
        "Agreement of early epochs",
        lambda result: early_agreement(result.agreement_consecutive),
        "higher",
        "share",
        "tokens, between an epoch and the next once a quarter of training is done",
        "tgr",
        items=agreement_items_reader("consecutive_quarter"),
        is_expected=has_settling_routers,
        detail=True,
    ),
    Column(
        "agreement_consecutive_mean",
        "Agreement of epochs, mean",
        lambda result: mean_or_none(list_without_none(result.agreement_consecutive)),
        "higher",
        "share",
        "tokens, between an epoch and the next, mean over training",
        "tgr",
        items=agreement_items_reader("consecutive_mean"),
        is_expected=has_settling_routers,
        detail=True,
    ),
    Column(
        "agreement_before_after",
        "Agreement before / after",
        lambda result: mean_or_none(list_without_none(result.routing_agreement_before_after)),
        "higher",
        "share",
        "tokens whose first expert survives fine-tuning",
        "tgr",
        items=agreement_items_reader("before_after"),
        is_expected=has_finetuned_routers,
    ),
    Column(
        "training_step_ms",
        "Training step, ms",
        lambda result: result.training_step_ms,
        note="views, losses and update; from the median images a second",
        paper="cost",
    ),
    Column(
        "training_memory_mb",
        "Training memory, MB",
        lambda result: result.training_memory_mb,
        note="the most that a step holds: weights, gradients, the optimizer's state, activations",
        paper="cost",
        is_fixed=True,
    ),
    Column(
        "test_accuracy_top5",
        "Top-5 accuracy",
        lambda result: result.test_top5,
        "higher",
        "share",
        "Acc@5: the class is among the five largest; none of five classes or fewer",
        hits=hits_reader("top5"),
        limits="wilson",
    ),
    *regions.COLUMNS,
)


def figures(result: Outcome) -> Figures:
    """Curves, confusion, and how each class is routed."""
    if result.curve:
        yield "training_curves", training_curves({"": [result]})
    if result.confusion is not None:
        yield "confusion_matrix", confusion_matrix(result.confusion, result.task.classes)
    yield from class_routing_figures(result)


def class_routing_figures(result: Outcome) -> Figures:
    if result.class_maps:
        yield "class_maps", draw_class_routing_by_epoch(result)


def phase_blocks(phase: Phase) -> Iterator[Block]:
    """Loss and score over the epochs, how the routing settles, and each method's classes."""
    if any(outcome.curve for outcome in phase.results(Outcome)):
        chart = training_curves(phase.of(Outcome))
        caption = "One line per seed." if phase.seeds > 1 else ""
        drawn = Picture(chart, f"{phase.name}: training", caption)
        score = f"test_{score_slug(phase.task.score)}"
        yield Block("Training", pictures=[drawn], about=score)
    yield agreement_block(phase)
    yield warnings_block(phase)
    yield from regions.phase_blocks(phase)
    maps = first_seed_pictures(phase, Outcome, class_routing_figures)
    finding = describe_strongest_preference(phase.first(Outcome))
    yield Block("Which class goes to which expert", pictures=maps, finding=finding)
    yield confusion_block(phase)


def agreement_block(phase: Phase) -> Block:
    curves = {
        name: {method: agreement_points(seeds, name) for method, seeds in phase.of(Outcome).items()}
        for name in AGREEMENTS
    }
    title = "How the routing settles"
    if not any(any(points.values()) for points in curves.values()):
        return Block(title)
    what = (
        "Share of tokens with the same first expert as at the end, and as an epoch before; "
        "saturation: share of a token's experts at the end. Mean over MoE layers."
    )
    caption = f"{what} {interval_caption(phase.of(Outcome))}"
    drawn = Picture(routing_agreement(curves), f"{phase.name}: agreement", caption)
    about = "agreement_with_final"
    return Block(title, pictures=[drawn], about=about)


def warnings_block(phase: Phase) -> Block:
    """Return what the monitors of the trainings warned of."""
    lines = [
        f"{method}, seed {seed}: {line}."
        for method, seeds in phase.models.items()
        for seed, model in seeds.items()
        if (trained := model.of(Outcome)) is not None
        for line in trained.routing_warnings
    ]
    told = f"warnings while training: {len(lines)}"
    return Block("Experts without tokens, loads that collapsed", below=lines, finding=told)


def confusion_block(phase: Phase) -> Block:
    """Share of each true class that was predicted as each class, method by method."""
    tables = {
        method: row_shares(result.confusion)
        for method, result in phase.first(Outcome).items()
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
    """One method's table; shares: (true, predicted)."""
    if len(classes) <= NUMBERED:
        rows = dict(zip(classes, shares.tolist(), strict=True))
        return percent_grid("True, predicted", rows, classes)
    lines = [
        TableRow(
            PageCell(classes[true]),
            [PageCell(classes[taken], look="words"), PageCell(f"{100 * share:.0f}")],
        )
        for share, true, taken in list_confusions(shares)
    ]
    return PageTable(["True class", "Taken for", "Percent"], lines)


def list_confusions(shares: np.ndarray) -> Iterator[tuple[float, int, int]]:
    """The commonest ones: share, true class, predicted class; shares: (true, predicted)."""
    wrong = shares * (1 - np.eye(len(shares)))
    order = np.argsort(-wrong, axis=None, kind="stable")[:LISTED]
    for true, taken in zip(*np.unravel_index(order, wrong.shape), strict=True):
        if wrong[true, taken] > 0:
            yield float(wrong[true, taken]), int(true), int(taken)


def commonest_mistake(tables: Sequence[np.ndarray], classes: Sequence[str]) -> str:
    """The commonest mistake of all methods; "" where none was made."""
    worst = next(list_confusions(np.mean(tables, axis=0)), None)
    if worst is None:
        return "no test image was taken for another class"
    share, true, taken = worst
    methods = ", mean over methods" if len(tables) > 1 else ""
    return (
        f"{classes[true]} is taken for {classes[taken]} most often ({100 * share:.0f} %{methods})"
    )


SHOWN = Shown("", "training", Outcome, COLUMNS, figures, phase_blocks, place=1)
