"""The headline numbers of every run, a file each, for ``dvc metrics show`` and experiments."""

import json
from collections.abc import Sequence

from moecore.measure.sizes import Result as Sizes
from moecore.report.column import Metric
from moecore.report.measured import Measured, Phase, Results
from moecore.report.measures import sizes
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
    if counted := results.alone.get(Sizes):
        numbers = {
            f"{model}, {name}": rounded(float(one["ours"]))
            for model, metrics in sizes.flat(counted).items()
            for name, one in metrics.items()
        }
        found["metrics/sizes.json"] = json.dumps(numbers, indent=1) + "\n"
    for phase in results.phases.values():
        metrics = wanted(phase)
        for method, seeds in phase.models.items():
            for seed, model in seeds.items():
                numbers = numbers_of(model, metrics)
                path = f"metrics/{phase.name}/{method}-{seed}.json"
                found[path] = json.dumps(numbers, indent=1) + "\n"
    return found


def wanted(phase: Phase) -> list[Metric]:
    """At most ``MOST`` that any model has: the score first, then under attack, routing, cost."""
    metrics = {metric.name: metric for metric in metrics_of(phase)}
    first = [name for name in NAMES[:2] if name in metrics]
    names = dict.fromkeys([*first, *attacked_names(phase), *NAMES])
    return [metrics[name] for name in names if name in metrics][:MOST]


def numbers_of(model: Measured, metrics: Sequence[Metric]) -> dict[str, float]:
    """Those of the metrics that the model has."""
    read = {metric.name: metric.read(model) for metric in metrics}
    return {name: rounded(found.value) for name, found in read.items() if found is not None}


def rounded(value: float) -> float:
    """The value with ``DIGITS`` significant digits; counts stay whole."""
    return int(value) if value.is_integer() else float(f"{value:.{DIGITS}g}")
