"""Collect routing records of a running model, of moecore or of another library, by hooks.

No other library is imported: a module that returns logits, weights and expert ids is a router,
whatever its name; a few more are read by class name.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import permutations
from math import prod
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from moecore.core.files import UserError
from moecore.core.routing_records import ModelOutput, RoutingRecord
from moecore.core.torch_internals import is_in_backward_pass
from moecore.nn.backbones.base_model import Model
from moecore.nn.layers.moe import MoELayer
from moecore.nn.routers.token_choice import Score, expert_probs, safe_log, scores_from_logits

# (router, its positional arguments, its output) → record with fields (B, T, E), or (B · T, E) if
# the layer around it flattens its tokens
RouterAdapter = Callable[[nn.Module, tuple[Any, ...], Any], RoutingRecord]
TOLERANCE = 1e-3  # of shares of weights
HALF_PRECISION_TOLERANCE = 0.02  # in bfloat16 or float16


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
        model: one of ours, one with MoELayers (``upcycle``), or one whose routers return logits
            (…, E), weights (…, k) and expert ids (…, k) in any order, such as those of transformers
            in docs/router_families.md. Its forward pass is not changed.
        adapters: for other routers, the router's class name → a function (router, positional
            arguments, output) → record, such as ``lens.build_record`` returns.

    Yields:
        The list of records, which grows with each call.

    Raises:
        UserError: if no router was seen or weights are no score of the logits; for adapters that
            are not functions, do not return records, or are for classes that the model lacks.
    """
    check_adapters(adapters or {}, model)
    all_adapters = {**FOREIGN_ROUTERS, **(adapters or {})}
    collection = RecordCollector()
    records = collection.records
    routers: dict[nn.Module, nn.Module | None] = {}
    candidates: dict[nn.Module, nn.Module | None] = {}
    _add_routers_and_candidates(model, None, all_adapters, routers, candidates)
    is_ours = any(isinstance(router, (MoELayer, Model)) for router in routers)
    with ExitStack() as stack:
        if not is_ours or not all(isinstance(router, MoELayer) for router in routers):
            # compiled code ignores hooks
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        for router, block in (routers if is_ours else routers | candidates).items():
            if isinstance(router, MoELayer):
                stack.callback(setattr, router, "records", router.records)
                router.records = records
            elif isinstance(router, Model) and router in routers:
                see = partial(_append_model_routing, records)
                stack.enter_context(router.register_forward_hook(see))
            else:
                see = partial(collection.append_record, all_adapters.get(type(router).__name__))
                stack.enter_context(router.register_forward_hook(see))
                if block is not None:
                    see = collection.store_shape
                    stack.enter_context(block.register_forward_pre_hook(see, with_kwargs=True))
        yield records
    if not records and not routers:
        problem = f"{type(model).__name__} has no known router"
        allowed = "mixtures of moecore, MoELayers (upcycle), routers that return logits, weights"
        raise UserError(f"trace: {problem}; allowed: {allowed} and expert ids, or adapters")


def _append_model_routing(
    records: list[RoutingRecord], model: nn.Module, inputs: tuple[Any, ...], output: ModelOutput
) -> None:
    if not is_in_backward_pass():
        records.extend(output.routing)


def check_adapters(adapters: Any, model: nn.Module) -> None:
    """Raise UserError unless ``adapters`` maps names of classes in ``model`` to functions."""
    allowed = "the name of a router's class → a function of router, inputs and output"
    if not isinstance(adapters, Mapping):
        raise UserError.at("adapters", found=type(adapters).__name__, allowed=allowed)
    for name, adapter in adapters.items():
        if not callable(adapter):
            raise UserError.at(f"adapters.{name}", found=type(adapter).__name__, allowed=allowed)
    classes = sorted({type(module).__name__ for module in model.modules()})
    for name in adapters.keys() - {*classes}:
        text = f"no such class in {type(model).__name__}"
        raise UserError.at(f"adapters.{name}", found=text, allowed=", ".join(classes)[:200])


def _add_routers_and_candidates(
    module: nn.Module,
    block: nn.Module | None,
    adapters: Mapping[str, RouterAdapter],
    routers: dict[nn.Module, nn.Module | None],
    candidates: dict[nn.Module, nn.Module | None],
) -> None:
    """Add modules → parents: known router classes to ``routers``, others to ``candidates``."""
    is_ours = isinstance(module, Model) and module.moe is not None
    if is_ours or isinstance(module, MoELayer) or type(module).__name__ in adapters:
        routers.setdefault(module, block)
        return
    if not type(module).__module__.startswith("torch."):
        # may prove to be a router
        candidates.setdefault(module, block)
    for child in module.children():
        _add_routers_and_candidates(child, module, adapters, routers, candidates)


class RecordCollector:
    """The hooks of one model, and the routing records that they collect."""

    def __init__(self) -> None:
        self.records: list[RoutingRecord] = []
        self.seen: set[nn.Module] = set()  # modules that proved to be routers
        self.shape: tuple[int, ...] = ()  # (B, T) of the last block that was called

    def store_shape(self, _: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Store the (batch, tokens) shape of a block's first tensor argument; a forward hook."""
        tensors = [value for value in (*inputs, *named.values()) if isinstance(value, Tensor)]
        if tensors and tensors[0].ndim > 2:
            self.shape = tuple(tensors[0].shape[:-1])

    def append_record(
        self, adapter: RouterAdapter | None, router: nn.Module, inputs: tuple[Any, ...], output: Any
    ) -> None:
        """Append the record of a router's call; without an adapter, only if outputs are routing."""
        parts = find_routing_tensors(output) if adapter is None else ()
        if parts is None or is_in_backward_pass():
            return
        if parts and not self.seen.isdisjoint({*router.modules()} - {router}):
            return  # a wrapper, which returns what the router in it returned
        # Gradient checkpointing counts what a layer saves, by hooks of its own, and compares it
        # with what is saved when the layer is computed again, without the record.
        with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            if adapter is None:
                self.seen.add(router)
                record = infer_record(type(router).__name__, *parts)
            else:
                place = f"adapters.{type(router).__name__}"
                record = check_record(adapter(router, inputs, output), place)
            self.records.append(RoutingRecord(*map(self.unflatten_batch_and_tokens, record[:5])))

    def unflatten_batch_and_tokens(self, field: Tensor) -> Tensor:
        """Reshape a field (B · T, E) to (B, T, E), or (1, B · T, E) if ``shape`` does not fit."""
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
        allowed = ", ".join(get_args(Score))
        raise UserError.at("build_record: score", found=repr(score), allowed=allowed)
    logits, experts = logits.float(), experts.long()
    chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, experts, True)
    combine = torch.zeros_like(logits).scatter(-1, experts, weights.float())
    return RoutingRecord(logits, expert_probs(logits, score), chosen.float(), chosen, combine)


def check_record(record: Any, place: str) -> RoutingRecord:
    """Return ``record`` if its fields are valid; otherwise UserError starting with ``place``."""
    if not isinstance(record, RoutingRecord):
        allowed = "a RoutingRecord, as lens.build_record returns"
        raise UserError.at(place, found=type(record).__name__, allowed=allowed)
    fields = dict(zip(RoutingRecord._fields[:5], record[:5], strict=True))
    for name, field in fields.items():
        if not isinstance(field, Tensor):
            allowed = "a tensor (..., experts)"
            raise UserError.at(f"{place}: {name}", found=type(field).__name__, allowed=allowed)
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


def find_routing_tensors(output: Any) -> tuple[Tensor, ...] | None:
    """Return logits (…, E), weights (…, k) and ids (…, k) in a tuple or list; None without all."""
    values = output if isinstance(output, tuple | list) else ()
    tensors = [value for value in values if isinstance(value, Tensor) and value.ndim > 1]
    ids = [value for value in tensors if value.dtype in (torch.int64, torch.int32)]
    if len(ids) != 1 or not ids[0].numel():
        return None
    triples = [
        (logits, weights, ids[0])
        for logits, weights in permutations(filter(torch.is_floating_point, tensors), 2)
        if weights.shape == ids[0].shape
        and logits.shape[:-1] == ids[0].shape[:-1]
        and logits.shape[-1] >= max(2, ids[0].shape[-1])
    ]
    if len(triples) > 1:  # k = E: one of two is a score of the other
        triples.sort(key=lambda parts: infer_score_function(*parts) is None)
    return triples[0] if triples else None


@torch.no_grad()
def infer_score_function(logits: Tensor, weights: Tensor, experts: Tensor) -> Score | None:
    """Return the score of logits that gives these weights up to a factor; None if none does."""
    # A bias or groups may change the choice, not the weights: ids need not be the highest scores.
    # One weight per token that is always the same tells nothing: ids must be, and softmax is taken.
    bits = min(torch.finfo(part.dtype).bits for part in (logits, weights))
    tolerance = TOLERANCE if bits >= 32 else HALF_PRECISION_TOLERANCE
    if experts.min() < 0 or experts.max() >= logits.shape[-1]:
        return None
    is_same = torch.allclose(weights, weights.flatten()[0], rtol=tolerance)
    errors: dict[Score, float] = {}
    for score in get_args(Score):
        chosen = scores_from_logits(logits.float(), score).gather(-1, experts.long())
        scaled = chosen * (weights.sum() / chosen.sum())
        errors[score] = float((weights - scaled).abs().max() / weights.abs().max())
        if weights.shape[-1] > 1 or (is_same and are_top_logits(logits, experts)):
            shares = [part / part.sum(-1, keepdim=True) for part in (weights.float(), chosen)]
            errors[score] = min(errors[score], float((shares[0] - shares[1]).abs().max()))
    best = min(errors, key=errors.__getitem__)
    return best if errors[best] < tolerance else None


def are_top_logits(logits: Tensor, experts: Tensor) -> bool:
    """Return whether every token chose the experts with its highest logits, up to rounding."""
    lowest = logits.gather(-1, experts.long()).amin(-1)
    highest = logits.scatter(-1, experts.long(), -torch.inf).amax(-1)
    return bool((lowest >= highest - 2**-7 * logits.abs().amax(-1)).all())


def infer_record(name: str, logits: Tensor, weights: Tensor, experts: Tensor) -> RoutingRecord:
    """Build the record from a router's outputs; UserError if no score explains the weights."""
    # Probabilities in the place of logits become their logarithms; weights may then have a factor
    # per expert, if the experts are the most probable ones.
    sums = logits.detach().float().sum(-1)
    are_probs = torch.allclose(sums, torch.ones_like(sums), atol=HALF_PRECISION_TOLERANCE)
    if are_probs and (logits >= 0).all() and are_top_logits(logits, experts):
        return build_record(safe_log(logits), experts, weights)
    score = infer_score_function(logits, weights, experts)
    if score is None:
        problem = f"{name} does not weigh experts by a score of its logits"
        raise UserError(f"trace: {problem}; allowed: {', '.join(get_args(Score))}, or an adapter")
    return build_record(logits, experts, weights, score)


def read_llama4_router(router: nn.Module, inputs: tuple[Any, ...], output: Any) -> RoutingRecord:
    """Return the record of Llama 4's router, whose (scores, logits) are dense: 0 if not chosen."""
    scores, logits = output
    weights, experts = scores.topk(router.top_k)
    return build_record(logits, experts, weights, "sigmoid")


def read_jetmoe_router(router: nn.Module, inputs: tuple[Any, ...], output: Any) -> RoutingRecord:
    """Return the record of JetMoE's router, whose output lists token choices by expert."""
    order, _, gates, sizes, logits = output
    numbers = torch.arange(len(sizes), device=order.device)
    counts = torch.tensor(sizes, device=order.device)
    experts = torch.empty_like(order).scatter(0, order, numbers.repeat_interleave(counts))
    weights = torch.zeros_like(gates).scatter(0, order, gates)
    k = len(order) // len(logits)
    return build_record(logits, experts.view(-1, k), weights.view(-1, k))


def read_capacity_router(router: nn.Module, inputs: tuple, output: Any, k: int) -> RoutingRecord:
    """Return the record of NLLB's or Switch's router, with output (top-1 mask, weights, logits)."""
    # Weights are (…, E), or (…, 1) for ``first``, (…, E): 0 for experts over capacity.
    first, weights, logits = output
    if weights.shape[-1] == 1:
        weights = first * weights
    experts = (logits.softmax(-1) + (weights > 0)).topk(k).indices  # prefer those with a weight
    return build_record(logits, experts, weights.gather(-1, experts))


def read_dbrx_block(block: Any, inputs: tuple[Any, ...], output: Any) -> RoutingRecord:
    """Return the record of DBRX's block, which chooses experts outside of its router."""
    if block.training and block.router.moe_jitter_eps:
        raise UserError.at("trace", found="DBRX in training with jitter", allowed="model.eval()")
    logits = block.router.layer(inputs[0].flatten(0, -2))
    weights, experts = block.route_tokens_to_experts(logits)
    return build_record(logits, experts, weights)


def read_phimoe_router(router: nn.Module, inputs: tuple[Any, ...], output: Any) -> RoutingRecord:
    """Return the record of PhiMoE's router, whose softmax is over logits near the maximum."""
    logits, weights, experts = output
    return build_record(logits, experts, weights)


def read_zaya_router(router: nn.Module, inputs: tuple[Any, ...], output: Any) -> RoutingRecord:
    """Return the record of Zaya's router; a skipped token is stored as expert 0 with weight 0."""
    logits, weights, experts = output[:3]
    return build_record(logits, experts.where(weights > 0, logits.shape[-1] - 1), weights)


FOREIGN_ROUTERS: Mapping[str, RouterAdapter] = {  # of transformers, by the names of their classes
    "DbrxFFN": read_dbrx_block,
    "JetMoeTopKGating": read_jetmoe_router,
    "Llama4Router": read_llama4_router,
    "NllbMoeTop2Router": partial(read_capacity_router, k=2),
    "PhimoeTopKRouter": read_phimoe_router,
    "SwitchTransformersTop1Router": partial(read_capacity_router, k=1),
    "ZayaRouter": read_zaya_router,
}
