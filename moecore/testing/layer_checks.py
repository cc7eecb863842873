"""Checks of routers, balances and experts.

B images, T tokens per image, E experts, R rows, d width.
"""

import copy
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from moecore.conformance.laws import LAWS, check_law
from moecore.conformance.own_layers import (
    EXPERTS,
    TOKENS,
    WIDTH,
    build_drawn_layer,
    count_candidate_experts,
    derive_context,
    describe_own_layer,
)
from moecore.conformance.targets import (
    NotPromised,
    draw_weights,
    has_same_state,
    is_close,
    seeded_randn,
)
from moecore.nn.balances.base import Balance
from moecore.nn.dispatch import Rows
from moecore.nn.experts.base import Experts, ExpertsModule
from moecore.nn.layers import moe
from moecore.nn.predict import coupled_image_count
from moecore.nn.routers.base import Router
from moecore.nn.routers.noisy_top_k import NoisyTopK
from moecore.testing.check_helpers import (
    assert_that,
    check_build_on_meta,
    instantiate_settings,
    name_part_in_errors,
)


@name_part_in_errors
def check_router(router: Router | type[Router], experts: Experts = EXPERTS) -> None:
    """Check that a router keeps the promises of routers.

    The record has the right shapes, dtypes and sums, also under autocast. The layer is the sum of
    the experts weighted by ``combine``, in outputs and gradients, also if k is the number of
    experts. A gradient reaches the router. Evaluation draws no random number and does not depend on
    the batch. A resumed training continues with the same bits. A router that passes
    ``check_causal`` never uses later tokens (with ``looks_ahead_in_training``: in evaluation).

    Args:
        router: settings, or their class, whose defaults are checked.
        experts: settings of the layer's experts.

    Raises:
        AssertionError: a promise is broken; one line with the router's name.
    """
    settings = instantiate_settings(router)
    check_build_on_meta(settings, lambda: moe.build_moe_feed_forward(settings, experts, WIDTH))
    _check_record(settings, build_drawn_layer(settings, experts))
    target = describe_own_layer(settings, experts)
    checks = [(law, target) for law in LAWS.values() if law.ranks == 1]
    if hasattr(settings, "k"):
        full = describe_own_layer(settings.with_k(experts.number), experts)
        checks.append((LAWS["sum weighted experts"], full))
    for law, target in checks:
        with suppress(NotPromised):
            try:
                check_law(law, target)
            except AssertionError as error:
                raise AssertionError(f"{type(settings).__name__}: {error}") from error


@name_part_in_errors
def check_balance(balance: Balance | type[Balance]) -> None:
    """Check that a balance keeps the promises of balances.

    A router with the balance passes ``check_router``, and evaluation does not change its state.

    Args:
        balance: settings, or their class, whose defaults are checked.

    Raises:
        AssertionError: a promise is broken; one line with the name of the balance or the router.
    """
    settings = NoisyTopK(score="sigmoid", balance=instantiate_settings(balance))
    check_router(settings)
    layer = build_drawn_layer(settings).eval()
    before = copy.deepcopy(layer.state_dict())
    moe.update_routers(layer, layer(seeded_randn(3, TOKENS, WIDTH))[1])
    assert_that(settings.balance, has_same_state(layer, before), "evaluation teaches it nothing")


def _check_record(router: Any, layer: moe.MoEFeedForward) -> None:
    tokens = seeded_randn(3 * coupled_image_count(layer), TOKENS, WIDTH)
    context = derive_context(router, layer, tokens)
    for training in (True, False):
        output, (record,) = layer.train(training)(tokens, context)
        shape = (*tokens.shape[:2], count_candidate_experts(layer))
        assert_that(router, output.shape == tokens.shape, "tokens keep their shape")
        if record.penalty is not None:
            is_right = training and record.penalty.shape == tokens.shape[:2]
            promise = "a penalty has the shape (B, T), and is of training alone"
            assert_that(router, is_right, promise)
        for name, field in zip(record._fields, record[:-1], strict=False):
            assert_that(router, field.shape == shape, f"{name} has the shape (B, T, E)")
            assert_that(router, field.isfinite().all(), f"{name} is finite")
            dtype = torch.bool if name == "chosen" else torch.float32
            assert_that(router, field.dtype == dtype, f"{name} is {dtype}")
        sums = record.probs.sum(dim=-1)
        assert_that(router, is_close(sums, torch.ones_like(sums)), "probs of a token sum to 1")
        assert_that(router, (record.probs >= 0).all(), "probs are not negative")
        inside = (record.load >= 0) & (record.load <= 1)
        assert_that(router, inside.all(), "load lies between 0 and 1")
        unchosen = record.combine[~record.chosen].any()
        assert_that(router, not unchosen, "combine is 0 where an expert is not chosen")


ROWS = 5  # per expert, except the last one, which has none


@name_part_in_errors
def check_experts(experts: Experts | type[Experts]) -> None:
    """Check that experts keep the promises of experts.

    An output row depends only on its input row and its expert. An expert with rows has gradients,
    an expert without rows has zeros. Evaluation draws no random number, the state_dict is the whole
    state, and lent bases are (E, d, r).

    Args:
        experts: settings, or their class, whose defaults are checked.

    Raises:
        AssertionError: a promise is broken; one line with the experts' name.
    """
    settings = instantiate_settings(experts)
    check_build_on_meta(settings, lambda: settings.build(WIDTH))
    module = settings.build(WIDTH)
    draw_weights(module)
    number = settings.networks
    for name, weight in module.named_parameters():
        assert_that(settings, weight.shape[:1] == (number,), f"{name} has a row per expert, (E, …)")
    values = seeded_randn((number - 1) * ROWS, WIDTH)
    ends = ROWS * torch.arange(1, number + 1, dtype=torch.int32).clamp(max=number - 1)
    _check_rows(settings, module.eval(), values, ends)
    _check_gradients(settings, module, Rows(values, ends))
    resumed = settings.build(WIDTH).eval()
    resumed.load_state_dict(copy.deepcopy(module.state_dict()))
    same = torch.equal(resumed(Rows(values, ends)), module(Rows(values, ends)))
    assert_that(settings, same, "a module with the same state_dict computes the same")
    basis = module.lent_basis()
    provides = "basis" in settings.provides
    assert_that(settings, provides == (basis is not None), "a basis is lent where provides says so")
    if basis is not None:
        fits = basis.ndim == 3 and basis.shape[:2] == (number, WIDTH)
        assert_that(settings, fits, "a lent basis is (E, d, r)")


def _check_rows(experts: Any, module: ExpertsModule, values: Tensor, ends: Tensor) -> None:
    before = torch.get_rng_state()
    answers = module(Rows(values, ends))
    assert_that(experts, torch.equal(before, torch.get_rng_state()), "evaluation draws no number")
    assert_that(experts, answers.shape == values.shape, "rows (R, d) give rows (R, d)")
    empty = module(Rows(values[:0], 0 * ends))
    assert_that(experts, empty.shape == (0, WIDTH), "no rows give none")
    for place in (0, len(values) - 1):
        ends_of_row = (torch.arange(len(ends)) >= place // ROWS).int()
        alone = module(Rows(values[place : place + 1], ends_of_row))
        assert_that(experts, is_close(alone[0], answers[place]), "a row depends on no other row")
    other = module(Rows(values[:1], (torch.arange(len(ends)) >= 1).int()))
    differ = not is_close(other[0], answers[0])
    assert_that(experts, differ, "experts differ where their weights do")


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
            promise = f"the gradient of {name} is 0 for an expert without rows"
            assert_that(experts, not gradient[-1].any(), promise)
