"""TGR-MoE's upper bound (§5.3, supplement I): the teacher's router decides for the student."""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from moecore.core.files import UserError
from moecore.core.routing_records import NO_CONTEXT, RoutingContext, RoutingRecord
from moecore.nn.kernels.grouped import full_precision
from moecore.nn.routers.base import Router
from moecore.nn.routers.noisy_top_k import NoisyTopK, NoisyTopKRouter
from moecore.nn.routers.token_choice import PlanAndRecord, router_logits, safe_log


class TeacherRouted(Router):
    """Let the teacher's router choose and weigh experts; the student's only imitates it.

    `router_kl` teaches the student's router. The teacher is frozen except for its router, which
    learns from the task and the loss `load`; `importance` and `router_kl` read the student's probs.
    Measurements read the router that decides: the teacher's, unless `inference` is `student`.
    """

    kind: Literal["teacher_routed"] = "teacher_routed"
    k: int = Field(2, ge=1, description="experts per token")
    noise_std: float = Field(1.0, ge=0, description="on the teacher's log probs; unit: 1 / experts")
    inference: Literal["teacher", "student"] = Field(
        "teacher", description="it decides in evaluation; in training the student never does"
    )

    @property
    def provides(self) -> frozenset[str]:
        return frozenset({"load"})

    @property
    def wants(self) -> frozenset[str]:
        return frozenset({"teacher"})

    def build(self, width: int, experts: int, basis: Tensor | None = None) -> "TeacherRoutedRouter":
        self.check_k(experts)
        return TeacherRoutedRouter(self, width, experts)


# The decision is noisy top-k's, with log p of the teacher as logits and with a gradient to it. In
# training ``load``, ``chosen`` and ``combine`` are the decision's, ``logits`` and ``probs`` the
# student's, whose loss reaches its ``weight`` only, not the tokens. In evaluation the record is of
# the router that decides; if that is the student's, attacks see its gradient to the tokens.
class TeacherRoutedRouter(NoisyTopKRouter):
    """``router(tokens, context)``: (B, T, d), teacher (B, T, E) to (SparsePlan, RoutingRecord)."""

    def __init__(self, config: TeacherRouted, width: int, experts: int) -> None:
        super().__init__(NoisyTopK(k=config.k, noise_std=config.noise_std), width, experts)
        self.inference = config.inference

    def forward(self, tokens: Tensor, context: RoutingContext = NO_CONTEXT) -> PlanAndRecord:
        with full_precision(tokens):
            # The student's router imitates: its loss must not change the tokens.
            logits = router_logits(tokens.detach() if self.training else tokens, self.weight)
            if not self.training and self.inference == "student":
                return self.decide(logits)
            teacher = context.teacher
            if teacher is None:
                raise UserError(
                    "router teacher_routed: the teacher decides, but its routing is missing "
                    "(context.teacher); give the method a teacher, or set router.inference to "
                    "student for evaluation without one"
                )
            if teacher.shape != logits.shape:
                raise UserError(
                    f"router teacher_routed: the teacher's routing has shape {tuple(teacher.shape)}"
                    f" (images, tokens, experts), the student's {tuple(logits.shape)}; they must "
                    "be equal: check patch size, image size and experts.number"
                )
            plan, record = self.decide(safe_log(teacher).to(logits.dtype))
            if self.training:  # its loss reads the student; measurements read what decides
                probs = torch.softmax(logits, dim=-1)
                record = RoutingRecord(logits, probs, record.load, record.chosen, record.combine)
            return plan, record
