"""TGR-MoE's upper bound (§5.3, supplement I): the teacher's router decides for the student.

B images, T tokens per image, E experts, k chosen per token, d width.
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from moecore.core.files import UserError
from moecore.core.routing_records import RoutingContext, RoutingRecord
from moecore.nn.dispatch import SparsePlan
from moecore.nn.kernels.grouped import full_precision
from moecore.nn.routers.base import Router
from moecore.nn.routers.noisy_top_k import NoisyTopK, NoisyTopKRouter
from moecore.nn.routers.token_choice import router_logits


class TeacherRouted(Router):
    """The teacher's router chooses experts and weighs them; the student's only imitates it, with
    `router_kl` among the regularizers.

    The teacher's router learns from the task and from the balance of `load`; `importance` and
    `router_kl` look at the student's probs. Measurements look at the router that decides.
    """

    kind: Literal["teacher_routed"] = "teacher_routed"
    k: int = Field(2, ge=1, description="experts per token")
    noise_std: float = Field(
        1.0, ge=0, description="on the teacher's log probs, in units of 1 / experts"
    )
    inference: Literal["teacher", "student"] = Field(
        "teacher", description="who decides in evaluation; the student never did in training"
    )

    @property
    def provides(self) -> frozenset[str]:
        """Return what its record gives beyond probs."""
        return frozenset({"load"})

    @property
    def wants(self) -> frozenset[str]:
        """The routing of the teacher."""
        return frozenset({"teacher"})

    def build(self, width: int, experts: int, basis: Tensor | None = None) -> "TeacherRoutedRouter":
        """The router of ``width``-wide tokens; UserError where k is above ``experts``."""
        self.check_k(experts)
        return TeacherRoutedRouter(self, width, experts)


class TeacherRoutedRouter(NoisyTopKRouter):
    """``router(tokens, context)``: (B, T, d), teacher (B, T, E) to (SparsePlan, RoutingRecord).

    The decision is noisy top-k's, with log p of the teacher as logits and with gradient to it; in
    evaluation the record is that of who decides. In training ``load``, ``chosen`` and ``combine``
    tell of the decision, ``logits`` and ``probs`` are the student's own, whose loss reaches its
    ``weight`` only, not the tokens. Where the student decides in evaluation, attacks see its
    gradient to the tokens.
    Raises UserError where the teacher has to decide and is missing or of another shape.
    """

    def __init__(self, config: TeacherRouted, width: int, experts: int) -> None:
        super().__init__(NoisyTopK(k=config.k, noise_std=config.noise_std), width, experts)
        self.inference = config.inference

    def forward(
        self, tokens: Tensor, context: RoutingContext = RoutingContext()
    ) -> tuple[SparsePlan, RoutingRecord]:
        with full_precision(tokens):
            # the student's router imitates; what it learns must not bend the tokens to its will
            seen = tokens.detach() if self.training else tokens
            own = router_logits(seen, self.weight)
            if not self.training and self.inference == "student":
                return self.decide(own)
            plan, record = self.decide(
                _safe_log(_check_teacher(context.teacher, own.shape)).to(own.dtype)
            )
            if self.training:  # what its loss teaches; what is measured is what decides
                probs = torch.softmax(own, dim=-1)
                record = RoutingRecord(own, probs, record.load, record.chosen, record.combine)
            return plan, record


def _safe_log(probs: Tensor) -> Tensor:
    """Logarithm of probs, in fp32 at least.

    One that was rounded to 0 counts as the smallest normal number, without a gradient.
    """
    probs = probs.to(torch.promote_types(probs.dtype, torch.float32))
    return probs.clamp_min(torch.finfo(probs.dtype).tiny).log()


def _check_teacher(teacher: Tensor | None, shape: torch.Size) -> Tensor:
    """The teacher's probs; UserError unless there is one (E,) per student's token."""
    if teacher is None:
        raise UserError(
            "router teacher_routed: the teacher decides, but its routing is not here "
            "(context.teacher); give the method a teacher, or set router.inference to student "
            "for evaluation without one"
        )
    if teacher.shape != shape:
        raise UserError(
            f"router teacher_routed: the teacher's routing has shape {tuple(teacher.shape)} "
            f"(images, tokens, experts), the student's {tuple(shape)}; they must be equal: check "
            "patch size, image size and experts.number"
        )
    return teacher
