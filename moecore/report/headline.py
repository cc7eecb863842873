"""Which columns stand in the first table of a phase."""

from collections.abc import Sequence

from moecore.measure.robustness import Result as Robustness
from moecore.report.column import Column
from moecore.report.measured import Phase
from moecore.report.measures.robustness import WORST, attacks_of, score_under

CLASSES = ("mce", "load_cv2", "active_parameters", "latency_ms")
AGES = (
    "isolated_wm",
    "isolated_gm",
    "isolated_csf",
    "probe_wm",
    "probe_gm",
    "probe_csf",
    "own_expert_gain",
    "monotone",
    "rescan",
    "load_cv2",
    "active_parameters",
    "latency_ms",
)


def headline(phase: Phase, columns: Sequence[Column]) -> list[Column]:
    """Under attack those of the worst case, or else of the last attack."""
    share = phase.task.score.form == "share"
    scores = under_attack(phase)
    if share:
        names = ("test_accuracy", "ece_after", *scores, *CLASSES)
    else:
        names = ("test_mae", "median_mae", "mae_of_median", "mae_pooled", *scores[:1], *AGES)
    known = {column.name: column for column in columns}
    return [known[name] for name in names if name in known]


def under_attack(phase: Phase) -> list[str]:
    """Names of the score's column and of the routing's."""
    results = phase.results(Robustness)
    attacks = [name for result in results for name in attacks_of(result)]
    if not attacks:
        return []
    attack = list(dict.fromkeys(attacks))[-1]
    first = next(result for result in results if attack in attacks_of(result))
    shown = WORST if any(result.worst_case for result in results) else attack
    return [score_under(shown, first).name, f"routing_change_{attack}"]
