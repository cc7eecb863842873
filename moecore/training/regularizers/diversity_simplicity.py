"""DynMoE's loss: experts' embeddings point apart and stay short (Guo et al. 2024)."""

from typing import ClassVar, Literal, cast

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import normalize

from moecore.core.files import UserError
from moecore.core.ranks import total_over_ranks
from moecore.core.routing_records import ObjectiveInputs
from moecore.nn.routers.token_choice import FLOOR
from moecore.training.regularizers.base import Regularizer
from moecore.training.regularizers.layer_terms import check_has_experts
from moecore.training.sharded_state import to_full_tensor


class DiversitySimplicity(Regularizer):
    """The loss on the embeddings of the router dynamic, summed over MoE layers."""

    needs: ClassVar[frozenset[str]] = frozenset({"routing", "embeddings"})

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
            embedding_loss(
                embeddings=to_full_tensor(own),
                used=total_over_ranks(record.chosen.sum(dim=(0, 1))) > 0,
            )
            # a text tower's own embeddings come last, and have no records here
            for own, record in zip(embeddings, step.output.routing, strict=False)
        ]
        return cast(Tensor, sum(terms))


def embedding_loss(*, embeddings: Tensor, used: Tensor) -> Tensor:
    """Frobenius norm of the cosines between ``used`` experts without the diagonal ("diversity"),
    plus the mean length of all embeddings ("simplicity").

    embeddings: (E, d).  used: (E,) bool, by any token of the step.  Returns a scalar ≥ 0.
    """
    directions = normalize(embeddings, dim=-1, eps=FLOOR)
    cosines = directions @ directions.mT
    pairs = used & used.unsqueeze(-1) & ~torch.eye(len(used), dtype=torch.bool, device=used.device)
    alike = torch.linalg.matrix_norm(torch.where(pairs, cosines, 0))
    return alike + torch.linalg.vector_norm(embeddings, dim=-1).mean()
