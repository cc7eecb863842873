"""The routing records of a model while it runs: ours, one with our layers, or others' mixtures."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from moecore.core.files import UserError
from moecore.core.routing_records import ModelOutput, RoutingRecord
from moecore.core.torch_internals import is_in_backward_pass
from moecore.nn.backbones.base_model import Model
from moecore.nn.layers.moe import MoELayer
from moecore.nn.router_hooks import FOREIGN_ROUTERS, RouterAdapter, check_record


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
