"""Jacobians of a part of a model, on a frozen copy in fp64."""

import copy
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)


def frozen_copy(module: M) -> M:
    """The module in fp64 and evaluation mode, without gradients of parameters; the module itself is
    untouched.
    """
    return copy.deepcopy(module).double().eval().requires_grad_(False)


def row_jacobians(function: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
    """Jacobian of each row of a function whose row b depends on row b of its input only: inputs
    (B, …) and outputs (B, K) to (B, K, P).

    One backward pass an output: the grouped products and the dispatch have no forward-mode
    derivatives.
    """
    with torch.enable_grad():
        leaf = inputs.detach().clone().requires_grad_(True)
        outputs = function(leaf).sum(dim=0)
        rows = [torch.autograd.grad(output, leaf, retain_graph=True)[0] for output in outputs]
    return torch.stack(rows, dim=1).flatten(2)
