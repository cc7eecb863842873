"""Checks of routers, balances and experts.

B images, T tokens per image, E experts, R rows, d width.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moecore.core.files import UserError
from moecore.core.routing_records import RoutingContext
from moecore.nn.balances.base import Balance
from moecore.nn.dispatch import Rows, single_expert_rows
from moecore.nn.experts.base import Experts, ExpertsModule
from moecore.nn.experts.mlp import Mlp
from moecore.nn.layers import moe
from moecore.nn.predict import coupled_image_count
from moecore.nn.routers.base import Router
from moecore.nn.routers.noisy_top_k import NoisyTopK
from moecore.testing.check_helpers import (
    assert_that,
    check_build_on_meta,
    draw_weights,
    has_same_state,
    is_close,
    names_the_part,
    seeded_randn,
    settings_of,
)

WIDTH = 8
TOKENS = 29  # enough that experts' rows are padded on a CPU
EXPERTS = Mlp(number=4, hidden_ratio=1.5)


@names_the_part
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
    settings = settings_of(router)
    check_build_on_meta(settings, lambda: moe.build_moe_feed_forward(settings, experts, WIDTH))
    layer = build_drawn_layer(settings, experts)
    _check_record(settings, layer)
    _check_weighted_sum(settings, layer)
    if hasattr(settings, "k"):
        full = settings.with_k(experts.number)  # of whole networks
        _check_weighted_sum(full, build_drawn_layer(full, experts))
    _check_gradient(settings, layer)
    _check_evaluation(settings, layer)
    _check_autocast(settings, layer)
    _check_resuming(settings, experts)
    if is_causal(settings):
        _check_causality(settings, layer)


@names_the_part
def check_balance(balance: Balance | type[Balance]) -> None:
    """Check that a balance keeps the promises of balances.

    A router with the balance passes ``check_router``, and evaluation does not change its state.

    Args:
        balance: settings, or their class, whose defaults are checked.

    Raises:
        AssertionError: a promise is broken; one line with the name of the balance or the router.
    """
    settings = NoisyTopK(score="sigmoid", balance=settings_of(balance))
    check_router(settings)
    layer = build_drawn_layer(settings).eval()
    tokens, context = make_tokens_and_context(settings, layer)
    before = copy.deepcopy(layer.state_dict())
    moe.update_routers(layer, layer(tokens, context)[1])
    assert_that(settings.balance, has_same_state(layer, before), "evaluation teaches it nothing")


def build_drawn_layer(router: Any, experts: Any = EXPERTS) -> moe.MoEFeedForward:
    """Return a layer of this router and these experts with large random weights."""
    layer = moe.build_moe_feed_forward(router, experts, WIDTH)
    draw_weights(layer)
    return layer


def make_tokens_and_context(
    router: Any, layer: moe.MoEFeedForward, seed: int = 1
) -> tuple[Tensor, RoutingContext]:
    """Return tokens (B, T, d) and a context with what ``router.wants`` names, of random numbers."""
    # A group shares the experts' capacity; attention of a token is 0 for later ones.
    batch = 3 * coupled_image_count(layer)
    tokens = seeded_randn(batch, TOKENS, WIDTH, seed=seed)
    later = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    scores = seeded_randn(batch, TOKENS, TOKENS, seed=seed + 1).masked_fill(later, -torch.inf)
    experts = count_candidate_experts(layer)
    fields = {
        "attention": scores.softmax(dim=-1),
        "attended": seeded_randn(batch, TOKENS, WIDTH, seed=seed + 2),
        "patches": seeded_randn(batch, TOKENS, 12, seed=seed + 3).sigmoid(),
        "words": torch.arange(batch * TOKENS).view(batch, TOKENS),
        "teacher": (2 * seeded_randn(batch, TOKENS, experts, seed=seed + 4)).softmax(dim=-1),
        "previous": seeded_randn(batch, TOKENS, experts, seed=seed + 5),
        "truth": torch.arange(batch * TOKENS).view(batch, TOKENS) % (experts + 1),
    }
    inputs = {name: value for name, value in fields.items() if name in router.wants}
    return tokens, RoutingContext(**inputs, progress=0.0)


def count_candidate_experts(layer: moe.MoEFeedForward) -> int:
    """Return the number of experts that a router chooses among, also those without computation."""
    zero_experts = layer.zero_computation
    return layer.number + (0 if zero_experts is None else sum(zero_experts.sizes))


def map_context_tensors(
    context: RoutingContext, change: Callable[[Tensor], Tensor]
) -> RoutingContext:
    """Return the context with ``change`` applied to each of its tensors."""
    changed: dict[str, Any] = {
        name: change(field)
        for name, field in context._asdict().items()
        if isinstance(field, Tensor)
    }
    return context._replace(**changed)


def is_causal(router: Any) -> bool:
    """Return whether the router accepts ``check_causal``: it does not use later tokens."""
    try:
        router.check_causal()
    except UserError:
        return False
    return not router.wants & moe.NOT_IN_TEXTS


def _check_record(router: Any, layer: moe.MoEFeedForward) -> None:
    tokens, context = make_tokens_and_context(router, layer)
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


def _check_weighted_sum(router: Any, layer: moe.MoEFeedForward) -> None:
    """Raise AssertionError unless the layer is the sum of all experts, weighted by ``combine``."""
    tokens, context = make_tokens_and_context(router, layer)
    if not layer.eval().shares_basis:
        rows = layer.router(tokens, context)[0].dispatch(tokens)
        is_token = (rows.values[:, None] == tokens.flatten(0, 1)).all(dim=-1).any(dim=-1)
        if not is_token.all() or rows.shares is not None:  # mixtures of tokens, or of networks
            return

    def slow(twin: moe.MoEFeedForward, values: Tensor) -> Tensor:
        combine = twin(values, context)[1][0].combine
        routed = sum_all_experts(twin.experts, values, combine)
        if twin.zero_computation is not None:
            weights = combine[..., twin.number :]
            routed = routed + twin.zero_computation(values, weights)
        if twin.shared is None:
            return routed
        return routed + twin.shared(single_expert_rows(values)).view_as(values)

    promise = "the layer is the sum of all experts, weighted by combine"
    for training in (True, False):
        twin = copy.deepcopy(layer.train(training))  # with the state before the layer's call
        theirs = _outputs_and_gradients(twin, tokens, slow)
        ours = _outputs_and_gradients(
            layer, tokens, lambda module, values: module(values, context)[0]
        )
        assert_that(router, is_close(ours[0], theirs[0]), promise)
        agree = all(map(is_close, ours[1:], theirs[1:]))
        assert_that(router, agree, f"{promise}, in gradients too")


def sum_all_experts(experts: ExpertsModule, tokens: Tensor, combine: Tensor) -> Tensor:
    """Return the sum of all experts on tokens (B, T, d), weighted by ``combine`` (B, T, E)."""
    values = tokens.flatten(0, 1)
    number = len(next(experts.parameters()))
    total = torch.zeros_like(values)
    for expert in range(number):
        ends = torch.zeros(number, dtype=torch.int32)
        ends[expert:] = len(values)
        total = total + combine[..., expert].reshape(-1, 1) * experts(Rows(values, ends))
    return total.view_as(tokens)


def _outputs_and_gradients(
    layer: moe.MoEFeedForward,
    tokens: Tensor,
    forward: Callable[[moe.MoEFeedForward, Tensor], Tensor],
) -> list[Tensor]:
    """Return the output, then gradients of a projection of it for tokens and each parameter."""
    leaf = tokens.clone().requires_grad_()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)  # the same noise for both layers
        output = forward(layer, leaf)
    projection = seeded_randn(*output.shape, seed=9)
    inputs = [leaf, *layer.parameters()]
    gradients = torch.autograd.grad(output, inputs, projection, materialize_grads=True)
    return [output, *gradients]


def _check_gradient(router: Any, layer: moe.MoEFeedForward) -> None:
    parameters = list(layer.router.parameters())
    if not parameters:
        return
    tokens, context = make_tokens_and_context(router, layer)
    with torch.random.fork_rng(devices=[]):
        output, (record,) = layer.train()(tokens, context)
    loss = output.square().sum() + record.probs.square().sum() + record.load.square().sum()
    gradients = torch.autograd.grad(loss, parameters, materialize_grads=True)
    finite = all(gradient.isfinite().all() for gradient in gradients)
    assert_that(router, finite, "gradients of the router are finite")
    reached = any(gradient.any() for gradient in gradients)
    assert_that(router, reached, "a gradient of the output or the record reaches the router")


def _check_evaluation(router: Any, layer: moe.MoEFeedForward) -> None:
    tokens, context = make_tokens_and_context(router, layer.eval())
    before = torch.get_rng_state()
    first, repeated = layer(tokens, context), layer(tokens, context)
    assert_that(router, torch.equal(before, torch.get_rng_state()), "evaluation draws no number")
    ours, theirs = ((output, *record[:-1]) for output, (record,) in (first, repeated))
    assert_that(router, all(map(torch.equal, ours, theirs)), "evaluation gives the same twice")
    group = coupled_image_count(layer)
    alone = layer(tokens[:group], map_context_tensors(context, lambda field: field[:group]))
    promise = "in evaluation an image is routed the same in any batch"
    assert_that(router, is_close(alone[0], first[0][:group]), promise)
    assert_that(router, torch.equal(alone[1][0].chosen, first[1][0].chosen[:group]), promise)


def _check_autocast(router: Any, layer: moe.MoEFeedForward) -> None:
    tokens, context = make_tokens_and_context(router, layer.eval())
    _, (expected,) = layer(tokens, context)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, (record,) = layer(tokens, context)
        _, (rounded,) = layer(tokens.bfloat16(), context)
    promise = "under bf16 autocast the record equals fp32's (nn.kernels.grouped.full_precision)"
    assert_that(router, all(map(torch.equal, record[:-1], expected[:-1])), promise)
    types = all(field.dtype in (torch.float32, torch.bool) for field in rounded[:-1])
    assert_that(router, types, "the record of bf16 tokens is fp32")


def _check_resuming(router: Any, experts: Any) -> None:
    uninterrupted = build_drawn_layer(router, experts)
    _train_steps(router, uninterrupted, range(1))
    resumed = build_drawn_layer(router, experts)
    resumed.load_state_dict(copy.deepcopy(uninterrupted.state_dict()))
    for layer in (uninterrupted, resumed):
        _train_steps(router, layer, range(1, 3))
    promise = "a training that is resumed from its state_dict ends with the same bits"
    assert_that(router, has_same_state(uninterrupted, resumed.state_dict()), promise)


def _train_steps(router: Any, layer: moe.MoEFeedForward, steps: range) -> None:
    layer.train()
    for step in steps:
        tokens, context = make_tokens_and_context(router, layer, seed=100 + 10 * step)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(step)
            output, (record,) = layer(tokens, context)
        parameters = [weight for weight in layer.parameters() if weight.requires_grad]
        loss = output.square().mean() + record.probs.square().mean() + record.load.mean()
        gradients = torch.autograd.grad(loss, parameters, materialize_grads=True)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter -= 0.1 * gradient
        moe.update_routers(layer, [record], progress=0.0)


def _check_causality(router: Any, layer: moe.MoEFeedForward) -> None:
    layer = copy.deepcopy(layer).double()
    tokens, context = make_tokens_and_context(router, layer)
    tokens = tokens.double()
    context = map_context_tensors(context, Tensor.double)
    promise = "it says that it is causal: a later token, or another text, never moves a token"
    modes = [False] if router.looks_ahead_in_training else [True, False]
    for training in modes:
        layer.train(training)
        expected = _seeded_call(layer, tokens, context)
        for place in (1, TOKENS // 2, TOKENS - 1):
            changed = tokens.clone()
            changed[0, place:] = -changed[0, place:]
            moved = (_seeded_call(layer, changed, context) - expected).abs() > 1e-9
            assert_that(router, not moved[0, :place].any() and not moved[1:].any(), promise)


def _seeded_call(layer: moe.MoEFeedForward, tokens: Tensor, context: RoutingContext) -> Tensor:
    """Return the output and the record as one tensor (B, T, d + 5E), with a fixed seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        output, (record,) = layer(tokens, context)
    return torch.cat([output, *(field.to(output.dtype) for field in record[:-1])], dim=-1)


ROWS = 5  # per expert, except the last one, which has none


@names_the_part
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
    settings = settings_of(experts)
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
