"""The base class of router settings."""

from abc import ABC, abstractmethod
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field
from torch import Tensor, nn

from moecore.core.config import Misfits, Part, Surroundings
from moecore.core.files import UserError

# routers that messages suggest for language models
CAUSAL = "top_k_softmax, eigenbasis, hash by word or position, or noisy_top_k without a capacity"


NoiseStd = Annotated[
    float, Field(ge=0, description="noise on the logits in training, in units of 1 / experts")
]


class Router(Part, ABC):
    """Settings of a router; ``build`` returns the module that routes. Base of all kinds."""

    chooses_per_token: ClassVar[bool] = True  # each token chooses its experts
    has_expert_rows: ClassVar[bool] = True  # parameters have a row per expert, which can be removed
    # the logits depend on an expert only through its row of the parameters
    has_equal_rows: ClassVar[bool] = False
    # each expert has its own bias or threshold, so that experts cannot be merged
    has_expert_thresholds: ClassVar[bool] = False
    # the kind of the regularizer that this router requires and that reads its module
    own_loss: ClassVar[str | None] = None
    has_score_threshold: ClassVar[bool] = False  # chosen logits exceed the setting ``threshold``
    # how a token's experts depend on later tokens, in evaluation too; None: see ``check_causal``
    looks_ahead: ClassVar[str | None] = None

    def surround(self, around: Surroundings) -> Surroundings:
        """Return the surroundings of settings inside this router: a balance, groups, a router."""
        return around._replace(router=self)

    def misfits(self, around: Surroundings) -> Misfits:
        """Yield (key, reason) if k leaves the router's balance without effect."""
        balance = getattr(self, "balance", None)
        if balance is None or "balance" not in type(self).model_fields or around.experts is None:
            return
        k = self.chosen_of(around.experts)
        experts = around.experts.choices
        try:
            balance.check_k(k, experts)
        except UserError as error:
            yield ("k",), str(error).removeprefix("router.k: ")
            return
        if k >= experts:
            text = f"found {balance.kind}, but every token has all {experts} experts"
            yield ("balance",), f"{text}; allowed: null, or a smaller k"

    def chosen_of(self, experts: Any) -> int:
        """Return how many of these experts, or pieces of split ones, a token uses at most."""
        router = self
        k = getattr(self, "k", None)
        if k is not None and (scaled := max(1, experts.scale_k(k))) != k:
            router = self.with_k(scaled)
        return int(router.active(experts.choices))

    @abstractmethod
    def build(self, width: int, experts: int, basis: Tensor | None = None) -> nn.Module:
        """Return a module (tokens, context) → (plan, RoutingRecord).

        The plan has ``dispatch(tokens) -> Rows`` and ``combine(rows) -> tokens``. A module that
        learns other than by gradients has ``after_step(records, place, progress)``, which the
        training loop calls after each optimizer step with the records of all layers and the
        module's index among them; such state is a buffer. A module that does not choose by its
        probabilities has ``selection_scores(record)``, which returns (B, T, E).

        Args:
            width: d of the tokens (B, T, d).
            experts: E.
            basis: (E, d, r), the experts' bases if they have any.

        Raises:
            UserError: for settings that do not fit ``width`` or ``experts``.
        """

    @property
    def provides(self) -> frozenset[str]:
        """Names of what regularizers can read of it in addition to probs: "load", "basis", …."""
        return frozenset()

    @property
    def wants(self) -> frozenset[str]:
        """Return the fields of RoutingContext that it reads."""
        return frozenset()

    def phase(self, progress: float) -> float:
        """Return the ``RoutingContext.progress`` that a layer's router gets in a forward pass.

        progress: share of the training that is done. Called once per layer and forward pass.
        """
        return 1.0

    def with_k(self, k: int) -> Self:
        """Return a copy with another k; UserError for a router without k."""
        fields = type(self).model_fields
        if "k" not in fields:
            kind = fields["kind"].default
            raise UserError.at(
                "finetune.k", found=f"{k}, but the router {kind} has no k", allowed="null"
            )
        return self.model_copy(update={"k": k})

    def check_k(self, experts: int, key: str = "router.k") -> None:
        """Raise UserError, at ``key``, if k is above the number of experts."""
        if (k := getattr(self, "k", 0)) > experts:
            raise UserError(
                f"{key} is {k}, but there are {experts} experts (experts.number); allowed: 1 to "
                f"{experts}"
            )

    def check_causal(self, key: str = "router") -> None:
        """Raise UserError if a token's experts depend on later tokens or on other sequences."""
        if self.looks_ahead is not None:
            raise UserError.at(
                f"{key}.kind",
                found=f"{self.kind}, {self.looks_ahead}, including later ones",
                allowed=CAUSAL,
            )

    @property
    def looks_ahead_in_training(self) -> bool:
        """Return whether a router that passes ``check_causal`` is causal in evaluation only."""
        return False

    def for_finetuning(self) -> Self:
        """Return the settings of this router in the fine-tuning of its model."""
        return self

    def fix_sizes(self, experts: int) -> Self:
        """Return a copy whose sizes, if they depend on ``experts``, are explicit numbers."""
        return self

    def active(self, experts: int) -> float:
        """Return how many of ``experts`` experts a token uses on average; all without a k."""
        return getattr(self, "k", experts)
