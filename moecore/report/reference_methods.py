"""The methods that all others are compared with: the baseline MoE, and the dense model."""

from moecore.measure.routing import Routing
from moecore.report.column import ColumnContext
from moecore.report.typed_results import Measured, Models, Phase, list_without_none

BASELINE = "vmoe"
DENSE = "dense"
CEILING = "told"  # routed by the truth of generated data


def find_moe_baseline(models: Models) -> str:
    """``vmoe`` where it is there, else the first method with MoE layers; "" where none has.

    The ceiling only where no other method has them.
    """
    if BASELINE in models:
        return BASELINE
    routed = [method for method, seeds in models.items() if any(map(has_experts, seeds.values()))]
    return min(routed, key=lambda method: method == CEILING, default="")


def has_moe_method(models: Models) -> bool:
    """Whether any method has experts to choose from."""
    return bool(find_moe_baseline(models))


def references(models: Models) -> list[str]:
    """Those of the two that the study has."""
    return [name for name in dict.fromkeys((find_moe_baseline(models), DENSE)) if name in models]


def has_experts(model: Measured) -> bool:
    """Whether its routing was measured, or a token uses a part of its parameters only."""
    if model.of(Routing) is not None:
        return True
    trained = model.outcome
    return trained is not None and trained.active_parameters != trained.parameters


def column_context(phase: Phase, kind: type) -> ColumnContext:
    """Return what columns of results of this type may depend on."""
    method = find_moe_baseline(phase.models)
    rivals = phase.models.get(method, {})
    beside = [
        (one, other)
        for seeds in phase.models.values()
        for seed, model in seeds.items()
        if seed in rivals and (one := model.of(kind)) and (other := rivals[seed].of(kind))
    ]
    of_baseline, of_dense = (
        list_without_none(model.of(kind) for model in phase.models.get(name, {}).values())
        for name in (method, DENSE)
    )
    return ColumnContext(phase.task, phase.results(kind), method, of_baseline, of_dense, beside)
