"""Models without memory and without weights: their shapes only."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

IN_PLACE = (torch.Tensor.normal_, torch.Tensor.uniform_, torch.Tensor.exponential_)
NEW = (torch.randn, torch.rand)


@contextmanager
def weightless() -> Iterator[None]:
    """What is built inside has shapes and no values (torch's meta device); nothing is drawn."""
    with torch.device("meta"), _Undrawn():
        yield


class _Undrawn(TorchFunctionMode):
    """Passes over random draws, whose values nobody sees here.

    On the meta device ``normal_`` imports torch's compiler before it does nothing: 2.4 of the 5
    seconds that a check then took.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        named = dict(kwargs or {})
        if func in IN_PLACE or getattr(func, "__module__", "") == torch.nn.init.__name__:
            return args[0] if args else named["tensor"]
        if func in NEW:
            named.pop("generator", None)
            return torch.empty(*args, **named)
        return func(*args, **named)
