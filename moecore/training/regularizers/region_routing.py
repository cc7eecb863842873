"""The warm start of region experts: a tissue's tokens find its expert by their scores."""

from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from moecore.core.config import Config
from moecore.core.ranks import total_over_ranks
from moecore.core.routing_records import ObjectiveInputs
from moecore.core.surroundings import Misfits, Surroundings
from moecore.training.regularizers.base import Regularizer, check_has_experts

TEMPERATURE = 0.1  # scores are divided by it before the softmax: cosines lie close together


class RegionExpertSettings(Config):
    """Region experts (ERMoE-ba, supplement §2.2): the first experts are named after tissues and are
    warm-started on volumes that keep only theirs.

    In the warm start each volume keeps one tissue, all in turn; age is learned from that, and the
    routers from the tissue's expert. Afterwards a share of the volumes, isolated, goes on to teach
    the routers, and age is learned from the others. Routers decide throughout.
    """

    experts: tuple[str, ...] = Field(
        min_length=1, description="tissues as the data names them, of the first experts"
    )
    after: int = Field(0, ge=0, description="epochs on whole volumes before the warm start")
    warm_start_epochs: int = Field(
        3, ge=0, description="epochs on volumes that keep one tissue; 0 for none"
    )
    isolated: float = Field(
        0.0, ge=0, lt=1, description="share of volumes with one tissue after the warm start"
    )

    def misfits(self, around: Surroundings) -> Misfits:
        """Yield tissues of which the data have no maps; a cohort of one's own may have none."""
        known: tuple[str, ...] | None = getattr(around.source, "regions", None)
        if known == ():
            text = f"found some, but {around.data} has no tissue maps (maps and dseg are null)"
            yield (), f"{text}; allowed: null, or data with maps"
        for index, tissue in enumerate(self.experts):
            if known and tissue not in known:
                yield ("experts", index), f"found {tissue!r}; allowed: {', '.join(known)}"

    @model_validator(mode="after")
    def _once(self) -> "RegionExpertSettings":
        if len(set(self.experts)) != len(self.experts):
            raise ValueError(f"experts are {list(self.experts)}; allowed: each tissue once")
        return self


class RegionRouting(Regularizer):
    """Cross-entropy of the scores with the expert that each token of an isolated tissue belongs to,
    averaged over MoE layers; 0 where no volume is isolated.

    *Our choice*: the paper says that region experts are warm-started on region-isolated inputs
    (algorithm 2, line 1), not how the routers learn of it. Here the tissue of an isolated volume is
    the label of its tokens. Tokens sent to an expert by force would tell the next layer by what
    came out of it, which nothing does when the model is used.
    """

    added_by: ClassVar[str] = "regions"

    kind: Literal["region_routing"] = "region_routing"

    def __call__(self, step: ObjectiveInputs) -> Tensor:
        check_has_experts(step)
        if (belongs := step.batch.belongs) is None:
            return step.output.routing[0].logits.new_zeros(())
        terms = [
            region_routing_loss(scores=record.logits, belongs=belongs, temperature=TEMPERATURE)
            for record in step.output.routing
        ]
        return torch.stack(terms).mean()


def region_routing_loss(*, scores: Tensor, belongs: Tensor, temperature: float) -> Tensor:
    """Mean over the tokens of the global batch that belong to an expert of
    −log softmax(scores / temperature) at that expert, in nats; 0 where there is none.

    scores: (B, T, E), of all experts.  belongs: (B, T) int64, the expert of each token, or -1.
    """
    log = torch.log_softmax(scores / temperature, dim=-1)
    known = belongs >= 0
    log_probs = log.gather(-1, belongs.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    summed = torch.stack([log_probs.where(known, 0).sum(), known.sum().to(log_probs.dtype)])
    total = total_over_ranks(summed)
    return -total[0] / total[1].clamp_min(1)
