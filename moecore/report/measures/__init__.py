"""What the report shows, one file per measurement or stage; this is their table, in its order."""

from moecore.measure.explorer import Result as Explorer
from moecore.report.measures import (
    ages,
    calibration,
    cohort_checks,
    corruptions,
    cost,
    few_shot,
    invariance,
    lipschitz,
    retrieval,
    robustness,
    routing,
    stability,
    training_outcome,
    word_swaps,
    zero_shot,
)
from moecore.report.measures.result_display import Shown

SHOWN = (
    training_outcome.SHOWN,
    calibration.SHOWN,
    ages.SHOWN,
    robustness.SHOWN,
    routing.SHOWN,
    invariance.SHOWN,
    corruptions.SHOWN,
    stability.SHOWN,
    word_swaps.SHOWN,
    retrieval.SHOWN,
    zero_shot.SHOWN,
    few_shot.SHOWN,
    lipschitz.SHOWN,
    cost.SHOWN,
    Shown("explorer", "single images", Explorer),  # which explorer.html shows, not the page
    cohort_checks.SHOWN,
)
