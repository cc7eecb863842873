"""The loss of a router on a teacher's features: balanced and confident (TGR-MoE, eq. 8)."""

from typing import ClassVar, Literal, cast

from pydantic import Field
from torch import Tensor

from moecore.core import files, routing_records
from moecore.training.regularizers.base import Regularizer
from moecore.training.regularizers.entropy import entropy
from moecore.training.regularizers.importance import importance


class TeacherRouter(Regularizer):
    """CV² of mean probs times ``balance`` + token entropy times ``entropy``, of teacher routers."""

    needs: ClassVar[frozenset[str]] = frozenset({"guidance"})
    added_by: ClassVar[str] = "teacher_router: {fit: joint}"

    kind: Literal["teacher_router"] = "teacher_router"
    balance: float = Field(0.005, ge=0, description="factor of CV² of experts' mean probability")
    entropy: float = Field(0.005, ge=0, description="factor of the mean token entropy")

    def __call__(self, step: routing_records.ObjectiveInputs) -> Tensor:
        if step.guidance is None or not step.guidance.probs:
            raise files.UserError(
                "teacher_router: there is no teacher guidance in this step; give the method a "
                "teacher, or remove teacher_router"
            )
        terms = balance_and_entropy_terms(probs=step.guidance.probs)
        return self.balance * terms["balance"] + self.entropy * terms["entropy"]


def balance_and_entropy_terms(*, probs: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """Return ``balance``, CV² of mean probs, and ``entropy``: sums over layers' probs (B, T, E)."""
    return {
        "balance": cast(Tensor, sum(importance(probs=p) for p in probs)),
        "entropy": cast(Tensor, sum(entropy(probs=p) for p in probs)),
    }
