"""What all experts promise, as a function that a test calls in one line.

E experts, R rows, d width.
"""

import copy
from typing import Any

import torch
from torch import Tensor

from moecore.nn.dispatch import Rows
from moecore.nn.experts.base import Experts, ExpertsModule
from moecore.testing.check_helpers import (
    assert_that,
    draw_weights,
    is_close,
    seeded_randn,
    settings_of,
)

WIDTH = 8
ROWS = 5  # of each expert but the last, which has none


def check_experts(experts: Experts | type[Experts]) -> None:
    """Raise AssertionError, in one line, where experts break a promise of experts.

    experts: settings, or their class, whose defaults are then checked. A row is the answer of its
    own expert to itself alone, whatever the others are. An expert with rows has gradients, one
    without has zeros. Evaluation draws nothing, weights are all there is to save, and lent bases
    are (E, d, r).
    """
    settings = settings_of(experts)
    module = settings.build(WIDTH)
    draw_weights(module)
    number = settings.networks
    values = seeded_randn((number - 1) * ROWS, WIDTH)
    ends = ROWS * torch.arange(1, number + 1, dtype=torch.int32).clamp(max=number - 1)
    _check_rows(settings, module.eval(), values, ends)
    _check_gradients(settings, module, Rows(values, ends))
    resumed = settings.build(WIDTH).eval()
    resumed.load_state_dict(copy.deepcopy(module.state_dict()))
    same = torch.equal(resumed(Rows(values, ends)), module(Rows(values, ends)))
    assert_that(settings, same, "a module with the same state_dict computes the same")
    _check_lent_basis(settings, module)


def _check_rows(experts: Any, module: ExpertsModule, values: Tensor, ends: Tensor) -> None:
    before = torch.get_rng_state()
    answers = module(Rows(values, ends))
    assert_that(experts, torch.equal(before, torch.get_rng_state()), "evaluation draws no number")
    assert_that(experts, answers.shape == values.shape, "rows (R, d) give rows (R, d)")
    assert_that(
        experts, module(Rows(values[:0], 0 * ends)).shape == (0, WIDTH), "no rows give none"
    )
    for place in (0, len(values) - 1):
        one = (torch.arange(len(ends)) >= place // ROWS).int()
        alone = module(Rows(values[place : place + 1], one))
        assert_that(experts, is_close(alone[0], answers[place]), "a row depends on no other row")
    other = module(Rows(values[:1], (torch.arange(len(ends)) >= 1).int()))
    assert_that(
        experts, not is_close(other[0], answers[0]), "experts differ where their weights do"
    )


def _check_gradients(experts: Any, module: ExpertsModule, rows: Rows) -> None:
    leaf = rows.values.clone().requires_grad_()
    loss = module(rows._replace(values=leaf)).square().sum()
    parameters = dict(module.named_parameters())
    gradients = torch.autograd.grad(loss, [leaf, *parameters.values()], allow_unused=True)
    assert_that(experts, gradients[0] is not None and gradients[0].any(), "rows have a gradient")
    for name, gradient in zip(parameters, gradients[1:], strict=True):
        assert_that(experts, gradient is not None, f"{name} has a gradient")
        assert_that(experts, gradient.isfinite().all(), f"the gradient of {name} is finite")
        if len(gradient) == experts.networks:
            assert_that(experts, gradient[0].any(), f"{name} of an expert with rows has a gradient")
            idle = gradient[-1].any()
            assert_that(
                experts, not idle, f"the gradient of {name} is 0 for an expert without rows"
            )


def _check_lent_basis(experts: Any, module: ExpertsModule) -> None:
    basis = module.lent_basis()
    provides = "basis" in experts.provides
    assert_that(experts, provides == (basis is not None), "a basis is lent where provides says so")
    if basis is not None:
        fits = basis.ndim == 3 and basis.shape[:2] == (experts.networks, WIDTH)
        assert_that(experts, fits, "a lent basis is (E, d, r)")
