"""The student's router imitates the oracle: TGR-MoE with the truth of the data as teacher."""

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from moecore.core import files, routing_records
from moecore.nn.backbones.base_model import majority_token_kinds
from moecore.nn.routers.told import ToldRouter
from moecore.training.regularizers.base import Regularizer, check_has_experts
from moecore.training.regularizers.router_kl import router_kl


class TruthKl(Regularizer):
    """KL from routing by true token groups (router ``told``) to the model's, mean over MoE layers.

    *Our own*. It uses no teacher network, so it also acts in fine-tuning.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"routing", "truth"})

    kind: Literal["truth_kl"] = "truth_kl"
    weight: float = Field(5.0, ge=0, description="factor in the objective")

    def __call__(self, step: routing_records.ObjectiveInputs) -> Tensor:
        check_has_experts(step)
        if not step.model.image.truth:
            raise files.UserError("truth_kl: unknown truth; allowed: data whose card says truth")
        divergences = [
            truth_kl(truth=majority_token_kinds(step.batch.images, layout), record=record)
            for record, layout in zip(step.output.routing, step.model.layouts, strict=True)
        ]
        return torch.stack(divergences).mean()


def truth_kl(*, truth: Tensor, record: routing_records.RoutingRecord) -> Tensor:
    """Return KL(truth ‖ record) in nats, ≥ 0, mean over tokens; truth: kind n to expert n − 1."""
    # truth: int64 (B, T), true kinds, from 1; 0: unknown, which ``told`` sends to expert 0.
    told = ToldRouter(experts=record.probs.shape[-1])
    _, teacher = told(record.probs, routing_records.RoutingContext(truth=truth))
    return router_kl(teacher=teacher.probs, student=record.probs)
