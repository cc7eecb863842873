"""The headline numbers of every run, a file each, for ``dvc metrics show`` and experiments."""

import json

from moecore.report.measured import Phase, Results
from moecore.report.quantities import attacked_names
from moecore.report.tables import metrics_of

MOST = 12  # numbers of a run
DIGITS = 5  # significant ones
NAMES = (
    "test_accuracy",
    "test_mae",
    "mae_pooled",
    "ece_after",
    "mce",
    "imed",
    "match_top1",
    "noise_selection_change",
    "own_expert_gain",
    "load_cv2",
    "entropy",
    "active_parameters",
    "latency_ms",
)


def run_files(results: Results) -> dict[str, str]:
    """Path below reports/ → content: ``metrics/pretrain/vmoe-0.json``, a flat JSON of numbers."""
    found = {}
    for phase in results.phases.values():
        for method, seeds in phase.models.items():
            for seed in seeds:
                numbers = numbers_of(phase, method, seed)
                path = f"metrics/{phase.name}/{method}-{seed}.json"
                found[path] = json.dumps(numbers, indent=1) + "\n"
    return found


def numbers_of(phase: Phase, method: str, seed: int) -> dict[str, float]:
    """At most ``MOST`` numbers of one model: its score first, then under attack, routing, cost."""
    model = phase.models[method][seed]
    metrics = {metric.name: metric for metric in metrics_of(phase)}
    first = [name for name in NAMES[:2] if name in metrics]
    wanted = dict.fromkeys([*first, *attacked_names(phase), *NAMES])
    known = [metrics[name] for name in wanted if name in metrics][:MOST]
    read = {metric.name: metric.read(model) for metric in known}
    return {name: rounded(found.value) for name, found in read.items() if found is not None}


def rounded(value: float) -> float:
    """The value with ``DIGITS`` significant digits; counts stay whole."""
    return int(value) if value.is_integer() else float(f"{value:.{DIGITS}g}")
