"""The routing records of a model while it runs: ours, one with our layers, or others' mixtures.

Nothing is imported from elsewhere: others' routers are known by the names of their classes, and
their records are built of what they return. B sequences, T tokens of one, E experts, k chosen per
token.
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
from moecore.nn.routers.token_choice import Score, expert_probs, expert_scores

# Of a router, its positional arguments and what it returned, the record: fields (B, T, E), or
# (B · T, E) where the layer around it flattens its tokens.
RouterAdapter = Callable[[nn.Module, tuple[Any, ...], Any], RoutingRecord]
CLOSE = 0.02  # shares of weights, of bfloat16


@contextmanager
def routing_collector(
    model: nn.Module, adapters: Mapping[str, RouterAdapter] | None = None
) -> Iterator[list[RoutingRecord]]:
    """Collect the routing of a model inside the ``with``: a record a MoE layer and call.

    model: one of ours, one with MoELayers (``upcycle``), or one of transformers with routers of
    Mixtral, OLMoE, Qwen2-MoE, Qwen3-MoE, DeepSeek-V2, DeepSeek-V3 or Switch, whose forward pass is
    left as it is. adapters: for other routers, the name of a router's class → a function of the
    router, its positional arguments and what it returned that gives the record, such as
    ``lens.build_record`` does.

    Records come in the order of the calls, with fields (B, T, E), and carry gradients, but where
    gradient checkpointing runs the forward pass without (``use_reentrant=True``); what a backward
    pass computes again is not recorded again. A compiled model runs as if it were not, unless its
    routers are those of MoELayers. Raises UserError for a model without such routers, and for
    adapters that are no functions or return no records.
    """
    adapters = {} if adapters is None else adapters
    check_adapters(adapters)
    known = {**FOREIGN_ROUTERS, **adapters}
    records: list[RoutingRecord] = []
    routers: dict[nn.Module, nn.Module | None] = {}
    _find_routers(model, None, known, routers)
    if not routers:
        allowed = f"a mixture of moecore, MoELayers (upcycle), {', '.join(FOREIGN_ROUTERS)}"
        problem = f"{type(model).__name__} has no router that is known"
        raise UserError(f"trace: {problem}; allowed: {allowed}, or others with adapters")
    with ExitStack() as stack:
        if not all(isinstance(router, MoELayer) for router in routers):
            stack.enter_context(torch.compiler.set_stance("force_eager"))  # compiled: without hooks
        for router, block in routers.items():
            if isinstance(router, MoELayer):
                stack.callback(setattr, router, "records", router.records)
                router.records = records
            elif isinstance(router, Model):
                stack.enter_context(router.register_forward_hook(partial(_see_model, records)))
            else:
                hook = RouterHook(known[type(router).__name__], records)
                stack.enter_context(router.register_forward_hook(hook.see_router))
                if block is not None:
                    see_block = hook.see_block
                    stack.enter_context(
                        block.register_forward_pre_hook(see_block, with_kwargs=True)
                    )
        yield records


def _see_model(
    records: list[RoutingRecord], model: nn.Module, inputs: tuple[Any, ...], output: ModelOutput
) -> None:
    """Add the records of a call of one of our models."""
    if not is_in_backward_pass():
        records.extend(output.routing)


def check_adapters(adapters: Any) -> None:
    """Raise UserError unless it is a mapping of classes' names to functions."""
    allowed = "the name of a router's class → a function of router, inputs and output"
    if not isinstance(adapters, Mapping):
        raise UserError(f"adapters: found {type(adapters).__name__}; allowed: {allowed}")
    for name, adapter in adapters.items():
        if not callable(adapter):
            raise UserError(f"adapters.{name}: found {type(adapter).__name__}; allowed: {allowed}")


def _find_routers(
    module: nn.Module,
    block: nn.Module | None,
    known: Mapping[str, RouterAdapter],
    routers: dict[nn.Module, nn.Module | None],
) -> None:
    """Add each outermost module that tells its routing to ``routers``, with the one around it."""
    own = isinstance(module, Model) and module.moe is not None
    if own or isinstance(module, MoELayer) or type(module).__name__ in known:
        routers.setdefault(module, block)
        return
    for child in module.children():
        _find_routers(child, module, known, routers)


class RouterHook:
    """Appends a record at each call of a router; the block around it sees tokens (B, T, d)."""

    def __init__(self, adapter: RouterAdapter, records: list[RoutingRecord]) -> None:
        self.adapter = adapter
        self.records = records
        self.shape: tuple[int, ...] = ()

    def see_block(self, _: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Remember the shape of a block's tokens, its first tensor."""
        tensors = [value for value in (*inputs, *named.values()) if isinstance(value, Tensor)]
        self.shape = tuple(tensors[0].shape[:-1]) if tensors else ()

    def see_router(self, router: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        """Add the record of a call. Raises UserError where the adapter gives something else."""
        if is_in_backward_pass():
            return
        where = f"adapters.{type(router).__name__}"
        # Gradient checkpointing counts what a layer saves, by hooks of its own, and compares it
        # with what is saved when the layer is computed again, without the record.
        with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            record = check_record(self.adapter(router, inputs, output), where)
            self.records.append(RoutingRecord(*map(self.split_batch, record[:5])))

    def split_batch(self, field: Tensor) -> Tensor:
        """Return (B · T, E) as (B, T, E), where the block's tokens say so; else one batch of it."""
        if field.ndim > 2:
            return field.flatten(1, -2)
        if len(self.shape) == 2 and prod(self.shape) == len(field):
            return field.unflatten(0, self.shape)
        return field[None]


def build_record(
    logits: Tensor, experts: Tensor, weights: Tensor, score: Score = "softmax"
) -> RoutingRecord:
    """Return the record of a router in which every token chose k experts.

    logits: (..., E), without noise.  experts: (..., k) integers, those chosen.  weights: (..., k)
    of their outputs, 0 where an expert had no room.  score: how logits become probabilities
    (softmax, sigmoid, sqrt_softplus, relu; all but the first over their sum).  Raises UserError for
    other shapes and scores, and for experts that have no logits or are chosen twice by a token.
    """
    shapes = [tuple(one.shape) for one in (logits, experts, weights)]
    if shapes[1] != shapes[2] or shapes[0][:-1] != shapes[1][:-1]:
        problem = "found logits {}, experts {} and weights {}".format(*shapes)
        raise UserError(f"build_record: {problem}; allowed: (..., E), (..., k) and (..., k)")
    is_number = not (experts.is_floating_point() or experts.dtype == torch.bool)
    wrong = experts[(experts < 0) | (experts >= logits.shape[-1])]
    if wrong.numel() or not is_number:
        problem = f"found {int(wrong[0]) if is_number else experts.dtype}"
        allowed = f"integers from 0 to {logits.shape[-1] - 1}, the columns of logits"
        raise UserError(f"build_record: experts: {problem}; allowed: {allowed}")
    ordered = experts.sort(dim=-1).values
    repeated = ordered[..., 1:][ordered[..., 1:] == ordered[..., :-1]]
    if repeated.numel():  # one weight would take the other's place
        problem = f"found {int(repeated[0])} twice in one token's choice"
        raise UserError(f"build_record: experts: {problem}; allowed: each expert once")
    if score not in get_args(Score):
        allowed = ", ".join(get_args(Score))
        raise UserError(f"build_record: score: found {score!r}; allowed: {allowed}")
    logits, experts = logits.float(), experts.long()
    chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, experts, True)
    combine = torch.zeros_like(logits).scatter(-1, experts, weights.float())
    return RoutingRecord(logits, expert_probs(logits, score), chosen.float(), chosen, combine)


def check_record(record: Any, where: str) -> RoutingRecord:
    """Return a record. Raises UserError unless it is one, its fields tensors (..., E) of one shape
    and ``chosen`` bool.
    """
    if not isinstance(record, RoutingRecord):
        allowed = "a RoutingRecord, as lens.build_record returns"
        raise UserError(f"{where}: found {type(record).__name__}; allowed: {allowed}")
    for name, field in zip(RoutingRecord._fields[:5], record[:5], strict=True):
        if not isinstance(field, Tensor):
            problem = f"{name}: found {type(field).__name__}"
            raise UserError(f"{where}: {problem}; allowed: a tensor (..., experts)")
    for name, field in zip(RoutingRecord._fields[:5], record[:5], strict=True):
        if field.ndim < 2 or field.shape != record.probs.shape:
            problem = f"{name}: found the shape {tuple(field.shape)}"
            raise UserError(f"{where}: {problem}; allowed: of all fields one, (..., experts)")
    if record.chosen.dtype != torch.bool:
        raise UserError(f"{where}: chosen: found {record.chosen.dtype}; allowed: torch.bool")
    return record


def read_top_k_router(
    router: nn.Module, inputs: tuple[Any, ...], output: Any, score: Score
) -> RoutingRecord:
    """Return the record of a router that returns logits, weights and numbers of its experts.

    Raises UserError where the weights are not the experts' scores, but for a factor.
    """
    if not isinstance(output, tuple) or len(output) != 3:
        problem = f"{type(router).__name__} does not return logits, weights and experts"
        raise UserError(f"trace: {problem}; allowed: transformers 5.23 and later, or an adapter")
    logits, weights, experts = output
    scores = expert_scores(logits.detach().float(), score).gather(-1, experts)
    expected, given = (each / each.sum(-1, keepdim=True) for each in (scores, weights.detach()))
    if not torch.allclose(expected, given.float(), atol=CLOSE):
        problem = f"{type(router).__name__} does not weigh experts by a {score} of its logits"
        raise UserError(f"trace: {problem}; allowed: transformers 5.23 and later, or an adapter")
    return build_record(logits, experts, weights, score)


def read_switch_router(router: nn.Module, inputs: tuple[Any, ...], output: Any) -> RoutingRecord:
    """Return the record of Switch's router: one expert a token, (B, T, E), 0 beyond its capacity,
    the probability of that expert, (B, T, 1), and logits.
    """
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
