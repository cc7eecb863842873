"""Let a trained model's tokens choose without some experts, by the router's own rule.

L MoE layers, B images, T tokens per image, E experts.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from moecore.nn.backbones.base_model import Model
from moecore.nn.layers.moe import MoEFeedForward
from moecore.training.guide import GuidedModel


@contextmanager
def bar_experts(model: Model, barred: Sequence[Tensor | None]) -> Iterator[None]:
    """Forbid experts inside the ``with``: tokens choose again, among the others.

    barred: a bool mask for each of L layers, which broadcasts to (B, T, E), on the model's device;
    None: the layer chooses as always.
    """
    routers = list_routers(model)
    try:
        for router, mask in zip(routers, barred, strict=True):
            router.barred = mask
        yield
    finally:
        for router in routers:
            router.barred = None


def list_routers(model: Model) -> list[Any]:
    """Return the routers of the MoE layers in their order, without those of a teacher."""
    own = find_own_model(model)
    return [layer.router for layer in own.modules() if isinstance(layer, MoEFeedForward)]


def find_own_model(model: Model) -> Model:
    """Return the model without the teacher that its router asks."""
    return model.model if isinstance(model, GuidedModel) else model


def no_barring_reason(model: Model) -> str | None:
    """Return why experts cannot be barred, in words; None where they can."""
    if model.moe is None:
        return "a dense model has no experts"
    kind = model.moe.router.kind
    routers = list_routers(model)
    if not all(hasattr(router, "barred") for router in routers):
        return f"the router {kind} does not choose by scores, so that no expert can be barred"
    if len(routers) != len(model.layouts):
        return "its text tower has experts of its own"
    if removable_expert_count(model) < 1:
        return f"the router {kind} may choose all experts of a token"
    return None


def removable_expert_count(model: Model) -> int:
    """Return how many experts can be barred so that a token still has those that it uses."""
    moe = model.experts_and_router
    choices = moe.experts.choices
    return choices - round(moe.scaled_router.active(choices))
