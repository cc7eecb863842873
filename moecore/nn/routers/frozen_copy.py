"""StableMoE (Dai et al. 2022) as in TGR-MoE (supplement, J.3): the router is frozen after a phase.

B images, T tokens per image, E experts, d width.
"""

from typing import Literal, Self

from pydantic import Field, model_validator
from torch import Tensor

from moecore.core.routing_records import RoutingContext, RoutingRecord
from moecore.nn.balances.base import Balance
from moecore.nn.dispatch import SparsePlan
from moecore.nn.routers.base import Router
from moecore.nn.routers.noisy_top_k import NoisyTopK, NoisyTopKRouter
from moecore.nn.routers.token_choice import router_logits


class FrozenCopy(Router):
    """A noisy top-k router that learns for a share of the training, then stays, without noise.

    StableMoE freezes a small distilled copy; as in TGR-MoE it is the router itself here. It stays
    frozen while its model is fine-tuned.
    """

    kind: Literal["frozen_copy"] = "frozen_copy"
    router: NoisyTopK = Field(NoisyTopK(), description="the router of the first phase")
    until: float = Field(
        0.5, ge=0, le=1, description="share of the training during which the router learns"
    )

    @model_validator(mode="after")
    def _learns_alone(self) -> "FrozenCopy":
        if self.router.residual:
            problem = "the layer before goes on learning, or is frozen at another time"
            raise ValueError(f"router.residual: found true, but {problem}; allowed: false")
        return self

    @property
    def provides(self) -> frozenset[str]:
        """Return what the router of the first phase provides."""
        return self.router.provides

    @property
    def wants(self) -> frozenset[str]:
        """Return what the router of the first phase wants."""
        return self.router.wants

    def check_causal(self, key: str = "router") -> None:
        """Raise UserError where the router of the first phase does."""
        self.router.check_causal(f"{key}.router")

    def phase(self, progress: float) -> float:
        """0 while the router learns, 1 once it is frozen."""
        return float(progress >= self.until)

    @property
    def k(self) -> int:
        """Experts per token."""
        return self.router.k

    @property
    def balance(self) -> Balance | None:
        """Return what shifts the choice to an even load, of the router of the first phase."""
        return self.router.balance

    def with_k(self, k: int) -> Self:
        """Return the router with ``k`` experts per token."""
        return self.model_copy(update={"router": self.router.model_copy(update={"k": k})})

    def for_finetuning(self) -> Self:
        """Return the router, frozen from the first step."""
        return self.model_copy(update={"until": 0.0})

    def build(self, width: int, experts: int, basis: Tensor | None = None) -> "FrozenCopyRouter":
        """The router of ``width``-wide tokens; UserError where the first phase's cannot be."""
        self.router.check_experts(width, experts, key="router.router")
        return FrozenCopyRouter(self, width, experts)


class FrozenCopyRouter(NoisyTopKRouter):
    """``router(tokens, context)`` with tokens (B, T, d) returns (SparsePlan, RoutingRecord).

    Once frozen, the weights take part detached: their gradient stays None, and AdamW leaves such
    parameters alone, weight decay included. Tokens still get a gradient through the gates.
    Evaluation does not look at ``progress``.
    """

    def __init__(self, config: FrozenCopy, width: int, experts: int) -> None:
        super().__init__(config.router, width, experts)
        self.until = config.until
        self._frozen = False

    @property
    def is_learning(self) -> bool:
        """Return whether a call draws noise: in training, until the router is frozen."""
        return self.training and not self._frozen

    def forward(
        self, tokens: Tensor, context: RoutingContext = RoutingContext()
    ) -> tuple[SparsePlan, RoutingRecord]:
        self._frozen = self.training and context.progress >= self.until
        if self.balance is not None:  # a plan (sinkhorn) is of a router that learns
            self.balance.train(self.is_learning)
        return super().forward(tokens, context)

    def logits(self, tokens: Tensor) -> Tensor:
        """The logits (B, T, E) of tokens (B, T, d)."""
        return router_logits(tokens, self.weight.detach() if self._frozen else self.weight)
