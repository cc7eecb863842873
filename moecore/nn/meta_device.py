"""Models without values: built for their shapes alone, on torch's meta device."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

# Random draws, which nobody sees of a model without values
IN_PLACE_DRAWS = (torch.Tensor.normal_, torch.Tensor.uniform_, torch.Tensor.exponential_)
NEW_DRAWS = (torch.randn, torch.rand)


@contextmanager
def meta_device_context() -> Iterator[None]:
    """Give what is built inside shapes and no values; nothing is drawn."""
    with torch.device("meta"), _NoDraws():
        yield


class _NoDraws(TorchFunctionMode):
    """Passes over random draws, whose values nobody sees here.

    On the meta device ``normal_`` imports torch's compiler before it does nothing, for 2 seconds.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        named = dict(kwargs or {})
        if func in IN_PLACE_DRAWS or getattr(func, "__module__", "") == torch.nn.init.__name__:
            return args[0] if args else named["tensor"]
        if func in NEW_DRAWS:
            named.pop("generator", None)
            return torch.empty(*args, **named)
        return func(*args, **named)
