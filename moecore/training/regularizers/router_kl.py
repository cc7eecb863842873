"""The student's router imitates a router on a dense teacher's features (TGR-MoE)."""

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import kl_div

from moecore.core import files, routing_records
from moecore.nn.correspondence import add_distillation_token_probs
from moecore.training.regularizers.base import Regularizer


class RouterKl(Regularizer):
    """KL from the teacher's routing to the student's, mean over MoE layers, up to ``until``."""

    needs: ClassVar[frozenset[str]] = frozenset({"routing", "guidance"})

    kind: Literal["router_kl"] = "router_kl"
    weight: float = Field(5.0, ge=0, description="factor in the objective")
    until: float = Field(1.0, gt=0, le=1, description="share of the training during which it acts")

    def __call__(self, step: routing_records.ObjectiveInputs) -> Tensor:
        students = [record.probs for record in step.output.routing]
        if step.guidance is None:
            raise files.UserError(
                "router_kl: there is no teacher guidance in this step; run the teacher_router "
                "stage first, or remove router_kl"
            )
        teachers = step.guidance.probs
        if not students or len(teachers) != len(students):
            raise files.UserError(
                f"router_kl: the teacher guides {len(teachers)} MoE layers and the student has "
                f"{len(students)}; the numbers must be equal"
            )
        if step.progress >= self.until:
            return students[0].new_zeros(())
        divergences = [
            router_kl(teacher=add_distillation_token_probs(p, q.shape), student=q)
            for p, q in zip(teachers, students, strict=True)
        ]
        return torch.stack(divergences).mean()


def router_kl(*, teacher: Tensor, student: Tensor) -> Tensor:
    """Return KL(teacher ‖ student) in nats, summed over experts, mean over tokens (TGR, eq. 9)."""
    # teacher, student: (B, T, E), each token sums to 1; no gradient reaches the teacher. A scalar ≥
    # 0. A student's probability of 0 counts as the smallest normal number.
    log_student = student.clamp_min(torch.finfo(student.dtype).tiny).log()
    return kl_div(log_student, teacher.detach(), reduction="none").sum(dim=-1).mean()
