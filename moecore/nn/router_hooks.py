"""Collect the routing records of a running model: ours, with MoELayers, or of another library.

No other library is imported: their routers are recognised by class name, and records are built from
what they return. B sequences, T tokens each, E experts, k chosen per token.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from math import prod
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import one_hot

from moecore.core.files import UserError
from moecore.core.routing_records import ModelOutput, RoutingRecord
from moecore.core.torch_internals import is_in_backward_pass
from moecore.nn.backbones.base_model import Model
from moecore.nn.layers.moe import MoELayer
from moecore.nn.routers.token_choice import Score, expert_probs, scores_from_logits

# (router, its positional arguments, its output) → record with fields (B, T, E), or (B · T, E) if
# the layer around it flattens its tokens
RouterAdapter = Callable[[nn.Module, tuple[Any, ...], Any], RoutingRecord]
TOLERANCE = 0.02  # of shares of weights, for bfloat16


@contextmanager
def routing_collector(
    model: nn.Module, adapters: Mapping[str, RouterAdapter] | None = None
) -> Iterator[list[RoutingRecord]]:
    """Collect the routing of a model inside the ``with``: one record per MoE layer and call.

    Records come in the order of calls, with fields (B, T, E), and carry gradients, except where
    gradient checkpointing runs the forward pass without (``use_reentrant=True``). Recomputation in
    a backward pass is not recorded again. A compiled model runs uncompiled, unless its routers are
    those of MoELayers.

    Args:
        model: one of ours, one with MoELayers (``upcycle``), or one of transformers with routers of
            Mixtral, OLMoE, Qwen2-MoE, Qwen3-MoE, DeepSeek-V2, DeepSeek-V3 or Switch, whose forward
            pass is not changed.
        adapters: for other routers, the router's class name → a function (router, positional
            arguments, output) → record, such as ``lens.build_record`` returns.

    Yields:
        The list of records, which grows with each call.

    Raises:
        UserError: for a model without such routers, and for adapters that are not functions or
            do not return records.
    """
    check_adapters(adapters or {})
    all_adapters = {**FOREIGN_ROUTERS, **(adapters or {})}
    records: list[RoutingRecord] = []
    routers: dict[nn.Module, nn.Module | None] = {}
    _find_routers(model, None, all_adapters, routers)
    if not routers:
        allowed = f"a mixture of moecore, MoELayers (upcycle), {', '.join(FOREIGN_ROUTERS)}"
        problem = f"{type(model).__name__} has no known router"
        raise UserError(f"trace: {problem}; allowed: {allowed}, or others with adapters")
    with ExitStack() as stack:
        if not all(isinstance(router, MoELayer) for router in routers):
            # compiled code ignores hooks
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        for router, block in routers.items():
            if isinstance(router, MoELayer):
                stack.callback(setattr, router, "records", router.records)
                router.records = records
            elif isinstance(router, Model):
                stack.enter_context(router.register_forward_hook(partial(_see_model, records)))
            else:
                hook = RouterHook(all_adapters[type(router).__name__], records)
                stack.enter_context(router.register_forward_hook(hook.see_router))
                if block is not None:
                    handle = block.register_forward_pre_hook(hook.see_block, with_kwargs=True)
                    stack.enter_context(handle)
        yield records


def _see_model(
    records: list[RoutingRecord], model: nn.Module, inputs: tuple[Any, ...], output: ModelOutput
) -> None:
    """Append the routing of one of moecore's models to ``records``: a forward hook."""
    if not is_in_backward_pass():
        records.extend(output.routing)


def check_adapters(adapters: Any) -> None:
    """Raise UserError unless ``adapters`` maps class names to functions."""
    allowed = "the name of a router's class → a function of router, inputs and output"
    if not isinstance(adapters, Mapping):
        raise UserError.at("adapters", found=type(adapters).__name__, allowed=allowed)
    for name, adapter in adapters.items():
        if not callable(adapter):
            raise UserError.at(f"adapters.{name}", found=type(adapter).__name__, allowed=allowed)


def _find_routers(
    module: nn.Module,
    block: nn.Module | None,
    adapters: Mapping[str, RouterAdapter],
    routers: dict[nn.Module, nn.Module | None],
) -> None:
    """Put each outermost module that routes → its parent into ``routers``; block: first parent."""
    is_ours = isinstance(module, Model) and module.moe is not None
    if is_ours or isinstance(module, MoELayer) or type(module).__name__ in adapters:
        routers.setdefault(module, block)
        return
    for child in module.children():
        _find_routers(child, module, adapters, routers)


class RouterHook:
    """Append a record per call of a router, in the shape of the parent block's tokens (B, T, d)."""

    def __init__(self, adapter: RouterAdapter, records: list[RoutingRecord]) -> None:
        self.adapter = adapter
        self.records = records
        self.shape: tuple[int, ...] = ()

    def see_block(self, _: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Store the shape of a block's tokens, its first tensor argument, without the width."""
        tensors = [value for value in (*inputs, *named.values()) if isinstance(value, Tensor)]
        self.shape = tuple(tensors[0].shape[:-1]) if tensors else ()

    def see_router(self, router: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        """Append the record of a router's call; UserError if the adapter's result is no record."""
        if is_in_backward_pass():
            return
        place = f"adapters.{type(router).__name__}"
        # Gradient checkpointing counts what a layer saves, by hooks of its own, and compares it
        # with what is saved when the layer is computed again, without the record.
        with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            record = check_record(self.adapter(router, inputs, output), place)
            self.records.append(RoutingRecord(*map(self.split_batch, record[:5])))

    def split_batch(self, field: Tensor) -> Tensor:
        """Return a field (B · T, E) as (B, T, E), or (1, B · T, E) if the block's shape differs."""
        if field.ndim > 2:
            return field.flatten(1, -2)
        if len(self.shape) == 2 and prod(self.shape) == len(field):
            return field.unflatten(0, self.shape)
        return field[None]


def build_record(
    logits: Tensor, experts: Tensor, weights: Tensor, score: Score = "softmax"
) -> RoutingRecord:
    """Return the record of a router in which every token chose k experts.

    Args:
        logits: (..., E), without noise.
        experts: (..., k) integers, the chosen experts.
        weights: (..., k) of their outputs, 0 if an expert had no capacity left.
        score: function from logits to probabilities: softmax, or sigmoid, sqrt_softplus, relu,
            divided by their sum.

    Raises:
        UserError: for other shapes and scores, and for experts that have no logits or are
            chosen twice by a token.
    """
    shapes = [tuple(tensor.shape) for tensor in (logits, experts, weights)]
    if shapes[1] != shapes[2] or shapes[0][:-1] != shapes[1][:-1]:
        raise UserError.at(
            "build_record",
            found="logits {}, experts {} and weights {}".format(*shapes),
            allowed="(..., E), (..., k) and (..., k)",
        )
    is_number = not (experts.is_floating_point() or experts.dtype == torch.bool)
    wrong = experts[(experts < 0) | (experts >= logits.shape[-1])]
    if wrong.numel() or not is_number:
        raise UserError.at(
            "build_record: experts",
            found=int(wrong[0]) if is_number else experts.dtype,
            allowed=f"integers from 0 to {logits.shape[-1] - 1}, the columns of logits",
        )
    ordered = experts.sort(dim=-1).values
    repeated = ordered[..., 1:][ordered[..., 1:] == ordered[..., :-1]]
    if repeated.numel():  # one weight would overwrite the other
        raise UserError.at(
            "build_record: experts",
            found=f"{int(repeated[0])} twice in one token's choice",
            allowed="each expert once",
        )
    if score not in get_args(Score):
        raise UserError.at(
            "build_record: score", found=repr(score), allowed=", ".join(get_args(Score))
        )
    logits, experts = logits.float(), experts.long()
    chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, experts, True)
    combine = torch.zeros_like(logits).scatter(-1, experts, weights.float())
    return RoutingRecord(logits, expert_probs(logits, score), chosen.float(), chosen, combine)


def check_record(record: Any, place: str) -> RoutingRecord:
    """Return ``record`` if its fields are (..., E), chosen of bool; place: starts the UserError."""
    if not isinstance(record, RoutingRecord):
        raise UserError.at(
            place,
            found=type(record).__name__,
            allowed="a RoutingRecord, as lens.build_record returns",
        )
    fields = dict(zip(RoutingRecord._fields[:5], record[:5], strict=True))
    for name, field in fields.items():
        if not isinstance(field, Tensor):
            raise UserError.at(
                f"{place}: {name}", found=type(field).__name__, allowed="a tensor (..., experts)"
            )
    for name, field in fields.items():
        if field.ndim < 2 or field.shape != record.probs.shape:
            raise UserError.at(
                f"{place}: {name}",
                found=f"the shape {tuple(field.shape)}",
                allowed="one shape (..., experts) for all fields",
            )
    if record.chosen.dtype != torch.bool:
        raise UserError.at(f"{place}: chosen", found=record.chosen.dtype, allowed="torch.bool")
    return record


def read_top_k_router(
    router: nn.Module, inputs: tuple[Any, ...], output: Any, score: Score
) -> RoutingRecord:
    """Return the record of a router whose output is (logits, weights, expert ids).

    Raises UserError for other outputs, and for weights that are not a ``score`` of the logits.
    """
    if not isinstance(output, tuple) or len(output) != 3:
        problem = f"{type(router).__name__} does not return logits, weights and experts"
        raise UserError(f"trace: {problem}; allowed: transformers 5.23 and later, or an adapter")
    logits, weights, experts = output
    scores = scores_from_logits(logits.detach().float(), score).gather(-1, experts)
    expected, actual = (
        values / values.sum(-1, keepdim=True) for values in (scores, weights.detach())
    )
    if not torch.allclose(expected, actual.float(), atol=TOLERANCE):
        problem = f"{type(router).__name__} does not weigh experts by a {score} of its logits"
        raise UserError(f"trace: {problem}; allowed: transformers 5.23 and later, or an adapter")
    return build_record(logits, experts, weights, score)


def read_switch_router(router: nn.Module, inputs: tuple[Any, ...], output: Any) -> RoutingRecord:
    """Return the record of Switch's router: one expert per token, with weight 0 over capacity."""
    processed, weight, logits = output
    probs = logits.float().softmax(dim=-1)
    best = one_hot(probs.argmax(dim=-1), probs.shape[-1]).bool()
    chosen = torch.where(processed.any(dim=-1, keepdim=True), processed.bool(), best)
    return RoutingRecord(logits.float(), probs, chosen.float(), chosen, processed * weight.float())


SOFTMAX = partial(read_top_k_router, score="softmax")


FOREIGN_ROUTERS: Mapping[str, RouterAdapter] = {  # of transformers, by the names of their classes
    "MixtralTopKRouter": SOFTMAX,
    "OlmoeTopKRouter": SOFTMAX,
    "Qwen2MoeTopKRouter": SOFTMAX,
    "Qwen3MoeTopKRouter": SOFTMAX,
    "DeepseekV2TopkRouter": SOFTMAX,
    "DeepseekV3TopkRouter": partial(read_top_k_router, score="sigmoid"),
    "SwitchTransformersTop1Router": read_switch_router,
}
