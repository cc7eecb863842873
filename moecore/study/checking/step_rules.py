"""A small step of every method: forward, losses and backward, before anything trains.

A part from outside is held to what ``moecore.testing`` asks of all, with its own settings. A
UserError is no fault: it refuses so small a model. Those of full size are built elsewhere.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from moecore.core.files import UserError
from moecore.core.outside_packages import DOTTED_NAME, last_line
from moecore.nn.layers.moe import MoESettings
from moecore.study.reading.study import Misfits, Study
from moecore.testing import check_experts, check_regularizer, check_router
from moecore.testing.small_models import small_step, small_vit
from moecore.training.objective import Objective
from moecore.training.regularizers.base import Regularizer


def step_misfits(study: Study) -> Misfits:
    """Yield what is wrong with a step of each method of ``run.methods``."""
    for name in study.run.methods:
        method = study.methods[name]
        towers = (((), method, method.losses), (("text",), method.text, method.text_losses))
        for place, tower, losses in towers:
            if tower is not None and tower.router is not None and tower.experts is not None:
                moe = MoESettings(router=tower.router, experts=tower.experts, blocks="all")
                for keys, text in _layer_misfits(moe, losses):
                    yield ("methods", name, *place, *keys), text


def _layer_misfits(moe: MoESettings, losses: Sequence[Regularizer]) -> Misfits:
    """Yield the faults of parts from outside, by their keys; where there are none, of the step."""
    checks: list[tuple[tuple, Any, Callable]] = [
        (("experts",), moe.experts, check_experts),
        (("router",), moe.router, partial(check_router, experts=moe.experts)),
        *((("regularizers", at), loss, check_regularizer) for at, loss in enumerate(losses)),
    ]
    faults = [
        (keys, f"found {part.kind}, which breaks what moecore.testing asks: {fault}")
        for keys, part, check in checks
        if DOTTED_NAME.fullmatch(part.kind)
        for fault in _faults(check, part)
    ]
    yield from faults or [((), f"a small step fails: {one}") for one in _faults(_step, moe, losses)]


def _faults(check: Callable[..., None], *parts: Any) -> Iterator[str]:
    """Yield in a line why a check fails; the draws of the caller stay what they were."""
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            check(*parts)
    except UserError:
        return
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
