"""The base class of router settings, and expert capacity (V-MoE, §2, §4)."""

from abc import ABC, abstractmethod
from fractions import Fraction
from typing import Annotated, Any, ClassVar, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from moecore.core.config import Misfits, Part, Surroundings
from moecore.core.files import UserError

# routers that messages suggest for language models
CAUSAL_ROUTERS = (
    "top_k_softmax, eigenbasis, hash by word or position, or noisy_top_k without a capacity"
)

NoiseStd = Annotated[float, Field(ge=0, description="on logits, in training; unit: 1 / experts")]


class Router(Part, ABC):
    """Base class of router settings; ``build`` returns the module that routes."""

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
        """Return ``around`` plus this router, for checks of its nested settings, e.g. balance."""
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
        """Return the maximum number of experts (or pieces of split experts) that a token uses."""
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
        """Names of quantities, besides probs, that regularizers can read: "load", "basis", …."""
        return frozenset()

    @property
    def wants(self) -> frozenset[str]:
        """Return the names of the RoutingContext fields that the router reads."""
        return frozenset()

    def phase(self, progress: float) -> float:
        """Convert progress to a phase, which the router gets as ``RoutingContext.progress``.

        By default always 1. A router that is frozen at some progress returns 0 before, then 1.
        """
        # progress: share of the training that is done. Called once per layer and forward pass.
        return 1.0

    def with_k(self, k: int) -> Self:
        """Return a copy with another k; UserError for a router without k."""
        fields = type(self).model_fields
        if "k" not in fields:
            kind = fields["kind"].default
            raise UserError.at("finetune.k", found=f"{k}, but {kind} has no k", allowed="null")
        return self.model_copy(update={"k": k})

    def check_k(self, experts: int, key: str = "router.k") -> None:
        """Raise UserError, at ``key``, if k is above the number of experts."""
        if (k := getattr(self, "k", 0)) > experts:
            raise UserError(f"{key} is {k}, with {experts} experts; allowed: 1 to {experts}")

    def check_causal(self, key: str = "router") -> None:
        """Raise UserError if a token's experts depend on later tokens or on other sequences."""
        if self.looks_ahead is not None:
            raise UserError.at(
                f"{key}.kind",
                found=f"{self.kind}, {self.looks_ahead}, including later ones",
                allowed=CAUSAL_ROUTERS,
            )

    @property
    def looks_ahead_in_training(self) -> bool:
        """Return whether a router that passes ``check_causal`` uses later tokens in training."""
        return False

    def for_finetuning(self) -> Self:
        """Return the router's settings for fine-tuning; by default unchanged."""
        return self

    def fix_sizes(self, experts: int) -> Self:
        """Return a copy whose sizes, if they depend on ``experts``, are explicit numbers."""
        return self

    def active(self, experts: int) -> float:
        """Return the mean number of experts that a token uses: k, or ``experts`` without a k."""
        return getattr(self, "k", experts)


def exact_fraction(factor: float) -> Fraction:
    """Convert a decimal exactly to a fraction, so that 160 · 1.1 / 4 is 44, not slightly more."""
    return Fraction(str(factor))


def ceil_tokens_per_expert(tokens: int, factor: Fraction, experts: int) -> int:
    """Return ceil(tokens · factor / experts) in integers: compiled graphs have no fractions."""
    return -(-tokens * factor.numerator // (experts * factor.denominator))


def expert_capacity(tokens: int, k: int, factor: Fraction, experts: int) -> int:
    """Return ceil(tokens · k · factor / experts), rounded up to a multiple of 4."""
    return -(-ceil_tokens_per_expert(tokens * k, factor, experts) // 4) * 4


def within_capacity(
    experts: Tensor, priority: Tensor | None, number: int, factor: Fraction, group_size: int
) -> Tensor:
    """Return bool (B, T, k): choices within capacity, first choices first, then by ``priority``."""
    # All first choices are served before any second choice. Every ``group_size`` images share a
    # capacity; remaining images form a smaller group. experts: (B, T, k), best first. priority:
    # (B, T), higher is served earlier (batch-prioritised routing); None: in the order of tokens.
    within = []
    groups_of_experts = group_images(experts, group_size)
    queues: list[Tensor | None] = [None] * len(groups_of_experts)
    if priority is not None:
        # each token's position in the queue; ties keep the tokens' order
        queues = [
            values.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
            for values in group_images(priority, group_size)
        ]
    for groups, ranks in zip(groups_of_experts, queues, strict=True):
        capacity = expert_capacity(groups.shape[1], experts.shape[2], factor, number)
        within.append((_queue_positions(groups, ranks) < capacity).reshape(-1, *experts.shape[1:]))
    return torch.cat(within)


def group_images(values: Tensor, group_size: int) -> list[Tensor]:
    """Return values (B, T, …) in groups of ``group_size`` images, (G, S, …); a smaller one last."""
    full = len(values) // group_size * group_size
    parts = ((values[:full], group_size), (values[full:], len(values) - full))
    return [part.unflatten(0, (-1, size)).flatten(1, 2) for part, size in parts if len(part)]


def _queue_positions(experts: Tensor, ranks: Tensor | None) -> Tensor:
    """Return places, from 0, in experts' queues: first choices first, then ``ranks``, (G, S, k)."""
    # experts: (G, S, k). ranks: (G, S), each token's position in the queue; None: in order.
    queue = experts
    if ranks is not None:
        places = ranks.unsqueeze(-1).expand_as(experts)
        queue = torch.zeros_like(experts).scatter_(1, places, experts)
    flat = queue.transpose(1, 2).flatten(1)  # (G, k·S): first choices first
    sorted_flat, places = flat.sort(dim=1, stable=True)
    numbers = torch.arange(flat.shape[1], device=flat.device)
    # distance from the first choice of the same expert
    behind = numbers - torch.searchsorted(sorted_flat, sorted_flat)
    before = torch.empty_like(flat).scatter_(1, places, behind)
    positions = before.unflatten(1, (experts.shape[2], -1)).transpose(1, 2)
    if ranks is None:
        return positions
    return positions.gather(1, ranks.unsqueeze(-1).expand_as(experts))
