"""What all checks share: a failure in one line that names the part, and settings with defaults."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

ATOL, RTOL = 1e-5, 1e-4  # fp32 sums in another order


def settings_of(part: Any) -> Any:
    """Return a part's settings: as they are, or the defaults of their class."""
    return part() if inspect.isclass(part) else part


def assert_that(part: Any, is_true: Any, promise: str) -> None:
    """Raise AssertionError, naming the part, where a promise is not kept."""
    if not is_true:
        raise AssertionError(f"{type(part).__name__}: {promise}")


def is_close(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are equal up to the rounding of fp32 sums."""
    return one.shape == other.shape and torch.allclose(one, other, atol=ATOL, rtol=RTOL)


def draw_weights(module: nn.Module, std: float = 0.5) -> None:
    """Draw all parameters anew, so large that no two choices are near a tie and none starts at 0.

    From the seed 0; the caller's random state stays as it was.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=std)


def seeded_randn(*shape: int, seed: int = 1) -> Tensor:
    """Return normal draws of this seed, whatever else is drawn."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
