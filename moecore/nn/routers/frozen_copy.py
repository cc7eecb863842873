"""StableMoE (Dai et al. 2022) as in TGR-MoE (supplement, J.3): a router frozen after a phase."""

from typing import Literal, Self

from pydantic import Field, model_validator
from torch import Tensor

from moecore.core.routing_records import NO_CONTEXT, RoutingContext
from moecore.nn.balances.base import Balance
from moecore.nn.routers.base import Router
from moecore.nn.routers.noisy_top_k import NoisyTopK, NoisyTopKRouter
from moecore.nn.routers.token_choice import PlanAndRecord, router_logits


class FrozenCopy(Router):
    """Train a noisy top-k router for a share of the training, then freeze it, without noise.

    StableMoE freezes a small distilled copy; here, as in TGR-MoE, the router itself is frozen. It
    stays frozen when its model is fine-tuned.
    """

    kind: Literal["frozen_copy"] = "frozen_copy"
    router: NoisyTopK = Field(NoisyTopK(), description="the router of the first phase")
    until: float = Field(0.5, ge=0, le=1, description="share of training when the router learns")

    @model_validator(mode="after")
    def _check_no_residual(self) -> "FrozenCopy":
        if self.router.residual:
            raise ValueError(
                "router.residual: found true, but the previous layer learns on, or is frozen at "
                "another time; allowed: false"
            )
        return self

    @property
    def provides(self) -> frozenset[str]:
        return self.router.provides

    @property
    def wants(self) -> frozenset[str]:
        return self.router.wants

    def check_causal(self, key: str = "router") -> None:
        self.router.check_causal(f"{key}.router")

    def phase(self, progress: float) -> float:
        """Return 0 while the router learns, 1 once it is frozen."""
        return float(progress >= self.until)

    @property
    def k(self) -> int:
        return self.router.k

    @property
    def balance(self) -> Balance | None:
        return self.router.balance

    def with_k(self, k: int) -> Self:
        return self.model_copy(update={"router": self.router.model_copy(update={"k": k})})

    def for_finetuning(self) -> Self:
        return self.model_copy(update={"until": 0.0})

    def build(self, width: int, experts: int, basis: Tensor | None = None) -> "FrozenCopyRouter":
        self.router.check_experts(width, experts, key="router.router")
        return FrozenCopyRouter(self, width, experts)


# Once frozen, weights are detached: their gradient stays None, and AdamW skips such parameters, and
# their decay. Tokens still get a gradient through the gates. Evaluation ignores ``progress``.
class FrozenCopyRouter(NoisyTopKRouter):
    """``router(tokens, context)`` with tokens (B, T, d) returns (SparsePlan, RoutingRecord)."""

    def __init__(self, config: FrozenCopy, width: int, experts: int) -> None:
        super().__init__(config.router, width, experts)
        self.until = config.until
        self._frozen = False

    @property
    def is_learning(self) -> bool:
        """Return whether a call draws noise: in training, until the router is frozen."""
        return self.training and not self._frozen

    def forward(self, tokens: Tensor, context: RoutingContext = NO_CONTEXT) -> PlanAndRecord:
        self._frozen = self.training and context.progress >= self.until
        if self.balance is not None:  # sinkhorn's plan is for a router that learns
            self.balance.train(self.is_learning)
        return super().forward(tokens, context)

    def logits(self, tokens: Tensor) -> Tensor:
        return router_logits(tokens, self.weight.detach() if self._frozen else self.weight)
