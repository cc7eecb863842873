"""Build models without values, only for their shapes, on torch's meta device."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

# random draws, which have no effect without values
IN_PLACE_DRAWS = (torch.Tensor.normal_, torch.Tensor.uniform_, torch.Tensor.exponential_)
NEW_DRAWS = (torch.randn, torch.rand)


@contextmanager
def meta_device_context() -> Iterator[None]:
    """Build modules inside with shapes but without values; nothing is drawn."""
    with torch.device("meta"), _NoDraws():
        yield


class _NoDraws(TorchFunctionMode):
    """Skip draws: on meta, ``normal_`` takes 2 seconds to import torch's compiler, for nothing."""

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
