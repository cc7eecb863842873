"""What every router's settings say of it."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Protocol, Self

from torch import Tensor, nn

from moecore.core.config import Part
from moecore.core.files import UserError
from moecore.core.surroundings import Misfits, Surroundings

# for language models
CAUSAL = "top_k_softmax, eigenbasis, hash by word or position, or noisy_top_k without a capacity"


class ChoosesK(Protocol):
    """A router each of whose tokens uses k experts."""

    @property
    def k(self) -> int: ...


class Router(Part, ABC):
    """The settings of a router, a family of parts; its ``build`` gives the module that routes."""

    chooses_per_token: ClassVar[bool] = True  # each token its experts, so that rows are pairs
    has_expert_rows: ClassVar[bool] = True  # it has parameters for each expert, which may be cut
    # equal rows of its parameters give equal logits and nothing else tells experts apart
    has_equal_rows: ClassVar[bool] = False
    # each expert has a bias or threshold of its own, so that experts cannot be joined
    has_expert_thresholds: ClassVar[bool] = False
    # the kind of a regularizer without which it does not work, and which reads its module
    own_loss: ClassVar[str | None] = None
    has_score_threshold: ClassVar[bool] = False  # ``threshold``, which a chosen logit exceeds

    def surround(self, around: Surroundings) -> Surroundings:
        """Return the surroundings of a balance, of groups, or of a router inside of this one."""
        return around._replace(router=self)

    def misfits(self, around: Surroundings) -> Misfits:
        """Yield where a balance of its own finds nothing to balance."""
        balance = getattr(self, "balance", None)
        if balance is None or "balance" not in type(self).model_fields or around.experts is None:
            return
        k, experts = self.chosen_of(around.experts), around.experts.choices
        try:
            balance.check_k(k, experts)
        except UserError as error:
            yield ("k",), str(error).removeprefix("router.k: ")
            return
        if k >= experts:
            text = f"found {balance.kind}, but every token has all {experts} experts"
            yield ("balance",), f"{text}; allowed: null, or a smaller k"

    def chosen_of(self, experts: Any) -> int:
        """Return how many of these Experts a token uses at most: pieces where they are split."""
        router, k = self, getattr(self, "k", None)
        if k is not None and (scaled := max(1, experts.scale_k(k))) != k:
            router = self.with_k(scaled)
        return int(router.active(experts.choices))

    @abstractmethod
    def build(self, width: int, experts: int, basis: Tensor | None = None) -> nn.Module:
        """Return a module (tokens, context) → (plan, RoutingRecord); UserError where none can be.

        tokens: (B, T, width).  context: RoutingContext.  A plan has ``dispatch(tokens) -> Rows``
        and ``combine(rows) -> tokens``.  basis: the experts' (E, d, r), where they lend theirs.
        What is no gradient a module may learn by ``after_step(records, place, progress)``, which
        the loop calls after each step of the optimizer with the records of all layers and which of
        them is its own; such state is a buffer. What it chooses by, where that is not the
        probabilities, it may say by ``selection_scores(record)``, (B, T, E).
        """

    @property
    def provides(self) -> frozenset[str]:
        """Return what regularizers may need of its record beyond probs: "load", "basis"."""
        return frozenset()

    @property
    def wants(self) -> frozenset[str]:
        """The fields of RoutingContext that it reads."""
        return frozenset()

    def phase(self, progress: float) -> float:
        """The share of the training that is done, if the router looks at it: else constant.

        Asked once for each MoE layer of a forward pass; RoutingContext.progress is what it says.
        """
        return 1.0

    def with_k(self, k: int) -> Self:
        """Return the router with another k; UserError for one without."""
        fields = type(self).model_fields
        if "k" not in fields:
            kind = fields["kind"].default
            raise UserError(f"finetune.k: found {k}, but the router {kind} has no k; allowed: null")
        return self.model_copy(update={"k": k})

    def check_k(self: ChoosesK, experts: int, key: str = "router.k") -> None:
        """Raise UserError, with ``key``, where k is above the number of experts."""
        if self.k > experts:
            raise UserError(
                f"{key} is {self.k}, but there are {experts} experts (experts.number); allowed: "
                f"1 to {experts}"
            )

    def check_causal(self, key: str = "router") -> None:
        """Raise UserError where a token's experts depend on later tokens or on other sequences, in
        training or in evaluation. A router that decides per token never raises.
        """

    @property
    def looks_ahead_in_training(self) -> bool:
        """Return whether one that ``check_causal`` lets pass is causal in evaluation alone."""
        return False

    def for_finetuning(self) -> Self:
        """The router as it goes on when its model is fine-tuned."""
        return self

    def fix_sizes(self, experts: int) -> Self:
        """Return the router with all sizes written out that follow from the number of experts, so
        that they stay when there are fewer.
        """
        return self

    def active(self, experts: int) -> float:
        """Return how many of ``experts`` experts a token uses, on average: k, all without one."""
        return getattr(self, "k", experts)
