"""DynMoE's loss: experts' embeddings point apart and stay short (Guo et al. 2024)."""

from typing import ClassVar, Literal, cast

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import normalize

from moecore.core.files import UserError
from moecore.core.routing_records import ObjectiveInputs
from moecore.nn.routers.token_choice import FLOOR
from moecore.training.regularizers.base import Regularizer, check_has_experts
from moecore.training.sharded_state import to_full_tensor


class DiversitySimplicity(Regularizer):
    """The loss on the embeddings of the router dynamic, summed over MoE layers."""

    needs: ClassVar[frozenset[str]] = frozenset({"routing", "embeddings"})
    allowed_with: ClassVar[str] = "the router dynamic"

    kind: Literal["diversity_simplicity"] = "diversity_simplicity"
    weight: float = Field(0.01, ge=0, description="factor in the objective")

    def __call__(self, step: ObjectiveInputs) -> Tensor:
        check_has_experts(step)
        named = step.model.named_parameters()
        embeddings = [one for name, one in named if name.endswith("router.embeddings")]
        if not embeddings:
            allowed = "the router dynamic"
            raise UserError(f"diversity_simplicity: no router has embeddings; allowed: {allowed}")
        terms = [
            embedding_loss(embeddings=to_full_tensor(own))
            # a text tower's own embeddings come last, and have no records here
            for own, _ in zip(embeddings, step.output.routing, strict=False)
        ]
        return cast(Tensor, sum(terms))


def embedding_loss(*, embeddings: Tensor) -> Tensor:
    """Frobenius norm of the cosines between experts without the diagonal ("diversity"), plus the
    mean length of their embeddings ("simplicity").

    embeddings: (E, d), of all experts that exist, whether the step used them or not: DynMoE's code
    leaves out those that it removed.  Returns a scalar ≥ 0.
    """
    directions = normalize(embeddings, dim=-1, eps=FLOOR)
    cosines = directions @ directions.mT
    itself = torch.eye(len(cosines), dtype=torch.bool, device=cosines.device)
    alike = torch.linalg.matrix_norm(cosines.masked_fill(itself, 0))
    return alike + torch.linalg.vector_norm(embeddings, dim=-1).mean()
