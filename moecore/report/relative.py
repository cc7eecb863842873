"""What some columns are divided by: the training time of the baseline MoE, the errors of the dense model."""

from collections.abc import Mapping
from statistics import fmean
from typing import NamedTuple

from moecore.evaluation.corruption_error import Errors, errors_of
from moecore.report.results import Measured

BASELINE, DENSE = "vmoe", "dense"
Models = Mapping[str, Mapping[int, Measured]]  # method → seed → model


class Relative(NamedTuple):
    """Means over the seeds of the methods that others are compared with; None where the study lacks them."""

    method: str = ""  # the baseline MoE
    seconds: float | None = None  # of its training
    errors: Errors | None = None  # of the dense model, by corruption and severity


NONE = Relative()


def relative_to(models: Models) -> Relative:
    """The references of one phase; errors only where the dense model makes some under every corruption, or no ratio is defined."""
    moe, dense = baseline(models), models.get(DENSE, {})
    seconds = fmean(model.trained["seconds"] for model in models[moe].values()) if moe else None
    found = [errors_of(model.corruptions["corruptions"]) for model in dense.values() if model.corruptions]
    errors = {name: {severity: fmean(one[name][severity] for one in found) for severity in row} for name, row in found[0].items()} if found else None
    return Relative(moe, seconds, errors if errors and all(any(row.values()) for row in errors.values()) else None)


def baseline(models: Models) -> str:
    """``vmoe`` where it is there, else the first method with MoE layers; "" where none has."""
    routed = [method for method, seeds in models.items() if any(_routed(model) for model in seeds.values())]
    return BASELINE if BASELINE in models else next(iter(routed), "")


def references(models: Models) -> list[str]:
    """The methods that all others are compared with: the baseline MoE, and the dense model."""
    return [name for name in dict.fromkeys((baseline(models), DENSE)) if name in models]


def _routed(model: Measured) -> bool:
    """Whether a model has MoE layers: its routing was measured, or a token uses a part of its parameters only."""
    return bool(model.routing.get("layers")) or model.trained["active_parameters"] != model.trained["parameters"]
