"""Measurements of a trained model, each in a file of its own: what ``stages.measure`` can run."""

from moecore.measure import (
    cohort_checks,
    corruptions,
    cost,
    explorer,
    few_shot,
    invariance,
    lipschitz,
    retrieval,
    routing,
    stability,
    word_swaps,
    zero_shot,
)
from moecore.measure.base import Measurement

MEASUREMENTS = {
    "routing": Measurement.of(routing, routing.Routing, guided=True),
    "invariance": Measurement.of(invariance, invariance.Invariance),
    "corruptions": Measurement.of(corruptions, corruptions.Corruptions),
    "stability": Measurement.of(stability, stability.Stability),
    "few_shot": Measurement.of(few_shot, few_shot.FewShot),
    "word_swaps": Measurement.of(word_swaps, word_swaps.WordSwaps),
    "retrieval": Measurement.of(retrieval, retrieval.Retrieval),
    "zero_shot": Measurement.of(zero_shot, zero_shot.ZeroShot),
    "lipschitz": Measurement.of(lipschitz, lipschitz.Lipschitz),
    "cost": Measurement.of(cost, cost.Cost),
    "explorer": Measurement.of(explorer, explorer.Explorer),
    "cohort_checks": Measurement.of(cohort_checks, cohort_checks.CohortChecks, regions=True),
}
