"""Checks of routers, balances and experts.

B images, T tokens per image, E experts, R rows, d width.
"""

import copy
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from moecore.core.files import UserError
from moecore.core.routing_records import RoutingContext
from moecore.nn.balances.base import Balance
from moecore.nn.balances.loss_free import LossFree
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
from moecore.testing.laws import LAWS, check_law
from moecore.testing.targets import NotPromised, Outcome, Target
from moecore.training.meter import sum_layer_routing
from moecore.training.monitor import LayerTotals, Monitor, build_routing_point
from moecore.training.regularizers.switch_balance import SwitchBalance

WIDTH = 12
TOKENS = 29  # enough that experts' rows are padded on a CPU
EXPERTS = Mlp(number=4, hidden_ratio=1.5)
LEAVES_TOKENS_OUT = ("relu", "depth")  # kinds of routers whose tokens may choose no expert


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
    before = copy.deepcopy(layer.state_dict())
    moe.update_routers(layer, layer(seeded_randn(3, TOKENS, WIDTH))[1])
    assert_that(settings.balance, has_same_state(layer, before), "evaluation teaches it nothing")


def build_drawn_layer(router: Any, experts: Any = EXPERTS) -> moe.MoEFeedForward:
    """Return a layer of this router and these experts with large random weights."""
    layer = moe.build_moe_feed_forward(router, experts, WIDTH)
    draw_weights(layer)
    return layer


def describe_own_layer(router: Any, experts: Any = EXPERTS, name: str = "") -> Target:
    """Return a layer of ours as a target of the laws, with DeepSeek-V3's balance loss."""
    balance = SwitchBalance(level="sequence")
    layer = build_drawn_layer(router, experts)
    learns = router.chooses_per_token and router.has_expert_rows
    has_loss = learns and getattr(router, "inference", "student") == "student"

    def run_own_layer(layer: Any, tokens: Tensor) -> Outcome:
        with torch.autocast("cpu", enabled=False):
            context = derive_context(router, layer, tokens)
        output, (record,) = layer(tokens, context)
        outcome = {**record._asdict(), "weights": record.combine, "record": record}
        counts = record.chosen.flatten(0, -2).sum(dim=0)
        totals = LayerTotals.of(sum_layer_routing(record).tolist())
        point = build_routing_point(1, {"": totals}, None, Monitor()).layers[""]
        if point.max_violation is not None:
            outcome["statistics"] = {"max_violation": point.max_violation}
        if has_loss:
            outcome["loss"] = balance.of_layer(record)
        return {**outcome, "output": output, "counts": counts}

    def sum_own_parts(layer: Any, tokens: Tensor, outcome: Outcome) -> tuple[Tensor, Any]:
        outputs = list_expert_outputs(layer.experts, tokens)
        rest = torch.zeros_like(tokens)
        if layer.zero_computation is not None:
            weights = outcome["weights"][..., layer.number :]
            rest = rest + layer.zero_computation(tokens, weights)
        if layer.shared is not None:
            rest = rest + layer.shared(single_expert_rows(tokens)).view_as(tokens)
        return outputs, rest

    is_linear = isinstance(router, NoisyTopK) and router.has_equal_rows and not router.residual
    bias = "router.balance.bias" if isinstance(getattr(router, "balance", None), LossFree) else None
    return Target(
        name=name or router.kind,
        build=lambda: build_drawn_layer(router, experts),
        run=run_own_layer,
        width=WIDTH,
        experts=count_candidate_experts(layer),
        batch=2 * coupled_image_count(layer),
        tokens=TOKENS,
        loss_mean="sequence" if has_loss else None,
        even_loss=1.0 if has_loss and router.kind not in LEAVES_TOKENS_OUT else None,
        loss_in_training=False,
        causal=is_causal(router),
        same_bits=True,
        parts=sum_own_parts,
        k=getattr(moe.scale_router_k(router, experts), "k", None) if is_linear else None,
        score=router.score if is_linear and router.score != "sqrt_softplus" else None,
        weights_sum=router.scale if is_linear and router.renormalise else None,
        scale=router.scale if is_linear else 1.0,
        selection_bias=bias,
        after_step=lambda layer, outcome: moe.update_routers(layer, [outcome["record"]], 0.0),
        not_promised=dict(list_own_exceptions(router, layer)),
    )


def list_own_exceptions(router: Any, layer: moe.MoEFeedForward) -> Iterator[tuple[str, str]]:
    """Yield (law, reason) for the laws that a router of ours does not promise."""
    wants = router.wants - {"outputs"}
    if getattr(router, "eval_capacity_factor", None) is not None:
        yield "permute tokens", "tokens are served in their order"
    if "attention" in wants or getattr(router, "by", None) == "position":
        for law in ("permute tokens", "push to even load"):
            yield law, "the routing depends on positions"
    if not router.has_expert_rows or wants & {"previous", "teacher", "attention"}:
        yield "permute experts", "the routing depends on the experts' numbers"
    if layer.zero_computation is not None:
        yield "permute experts", "the last experts have no network"
    if router.looks_ahead_in_training:
        yield "hide later tokens in training", "causal in evaluation only"
    if layer.shares_basis:
        for law in ("count dispatched tokens", "loss and experts"):
            yield law, "the router reads the experts' parameters"
        return
    tokens = seeded_randn(coupled_image_count(layer), TOKENS, WIDTH)
    rows = layer.eval().router(tokens, derive_context(router, layer, tokens))[0].dispatch(tokens)
    is_token = (rows.values[:, None] == tokens.flatten(0, 1)).all(dim=-1).any(dim=-1)
    if not is_token.all() or rows.shares is not None:
        yield "sum weighted experts", "experts get mixtures of tokens, or are mixed"


def derive_context(router: Any, layer: moe.MoEFeedForward, tokens: Tensor) -> RoutingContext:
    """Return a context with what ``router.wants`` names, all functions of the tokens (B, T, d).

    A token's attention to later ones is 0; every other field depends on the token alone.
    """
    values = tokens.detach()
    experts = count_candidate_experts(layer)
    later = torch.ones(*values.shape[1:2] * 2, dtype=torch.bool).triu(1)
    likeness = 3 * (7 * (values[..., :1] - values[..., 1:2].mT)).sin()
    number = (values[..., 0] * 1000).long().abs()

    def draw_features(size: int) -> Tensor:
        shifts = torch.arange(size, device=values.device)
        return (values[..., shifts % values.shape[-1]] * (2 + shifts)).sin() * 3

    fields = {
        "attention": likeness.masked_fill(later, -torch.inf).softmax(dim=-1),
        "attended": values.roll(1, dims=-1),
        "patches": draw_features(12).sigmoid(),
        "words": number,
        "teacher": draw_features(experts).softmax(dim=-1),
        "previous": draw_features(experts),
        "truth": number % (experts + 1),
    }
    inputs = {name: value for name, value in fields.items() if name in router.wants}
    return RoutingContext(**inputs, progress=0.0)


def count_candidate_experts(layer: moe.MoEFeedForward) -> int:
    """Return the number of experts that a router chooses among, also those without computation."""
    zero_experts = layer.zero_computation
    return layer.number + (0 if zero_experts is None else sum(zero_experts.sizes))


def is_causal(router: Any) -> bool:
    """Return whether the router accepts ``check_causal``: it does not use later tokens."""
    try:
        router.check_causal()
    except UserError:
        return False
    return not router.wants & moe.NOT_IN_TEXTS


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


def list_expert_outputs(experts: ExpertsModule, tokens: Tensor) -> Tensor:
    """Return the outputs of all experts for tokens (B, T, d), (B, T, N, d)."""
    values = tokens.flatten(0, 1)
    number = len(next(experts.parameters()))
    outputs = []
    for expert in range(number):
        ends = torch.zeros(number, dtype=torch.int32)
        ends[expert:] = len(values)
        outputs.append(experts(Rows(values, ends)).view_as(tokens))
    return torch.stack(outputs, dim=2)


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
