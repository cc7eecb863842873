"""DynMoE's loss: experts' embeddings are diverse in direction and short (Guo et al. 2024)."""

from typing import ClassVar, Literal, cast

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import normalize

from moecore.core.files import UserError
from moecore.core.routing_records import ObjectiveInputs
from moecore.nn.routers.token_choice import MIN_NORM
from moecore.training.distributed_training import to_full_tensor
from moecore.training.regularizers.base import Regularizer, check_has_experts


class DiversitySimplicity(Regularizer):
    """DynMoE's loss on expert embeddings of the router ``dynamic``, summed over MoE layers."""

    needs: ClassVar[frozenset[str]] = frozenset({"routing", "embeddings"})
    allowed_with: ClassVar[str] = "the router dynamic"

    kind: Literal["diversity_simplicity"] = "diversity_simplicity"
    weight: float = Field(0.01, ge=0, description="factor in the objective")

    def __call__(self, step: ObjectiveInputs) -> Tensor:
        check_has_experts(step)
        parameters = step.model.named_parameters()
        embeddings = [values for name, values in parameters if name.endswith("router.embeddings")]
        if not embeddings:
            raise UserError("diversity_simplicity: no embeddings; allowed: the router dynamic")
        # A text tower's embeddings come last and have no records here.
        layers = embeddings[: len(step.output.routing)]
        losses = [embedding_loss(embeddings=to_full_tensor(values)) for values in layers]
        return cast(Tensor, sum(losses))


def embedding_loss(*, embeddings: Tensor) -> Tensor:
    """Return the norm of cosines between embeddings (diversity) plus their mean length."""
    # Embeddings (E, d) of all experts, also unused ones: DynMoE's code leaves out removed ones.
    directions = normalize(embeddings, dim=-1, eps=MIN_NORM)
    cosines = directions @ directions.mT
    diagonal = torch.eye(len(cosines), dtype=torch.bool, device=cosines.device)
    similarity = torch.linalg.matrix_norm(cosines.masked_fill(diagonal, 0))
    return similarity + torch.linalg.vector_norm(embeddings, dim=-1).mean()
