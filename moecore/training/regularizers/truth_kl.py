"""The student's router imitates the oracle: TGR-MoE with the truth of the data as its teacher."""

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from moecore.core.files import UserError
from moecore.core.routing_records import ObjectiveInputs, RoutingContext, RoutingRecord
from moecore.nn.backbones.base_model import majority_token_kinds
from moecore.nn.routers.told import ToldRouter
from moecore.training.regularizers.base import Regularizer, check_has_experts
from moecore.training.regularizers.router_kl import router_kl


class TruthKl(Regularizer):
    """KL from the routing of ``told`` to the student's, mean over MoE layers (*our own*).

    No teacher's network is asked, so it also acts in fine-tuning.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"routing", "truth"})

    kind: Literal["truth_kl"] = "truth_kl"
    weight: float = Field(5.0, ge=0, description="factor in the objective")

    def __call__(self, step: ObjectiveInputs) -> Tensor:
        check_has_experts(step)
        if not step.model.image.truth:
            allowed = "data whose card says truth"
            raise UserError(f"truth_kl: nobody knows the truth of these tokens; allowed: {allowed}")
        divergences = [
            truth_kl(truth=majority_token_kinds(step.batch.images, layout), record=record)
            for record, layout in zip(step.output.routing, step.model.layouts, strict=True)
        ]
        return torch.stack(divergences).mean()


def truth_kl(*, truth: Tensor, record: RoutingRecord) -> Tensor:
    """KL in nats from ``told``'s routing to that of the record, averaged over tokens; a scalar ≥ 0.

    truth: int64 (B, T), each token's kind, 1 and up; 0: unknown, which ``told`` sends to expert 0.
    """
    told = ToldRouter(experts=record.probs.shape[-1])
    _, teacher = told(record.probs, RoutingContext(truth=truth))
    return router_kl(teacher=teacher.probs, student=record.probs)
