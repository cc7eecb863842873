"""The warm start of region experts: a tissue's tokens are routed to its expert."""

from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from moecore.core import ranks, routing_records
from moecore.core.config import Config, Misfits, Surroundings
from moecore.training.regularizers.base import Regularizer, check_has_experts

TEMPERATURE = 0.1  # scores are divided by it before the softmax: cosines are close to each other


class RegionExpertSettings(Config):
    """Region experts (ERMoE-ba, supplement §2.2): the first experts are named after tissues.

    In the warm start each volume is reduced to one tissue, in turns. It counts in the age loss and
    in a loss that teaches routers the tissue's expert. Afterwards the share ``isolated`` of the
    volumes is reduced and counts in the routers' loss only, the others in the age loss only. Tokens
    always go to the experts that the router chooses.
    """

    experts: tuple[str, ...] = Field(min_length=1, description="the first experts' tissues")
    after: int = Field(0, ge=0, description="epochs on whole volumes before the warm start")
    warm_start_epochs: int = Field(3, ge=0, description="epochs on volumes of one tissue; 0: none")
    isolated: float = Field(0.0, ge=0, lt=1, description="share of one-tissue volumes afterwards")

    def misfits(self, around: Surroundings) -> Misfits:
        regions: tuple[str, ...] | None = getattr(around.source, "regions", None)
        if regions == ():
            text = f"found some, but {around.data} has no tissue maps (maps and dseg are null)"
            yield (), f"{text}; allowed: null, or data with maps"
        for index, tissue in enumerate(self.experts):
            if regions and tissue not in regions:
                yield ("experts", index), f"found {tissue!r}; allowed: {', '.join(regions)}"

    @model_validator(mode="after")
    def _check_unique_tissues(self) -> "RegionExpertSettings":
        if len(set(self.experts)) != len(self.experts):
            raise ValueError(f"experts are {list(self.experts)}; allowed: each tissue once")
        return self


class RegionRouting(Regularizer):
    """Cross-entropy of router scores with the tissue's expert, for tokens of one-tissue volumes.

    Mean over MoE layers. *Our choice*: the paper warm-starts region experts on region-isolated
    inputs (algorithm 2, line 1), but does not say how the routers learn it. Forcing tokens to an
    expert instead would give the next layer information that is missing when the model is used.
    """

    added_by: ClassVar[str] = "regions"

    kind: Literal["region_routing"] = "region_routing"

    def __call__(self, step: routing_records.ObjectiveInputs) -> Tensor:
        check_has_experts(step)
        if (belongs := step.batch.belongs) is None:
            return step.output.routing[0].logits.new_zeros(())
        terms = [
            region_routing_loss(scores=record.logits, belongs=belongs, temperature=TEMPERATURE)
            for record in step.output.routing
        ]
        return torch.stack(terms).mean()


def region_routing_loss(*, scores: Tensor, belongs: Tensor, temperature: float) -> Tensor:
    """Return the mean of −log softmax(scores / temperature) at each token's expert, in nats."""
    # Over the tokens of the global batch that belong to an expert; 0 without such tokens. scores:
    # (B, T, E), of all experts. belongs: (B, T) int64, the expert of each token, or -1.
    log = torch.log_softmax(scores / temperature, dim=-1)
    has_expert = belongs >= 0
    log_probs = log.gather(-1, belongs.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    count = has_expert.sum().to(log_probs.dtype)
    total = ranks.total_over_ranks(torch.stack([log_probs.where(has_expert, 0).sum(), count]))
    return -total[0] / total[1].clamp_min(1)
