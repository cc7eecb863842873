"""The cosine router of X-MoE (Chi et al. 2022): the angle of a token and an expert's embedding."""

import math
from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from moecore.nn.routers import base, noisy_top_k
from moecore.nn.routers.token_choice import MAX_LOG_FACTOR, cosines_to_embeddings, router_logits


class Cosine(noisy_top_k.NoisyTopK):
    """Use cosines in a narrow space, divided by a learned temperature, as noisy_top_k's logits.

    Gates are not renormalised unless ``renormalise`` says so, and there is no noise by default.
    """

    has_equal_rows: ClassVar[bool] = False

    kind: Literal["cosine"] = "cosine"  # pyrefly: ignore[bad-override]
    noise_std: base.NoiseStd = 0.0
    embedding: int | None = Field(None, ge=2, description="width; null: half the number of experts")
    temperature: float = Field(0.3, ge=0.01, description="initial divisor of the cosines")

    @model_validator(mode="after")
    def _check_start_is_normal(self) -> "Cosine":
        if self.start != "normal":
            raise ValueError("start: found orthonormal, but lengths do not matter; allowed: normal")
        return self

    def embedding_width(self, experts: int) -> int:
        return self.embedding or max(2, experts // 2)

    def fix_sizes(self, experts: int) -> "Cosine":
        return self.model_copy(update={"embedding": self.embedding_width(experts)})

    def build(self, width: int, experts: int, basis: Tensor | None = None) -> "CosineRouter":
        self.check_experts(width, experts)
        return CosineRouter(self, width, experts)


# ``weight`` (E, d_e): embeddings; ``projection`` (d_e, d); ``log_factor`` (1,): −ln temperature.
class CosineRouter(noisy_top_k.NoisyTopKRouter):
    """``router(tokens)`` with tokens (B, T, d) returns (SparsePlan, RoutingRecord)."""

    def __init__(self, config: Cosine, width: int, experts: int) -> None:
        narrow = config.embedding_width(experts)
        super().__init__(config, narrow, experts)
        # with lengths near 1 the optimizer turns embeddings as fast as it changes other weights
        nn.init.normal_(self.weight, std=narrow**-0.5)
        self.projection = nn.Parameter(nn.init.trunc_normal_(torch.empty(narrow, width), std=0.02))
        self.log_factor = nn.Parameter(torch.tensor([-math.log(config.temperature)]))

    def logits(self, tokens: Tensor) -> Tensor:
        cosines = cosines_to_embeddings(router_logits(tokens, self.projection), self.weight)
        return cosines * self.log_factor.clamp(max=MAX_LOG_FACTOR).exp()
