"""Layers of ours as targets of the laws.

B images, T tokens per image, E experts, N of them with parameters, d width.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from moecore.conformance.targets import Outcome, Target, draw_weights, seeded_randn
from moecore.core.files import UserError
from moecore.core.routing_records import RoutingContext
from moecore.nn.balances.loss_free import LossFree
from moecore.nn.dispatch import Rows, single_expert_rows
from moecore.nn.experts.base import ExpertsModule
from moecore.nn.experts.mlp import Mlp
from moecore.nn.layers import moe
from moecore.nn.predict import coupled_image_count
from moecore.nn.routers.noisy_top_k import NoisyTopK
from moecore.training.meter import sum_layer_routing
from moecore.training.monitor import LayerTotals, MonitorSettings, build_routing_point
from moecore.training.regularizers.switch_balance import SwitchBalance

WIDTH = 12
TOKENS = 29  # enough that experts' rows are padded on a CPU
EXPERTS = Mlp(number=4, hidden_ratio=1.5)
LEAVES_TOKENS_OUT = ("relu", "depth")  # kinds of routers whose tokens may choose no expert


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
        totals = LayerTotals.from_numbers(sum_layer_routing(record).tolist())
        point = build_routing_point(1, {"": totals}, None, MonitorSettings()).layers[""]
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
        k=getattr(moe.scale_k_to_pieces(router, experts), "k", None) if is_linear else None,
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
    return not router.wants & moe.FIELDS_MISSING_IN_TEXTS


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
