"""Wrappers of private names of torch, which may change between its releases."""

from typing import Any

import torch
from torch import Tensor, distributed
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode  # none is public
from torch.utils._pytree import tree_leaves as tree_leaves  # a recursion over lists and dicts

GROUPED_MM = torch.ops.aten._grouped_mm  # which FLOP counters do not count by default
# It checks a tensor's dtype and shape in exported graphs.
METADATA_ASSERTION = torch.ops.aten._assert_tensor_metadata.default


def assert_async(condition: Tensor, message: str) -> None:
    """Raise an error on the device, without waiting for the host, if ``condition`` is false."""
    torch._assert_async(condition, message)


def multiply_gelu_slope_in_place(grad: Tensor, inner: Tensor) -> None:
    """Multiply ``grad`` in place by the derivative of GELU at ``inner``; needs no buffer."""
    torch.ops.aten.gelu_backward.grad_input(grad, inner, grad_input=grad)


def is_in_backward_pass() -> bool:
    """Return whether a backward pass runs this code again; always False in a compiled graph."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def active_transform_names() -> list[str]:
    """Return the names (Vmap, Jvp, Grad, …) of the torch.func transforms around this call."""
    if torch.compiler.is_compiling():
        return []
    stack = torch._C._functorch.get_interpreter_stack() or []
    names = [interpreter.key().name for interpreter in stack]
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None:
        names.append("Trace")
    return names


def count_begun_collectives() -> int:
    # A backend for several kinds of devices is counted once per kind.
    groups: list[Any] = list(distributed.distributed_c10d._world.pg_map)
    backends = [group._get_backend(device) for group in groups for device in group._device_types]
    return sum(backend._get_sequence_number_for_group() for backend in backends)


def storage_identity(tensor: Tensor) -> int:
    """Return an identifier of a tensor's storage; ``data_ptr`` is 0 on the meta device."""
    return tensor.untyped_storage()._cdata


def compile_error_class() -> type[Exception]:
    """Return the error class of ``torch.compile``; importing it takes seconds."""
    from torch._dynamo.exc import TorchDynamoException

    return TorchDynamoException


def allow_recompilations(number: int) -> None:
    """Let torch.compile compile a function up to ``number`` times (at least 8) per process."""
    from torch._dynamo import config  # public since torch 2.13: torch.compile(recompile_limit=…)

    config.recompile_limit = max(config.recompile_limit, number)
