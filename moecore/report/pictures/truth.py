"""Experts compared with the true kinds of tokens, on generated data."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from moecore.measure.trained import Trained, outcome_of
from moecore.measure.truth import PIXEL, Truth
from moecore.measure.values import Found
from moecore.report import results
from moecore.report.column import CEILING, DENSE
from moecore.report.figures import charts
from moecore.report.figures.model_figures import row_shares
from moecore.report.page.page_objects import Block, Picture
from moecore.report.study_results import Phase, list_without_none
from moecore.statistics.comparisons import Difference, headroom_recovered

UNITS = {"noise": "σ", "attack": f"ε in 1/{PIXEL}"}
LIMITS = (0.0, 1.0)


def figures(result: Found) -> results.Figures:
    """Yield (name, heatmap) per MoE layer: each expert's tokens by their true group, in percent."""
    for index, counts in enumerate(result.facts["counts"], 1):
        shares = row_shares(counts)
        texts = charts.percent_annotations(shares, 0.005, charts.NUMBERED)
        columns = [str(kind + 1) for kind in range(shares.shape[1])]
        axes = ("Kind of token", "Expert, by its matched kind")
        labels = charts.Labels(f"MoE {index}", (), columns, *axes)
        caption = "Percent of each expert's tokens."
        if (unmatched := len(shares) - shares.shape[1]) > 0:
            caption += f" More experts than kinds: the last {unmatched} are matched to none."
        yield f"truth_{index}", charts.draw_heatmap(shares, texts, labels, (4.8, 4.7), caption)


def share_of_routings_worth(phase: Phase, method: str) -> Difference | None:
    """Return the method's share of the gain from dense (0) to told (1); None if unknown."""
    trained = phase.of(Trained)
    sign = -1 if phase.task.score.better == "lower" else 1
    sides = []
    for name in (method, DENSE, CEILING):
        scores = [result.find("test_score") for result in trained.get(name, [])]
        items = list_without_none(score.array for score in scores if score)
        if len(items) < phase.seeds:
            return None
        sides.append(sign * np.stack(items))
    return headroom_recovered(*sides)


def describe_routings_worth(phase: Phase, method: str) -> str | None:
    """Return a sentence on the method's share of told's gain over dense; None without interval."""
    share = share_of_routings_worth(phase, method)
    if share is None or (half := share.half()) is None:
        return None
    value, low, high = (f"{100 * (share.value + off):.0f}" for off in (0, -half, half))
    return (
        f"{method} finds {value} % [{low} – {high}] of what routing is worth: "
        f"{CEILING}, which routes by the truth, is 100 %; {DENSE}, which has no experts, is 0 %."
    )


def purity_curves(phase: Phase) -> list[Picture]:
    """Return charts of purity over epochs, noise and attacks' ε, a line per method."""
    caption = "Mean over MoE layers."
    spec = charts.ChartSpec("Purity of validation images", "Epoch", "Purity", share=True)
    read: Any = lambda result: dict(enumerate(outcome_of(result).purity, 1))
    pictures = results.draw_method_curves(phase, Trained, read, spec, caption, limits=LIMITS)
    for kind, unit in UNITS.items():
        spec = charts.ChartSpec(f"Purity under {kind}", unit, "Purity", share=True)
        changed = lambda result, kind=kind: result.curve("changed_purity", kind)
        pictures += results.draw_method_curves(phase, Truth, changed, spec, caption, limits=LIMITS)
    return pictures


def truth_blocks(phase: Phase) -> Iterator[Block]:
    """Yield a block: each method's share of told's gain over dense, purity, and true groups."""
    first = phase.first(Truth)
    sentences = list_without_none(describe_routings_worth(phase, method) for method in first)
    pictures = [*purity_curves(phase), *results.first_seed_pictures(phase, Truth, figures)]
    yield Block("Experts and truth", sentences, pictures=pictures, about="purity")


PICTURES = results.Pictures("truth", figures, is_on_page=False, more=truth_blocks)
