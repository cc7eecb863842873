"""The warm start of region experts: a token of a volume that keeps one tissue should find that tissue's expert by its score."""

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from moecore.config import Config
from moecore.files import StageError
from moecore.records import Step


class RegionRouting(Config):
    """Cross-entropy of the scores with the expert that each token of an isolated tissue belongs to, averaged over MoE layers; 0 where no volume is isolated.

    *Our choice*: the paper says that region experts are warm-started on region-isolated inputs (algorithm 2, line 1), not how their ψ_e
    learn of it. Tokens that are merely sent to an expert teach its ψ little (the weight of a chosen expert moves slowly, and not at all
    at k = 1); this term draws the expert's ψ and basis to the tokens of its tissue and away from those of the others.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"routing", "preference"})

    kind: Literal["region_routing"] = "region_routing"
    weight: float = Field(default=1.0, ge=0, description="factor in the objective")
    temperature: float = Field(default=0.1, gt=0, description="scores are divided by it before the softmax; cosines lie close together")

    def __call__(self, step: Step) -> Tensor:
        if not step.output.routing:
            raise StageError("region_routing: the model has no MoE layers; give the method a router and experts, or remove region_routing")
        if (preference := step.batch.preference) is None:
            return step.output.routing[0].logits.new_zeros(())
        terms = [region_routing(scores=record.logits, preference=preference, temperature=self.temperature) for record in step.output.routing]
        return torch.stack(terms).mean()


def region_routing(*, scores: Tensor, preference: Tensor, temperature: float) -> Tensor:
    """Mean over the tokens that belong to an expert of −log softmax(scores / temperature) at that expert, in nats; 0 where there is none.

    scores: (B, T, E), of all experts.  preference: (B, T, E), 1 at the expert that a token belongs to.
    """
    sent = preference > 0
    log = torch.log_softmax(scores / temperature, dim=-1)
    return -log.where(sent, 0).sum() / sent.any(dim=-1).sum().clamp_min(1)
