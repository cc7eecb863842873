"""Which columns stand in the first table of a phase."""

from collections.abc import Sequence

from moecore.report.column import Column
from moecore.report.measured import Phase
from moecore.report.quantities import attacked_names

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
    score, moved = attacked_names(phase)
    if share:
        names = ("test_accuracy", "ece_after", score, moved, *CLASSES)
    else:
        names = ("test_mae", "median_mae", "mae_of_median", "mae_pooled", score, *AGES)
    known = {column.name: column for column in columns}
    return [known[name] for name in names if name in known]
