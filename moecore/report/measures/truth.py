"""Whether experts are what the data says they should be, on data whose truth is known."""

from collections.abc import Callable, Iterator

import numpy as np

from moecore.data.image_noise import SIGMAS
from moecore.measure.truth import EPSILONS, ChangedPurity, Result
from moecore.report.column import Column, ColumnPerRow, decode_items, mean_or_none
from moecore.report.figures.charts import ChartSpec, Labels, draw_heatmap, percent_annotations
from moecore.report.figures.training_figures import row_shares
from moecore.report.measures.result_display import (
    Figures,
    Shown,
    draw_method_curves,
    first_seed_pictures,
)
from moecore.report.page.view import Block, Picture
from moecore.report.reference_methods import CEILING, DENSE
from moecore.report.tables.number_format import PIXEL
from moecore.report.typed_results import Phase, list_without_none
from moecore.statistics.crossed import Difference, headroom_recovered
from moecore.statistics.intervals import Interval
from moecore.training.outcome import Outcome

NOTE = "over test images; mean over MoE layers"
UNITS = {"noise": (1, "σ"), "attack": (PIXEL, f"ε in 1/{PIXEL}")}  # how strengths are printed
LIMITS = (0.0, 1.0)
NUMBERED = 20  # dialects: with more, the table has colours only


def layer_mean_reader(field: str) -> Callable[[Result], float | None]:
    """Return what reads a number of every layer, and gives its mean."""
    return lambda result: mean_or_none([getattr(row, field) for row in result.layers])


def changed_key(kind: str, strength: float) -> str:
    """Return noise_0_2, or attack_8 of ε = 8/255."""
    return f"{kind}_{UNITS[kind][0] * strength:.3g}".replace(".", "_")


def perturbation_words(key: str, row: ChangedPurity) -> tuple[str]:
    """Say how the images of a column were changed."""
    scale, unit = UNITS[row.kind]
    return (f"{row.kind}, {unit} = {scale * row.strength:.3g}",)


CHANGES = [
    *(changed_key("noise", sigma) for sigma in SIGMAS),
    *(changed_key("attack", epsilon) for epsilon in EPSILONS),
]
COLUMNS = (
    Column(
        "purity",
        "Purity",
        lambda result: only_or_mean(
            [Interval(row.purity, row.purity_low, row.purity_high) for row in result.layers]
        ),
        "higher",
        "share",
        f"tokens that are of their expert's most frequent kind, {NOTE}",
    ),
    Column(
        "purity_chance",
        "Purity by chance",
        layer_mean_reader("purity_chance"),
        "",
        "share",
        "the same with the images' truths permuted",
        detail=True,
    ),
    Column(
        "adjusted_mutual_information",
        "AMI of expert and truth",
        layer_mean_reader("adjusted"),
        "higher",
        note=f"adjusted mutual information, 0 by chance and 1 if equal, {NOTE}",
    ),
    Column(
        "normalised_mutual_information",
        "NMI of expert and truth",
        layer_mean_reader("normalised"),
        "higher",
        note=f"mutual information / mean entropy, {NOTE}",
        detail=True,
    ),
    Column(
        "matched_to_truth",
        "Matched to the truth",
        layer_mean_reader("matched"),
        "higher",
        "share",
        f"tokens that are right under the best one-to-one matching of experts and kinds, {NOTE}",
    ),
    ColumnPerRow(
        lambda result: {
            changed_key(row.kind, row.strength): row for row in result.changed if row.strength
        },
        Column(
            "purity_{}",
            "Purity, {}",
            lambda row: Interval(row.purity, row.purity_low, row.purity_high),
            "higher",
            "share",
            f"of some of the images with this change, {NOTE}",
            detail=True,
        ),
        lambda ahead: CHANGES,
        perturbation_words,
    ),
)


def only_or_mean(rows: list[Interval]) -> Interval | float | None:
    """Return the only layer's interval; of several, the mean of their values."""
    if len(rows) == 1:
        return rows[0]
    return mean_or_none([row.value for row in rows])


def figures(result: Result) -> Figures:
    """Yield a table for each MoE layer: which kinds each expert sees."""
    for index, row in enumerate(result.layers, 1):
        shares = row_shares(row.counts)
        texts = percent_annotations(shares, 0.005)
        if shares.shape[1] > NUMBERED:
            texts = np.full(shares.shape, "")
        columns = [str(kind + 1) for kind in range(shares.shape[1])]
        labels = Labels(f"MoE {index}", (), columns, "Kind of token", "Expert, by its matched kind")
        caption = "Percent of each expert's tokens."
        if (unmatched := len(shares) - shares.shape[1]) > 0:
            caption += f" More experts than kinds: the last {unmatched} are matched to none."
        yield f"truth_{index}", draw_heatmap(shares, texts, labels, (4.8, 4.7), caption)


def share_of_routings_worth(phase: Phase, method: str) -> Difference | None:
    """Return how much of what routing is worth a method finds: 0 as dense, 1 as told the truth.

    None where one of the three was not trained, or routing is worth nothing that can be seen.
    """
    trained = phase.of(Outcome)
    sign = -1 if phase.task.score.better == "lower" else 1
    sides = []
    for name in (method, DENSE, CEILING):
        items = list_without_none(
            decode_items(outcome.test_items) for outcome in trained.get(name, [])
        )
        if len(items) < phase.seeds:
            return None
        sides.append(sign * np.stack(items))
    return headroom_recovered(*sides)


def describe_routings_worth(phase: Phase, method: str) -> str | None:
    """Say how much of what routing is worth a method finds; None where that has no interval."""
    share = share_of_routings_worth(phase, method)
    if share is None or (half := share.half()) is None:
        return None
    value, low, high = (f"{100 * (share.value + off):.0f}" for off in (0, -half, half))
    return (
        f"{method} finds {value} % [{low} – {high}] of what routing is worth: {CEILING}, "
        f"routed by the truth, would be 100 %, {DENSE}, without experts, 0 %."
    )


def purity_curves(phase: Phase) -> list[Picture]:
    """Return the purity after each epoch, under noise and under attack, a line per method."""
    words = "Mean over MoE layers."
    drawn = draw_method_curves(
        phase,
        Outcome,
        lambda outcome: dict(enumerate(outcome.purity, 1)),
        ChartSpec("Purity of validation images", "Epoch", "Purity", share=True),
        words,
        limits=LIMITS,
    )
    for kind, (scale, unit) in UNITS.items():
        drawn += draw_method_curves(
            phase,
            Result,
            lambda result, kind=kind, scale=scale: {
                scale * row.strength: row.purity
                for row in result.changed
                if row.kind in ("clean", kind)
            },
            ChartSpec(f"Purity under {kind}", unit, "Purity", share=True),
            words,
            limits=LIMITS,
        )
    return drawn


def phase_blocks(phase: Phase) -> Iterator[Block]:
    """Yield what of routing's worth each method finds, and which kinds each expert sees."""
    words = list_without_none(
        describe_routings_worth(phase, method) for method in phase.first(Result)
    )
    pictures = [*purity_curves(phase), *first_seed_pictures(phase, Result, figures)]
    yield Block("Experts and truth", words, pictures=pictures, about="purity")


SHOWN = Shown("truth", "experts and truth", Result, COLUMNS, figures, phase_blocks, place=7)
