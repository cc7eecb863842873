"""Orthonormal columns of every expert's basis (ERMoE, Algorithm 1, line 22; §7)."""

from typing import ClassVar, Literal, cast

import torch
from pydantic import Field
from torch import Tensor

from moecore.core import files, ranks, routing_records
from moecore.training.distributed_training import local_shard
from moecore.training.regularizers.base import Regularizer


class Orthogonality(Regularizer):
    """The orthogonality penalty, summed over every parameter that is called ``basis``."""

    needs: ClassVar[frozenset[str]] = frozenset({"routing", "basis"})
    allowed_with: ClassVar[str] = "experts or a router that have bases (eigen, eigenbasis)"
    teaches_choice: ClassVar[bool] = False

    kind: Literal["orthogonality"] = "orthogonality"
    weight: float = Field(5e-5, ge=0, description="factor in the objective (the paper's λ)")

    def __call__(self, step: routing_records.ObjectiveInputs) -> Tensor:
        parameters = step.model.named_parameters()
        bases = [values for name, values in parameters if name.split(".")[-1] == "basis"]
        if not bases:
            raise files.UserError(
                "orthogonality: the model has no basis; use experts of kind eigen or a router of "
                "kind eigenbasis, or remove it"
            )
        return cast(Tensor, sum(orthogonality_penalty(basis=basis) for basis in bases))


def orthogonality_penalty(*, basis: Tensor) -> Tensor:
    """Return the sum over experts of the squared Frobenius norm ‖BᵀB − I‖² (ERMoE, Algorithm 1)."""
    # basis: (E, d, r). A scalar ≥ 0, in fp32 at least: bf16 is off by some 1e-3.
    with torch.autocast(basis.device.type, enabled=False):
        local = local_shard(basis)
        local = local.to(torch.promote_types(local.dtype, torch.float32))
        identity = torch.eye(local.shape[-1], dtype=local.dtype, device=local.device)
        return ranks.total_over_shards((local.mT @ local - identity).square().sum(), basis)
