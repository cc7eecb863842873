"""The parts of all families, imported one family after the other and held against its contract.

Each is looked at before the next is imported: settings are made of the unions, and a part that
lacks something would stop there with words about pydantic's inside.
"""

from collections.abc import Callable, Iterator
from typing import Any, get_args

from pydantic import PydanticUserError

from moecore.core.files import UserError
from moecore.study.contracts import lacks, lacks_of_measurement
from moecore.study.mistakes import mistake_in

# What a file can fail with while it is imported, by what stands in it
MISTAKES = (
    PydanticUserError,
    SyntaxError,
    ImportError,
    NameError,
    AttributeError,
    TypeError,
    ValueError,
)


def check_parts() -> None:
    """Raise UserError, a line per problem, for parts that cannot be what their family says."""
    for family, load in LOADED.items():
        problems = [line for part in _imported(load) for line in lacks(part, family)]
        if problems:
            raise UserError("\n".join(problems))
    measured = _imported(_measurements)
    problems = [line for found in measured for line in lacks_of_measurement(found)]
    if problems:
        raise UserError("\n".join(problems))


def _imported(load: Callable[[], Any]) -> Any:
    """What ``load`` gives; a mistake in a part's file is named with its line."""
    try:
        return load()
    except MISTAKES as error:
        raise UserError(mistake_in(error)) from error


def _members(family: Any) -> tuple[Any, ...]:
    """The classes of ``Annotated[A | B, …]``."""
    union, *_ = get_args(family)
    return get_args(union) or (union,)


def _tasks() -> tuple[Any, ...]:
    from moecore.tasks import AnyTask

    return _members(AnyTask)


def _routers() -> tuple[Any, ...]:
    from moecore.nn.routers import Router

    return _members(Router)


def _experts() -> tuple[Any, ...]:
    from moecore.nn.experts import Experts

    return _members(Experts)


def _backbones() -> tuple[Any, ...]:
    from moecore.nn.backbones import Backbone

    return _members(Backbone)


def _sources() -> tuple[Any, ...]:
    from moecore.data.sources import Source

    return _members(Source)


def _attacks() -> tuple[Any, ...]:
    from moecore.attacks import Attack

    return _members(Attack)


def _regularizers() -> tuple[Any, ...]:
    from moecore.training.regularizers import Regularizer

    return _members(Regularizer)


def _teachers() -> tuple[Any, ...]:
    from moecore.training.teachers import Teacher

    return _members(Teacher)


def _calibrators() -> tuple[Any, ...]:
    from moecore.measure.calibrators import Calibrator

    return _members(Calibrator)


def _measurements() -> Iterator[Any]:
    from moecore.measure import MEASUREMENTS

    return iter(MEASUREMENTS.values())


# From the ground up, as the rooms lie: what is imported later is made of what came before
LOADED: dict[str, Callable[[], tuple[Any, ...]]] = {
    "tasks": _tasks,
    "nn/routers": _routers,
    "nn/experts": _experts,
    "nn/backbones": _backbones,
    "data/sources": _sources,
    "attacks": _attacks,
    "training/regularizers": _regularizers,
    "training/teachers": _teachers,
    "measure/calibrators": _calibrators,
}
