"""A small step of every method: forward, losses and backward, before anything trains.

A part from outside is held to what ``moecore.testing`` asks of all, with its own settings. A
UserError is no fault: it refuses so small a model, and a note says that it was not tried. Those of
full size are built elsewhere.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from moecore.core.files import UserError
from moecore.core.outside_packages import DOTTED_NAME, last_line
from moecore.nn.layers.moe import MoESettings
from moecore.study.reading.study import Misfits, Study
from moecore.testing import (
    check_calibrator,
    check_experts,
    check_regularizer,
    check_router,
)
from moecore.testing.small_models import small_step, small_vit
from moecore.training.objective import Objective
from moecore.training.regularizers.base import Regularizer

Check = tuple[tuple, Any, Callable[..., None]]  # keys of a part, the part, what it is held to


def step_misfits(study: Study, notes: list[str]) -> Misfits:
    """Yield what is wrong with a step of each method of ``run.methods``, and with a calibrator.

    notes: gets a line for each part from outside that refuses to be tried.
    """
    for name in study.run.methods:
        method = study.methods[name]
        towers = (((), method, method.losses), (("text",), method.text, method.text_losses))
        for place, tower, losses in towers:
            if tower is not None and tower.router is not None and tower.experts is not None:
                moe = MoESettings(router=tower.router, experts=tower.experts, blocks="all")
                yield from _layer_misfits(moe, losses, ("methods", name, *place), notes)
    if study.calibrate is not None:
        calibrator = study.calibrate.calibrator
        keys = ("calibrate", "calibrator")
        yield from _outside_misfits([(keys, calibrator, check_calibrator)], notes)


def _layer_misfits(
    moe: MoESettings, losses: Sequence[Regularizer], keys: tuple, notes: list[str]
) -> Misfits:
    """Yield the faults of parts from outside, by their keys; where there are none, of the step."""
    checks: list[Check] = [
        ((*keys, "experts"), moe.experts, check_experts),
        ((*keys, "router"), moe.router, partial(check_router, experts=moe.experts)),
        *(((*keys, "regularizers", at), loss, check_regularizer) for at, loss in enumerate(losses)),
    ]
    faults = list(_outside_misfits(checks, notes))
    steps = _faults([], _step, moe, losses) if not faults else ()
    yield from faults or [(keys, f"a small step fails: {fault}") for fault in steps]


def _outside_misfits(checks: Sequence[Check], notes: list[str]) -> Misfits:
    for keys, part, check in checks:
        if DOTTED_NAME.fullmatch(part.kind):
            refusals: list[str] = []
            for fault in _faults(refusals, check, part):
                text = f"found {part.kind}, which breaks what moecore.testing asks: {fault}"
                yield keys, text
            notes += [f"{part.kind} was not tried in small: {refusal}" for refusal in refusals]


def _faults(refusals: list[str], check: Callable[..., None], *parts: Any) -> Iterator[str]:
    """Yield in a line why a check fails; the draws of the caller stay what they were.

    refusals: gets the UserError of parts that refuse so small a model.
    """
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            check(*parts)
    except UserError as error:
        refusals.append(str(error))
    except AssertionError as error:
        yield str(error) or last_line(error)
    except Exception as error:
        yield last_line(error)


def _step(moe: MoESettings, losses: Sequence[Regularizer]) -> None:
    """Raise AssertionError, in a line, where a step of a small ViT with these layers is wrong."""
    model = small_vit(moe=moe)
    step = small_step(model)
    objective = Objective(losses)
    terms = objective.terms(step)
    for name, term in terms.items():
        assert term.ndim == 0 and term.isfinite(), f"the loss {name} is no finite scalar"
    objective.total(terms).backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert parameter.grad.isfinite().all(), f"the gradient of {name} is not finite"
