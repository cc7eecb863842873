"""Similarity-preserving balance: the router's rows stay orthonormal (SimBal, 2506.14038)."""

from typing import ClassVar, Literal, cast

import torch
from pydantic import Field
from torch import Tensor

from moecore.core import files, routing_records
from moecore.training.distributed_training import to_full_tensor
from moecore.training.regularizers.base import Regularizer


class Simbal(Regularizer):
    """SimBal: Σ |WWᵀ − I| over all entries and all routers W (E, d) with ``start: orthonormal``."""

    needs: ClassVar[frozenset[str]] = frozenset({"routing", "orthonormal"})
    allowed_with: ClassVar[str] = "a router with start: orthonormal"
    teaches_choice: ClassVar[bool] = False

    kind: Literal["simbal"] = "simbal"
    weight: float = Field(ge=0, description="factor in the objective; the paper's text has none")

    def __call__(self, step: routing_records.ObjectiveInputs) -> Tensor:
        modules = step.model.modules()
        rows = [row for module in modules for row in getattr(module, "orthonormal_rows", ())]
        if not rows:
            raise files.UserError(
                "simbal: no router's rows start orthonormal; give the router `start: orthonormal`, "
                "or remove it"
            )
        losses = (router_orthonormality_loss(weight=to_full_tensor(weight)) for weight in rows)
        return cast(Tensor, sum(losses))


def router_orthonormality_loss(*, weight: Tensor) -> Tensor:
    """Return the sum of |WWᵀ − I| over all entries, for a router's weight (E, d); a scalar ≥ 0."""
    products = weight @ weight.mT
    return (products - torch.eye(len(weight), dtype=weight.dtype, device=weight.device)).abs().sum()
