"""What the report shows, one file per measurement or stage; this is their table, in its order."""

from moecore.brain.measured_ages import AgeResult as Ages
from moecore.measure.calibration import Result as Calibration
from moecore.measure.cohort_checks import Result as CohortChecks
from moecore.measure.corruptions import Result as Corruptions
from moecore.measure.cost import Result as Cost
from moecore.measure.explorer import Result as Explorer
from moecore.measure.few_shot import Result as FewShot
from moecore.measure.invariance import Result as Invariance
from moecore.measure.lipschitz import Result as Lipschitz
from moecore.measure.retrieval import Result as Retrieval
from moecore.measure.robustness import Result as Robustness
from moecore.measure.routing import Result as Routing
from moecore.measure.stability import Result as Stability
from moecore.measure.word_swaps import Result as WordSwaps
from moecore.measure.zero_shot import Result as ZeroShot
from moecore.report.measures import (
    ages,
    calibration,
    cohort_checks,
    corruptions,
    cost,
    explorer,
    few_shot,
    invariance,
    lipschitz,
    retrieval,
    robustness,
    routing,
    stability,
    training,
    word_swaps,
    zero_shot,
)
from moecore.report.measures.shown import Shown
from moecore.training.outcome import Outcome

SHOWN = (
    Shown("", "training", Outcome, training.COLUMNS, training.figures, training.part),
    Shown(
        "calibrate",
        "calibration",
        Calibration,
        calibration.COLUMNS,
        calibration.figures,
        calibration.part,
        calibration.applies,
    ),
    Shown("calibrate", "calibration", Ages, ages.COLUMNS, ages.figures, ages.part, ages.applies),
    Shown(
        "robustness",
        "robustness",
        Robustness,
        robustness.COLUMNS,
        robustness.figures,
        robustness.part,
    ),
    Shown("routing", "routing", Routing, routing.COLUMNS, routing.figures, routing.part),
    Shown("invariance", "invariance", Invariance, invariance.COLUMNS, invariance.figures),
    Shown(
        "corruptions",
        "corruptions",
        Corruptions,
        corruptions.COLUMNS,
        corruptions.figures,
        corruptions.part,
    ),
    Shown(
        "stability",
        "stability under noise",
        Stability,
        stability.COLUMNS,
        stability.figures,
        stability.part,
    ),
    Shown(
        "word_swaps",
        "swapped words",
        WordSwaps,
        word_swaps.COLUMNS,
        word_swaps.figures,
        word_swaps.part,
    ),
    Shown(
        "retrieval",
        "images and captions",
        Retrieval,
        retrieval.COLUMNS,
        retrieval.figures,
        retrieval.part,
    ),
    Shown(
        "zero_shot",
        "classes by prompts",
        ZeroShot,
        zero_shot.COLUMNS,
        zero_shot.figures,
        zero_shot.part,
    ),
    Shown("few_shot", "few shots", FewShot, few_shot.COLUMNS, few_shot.figures, few_shot.part),
    Shown(
        "lipschitz",
        "a Lipschitz estimate",
        Lipschitz,
        lipschitz.COLUMNS,
        lipschitz.figures,
    ),
    Shown("cost", "cost", Cost, cost.COLUMNS, cost.figures),
    Shown("explorer", "single images", Explorer, explorer.COLUMNS, explorer.figures),
    Shown(
        "cohort_checks",
        "checks on the cohort",
        CohortChecks,
        cohort_checks.COLUMNS,
        cohort_checks.figures,
        cohort_checks.part,
    ),
)
