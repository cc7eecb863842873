"""The noisy top-k router of V-MoE (Riquelme et al. 2021), the baseline of every paper here.

B images, T tokens per image, E experts, k chosen per token, d width.
"""

import json
from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from moecore.core.config import Config
from moecore.core.files import UserError
from moecore.core.routing_records import RoutingContext, RoutingRecord
from moecore.core.streams import normal_like, uniform_like
from moecore.core.surroundings import Misfits, Surroundings, changed_settings
from moecore.nn.balances.base import Balance
from moecore.nn.dispatch import SparsePlan
from moecore.nn.kernels.grouped import full_precision
from moecore.nn.routers import token_choice
from moecore.nn.routers.base import Router
from moecore.nn.routers.capacity import exact_fraction, within_capacity


class GroupLimitedChoice(Config):
    """Groups of adjacent experts; a token keeps those with the largest sums of their best scores.

    A constraint on the choice alone: experts lie nowhere, so nothing is sent less far.
    """

    number: int = Field(ge=2, description="groups of equally many experts")
    kept: int = Field(ge=1, description="groups that a token chooses within")
    per_group: int | None = Field(
        None, ge=1, description="best scores that a group is valued by; null: k / kept, at least 1"
    )

    def misfits(self, around: Surroundings) -> Misfits:
        """Yield groups that contain a token's best k experts in any case."""
        k = around.router.k
        if self.kept == self.number:
            text = f"found {self.kept}, and there are as many groups, so that none is left out"
            yield ("kept",), f"{text}; allowed: 1 to {self.number - 1}"
        elif self.kept >= k and (self.per_group or max(1, k // self.kept)) == 1:
            text = f"found {self.kept}: the groups of the {k} best experts are always kept"
            yield ("kept",), f"{text}; allowed: fewer than router.k, or a per_group above 1"

    def check_experts(self, experts: int, k: int, key: str) -> None:
        """Raise UserError where so many experts do not divide, or leave a token fewer than k."""
        size = experts // self.number
        for name, holds, allowed in (
            ("number", experts % self.number == 0, f"a divisor of experts.number, {experts}"),
            ("kept", self.kept <= self.number, f"at most {self.number}, the number of groups"),
            ("kept", k <= self.kept * size, f"so many that they hold router.k, {k} experts"),
            ("per_group", (self.per_group or 1) <= size, f"at most {size}, a group's experts"),
        ):
            if not holds:
                raise UserError(f"{key}.{name}: found {getattr(self, name)}; allowed: {allowed}")

    def limit_scores(self, scores: Tensor, k: int) -> Tensor:
        """Return scores (B, T, E) with −∞ outside each token's groups."""
        grouped = scores.unflatten(-1, (self.number, -1))
        best = token_choice.top_k(grouped, self.per_group or max(1, k // self.kept))
        kept = token_choice.top_k(grouped.gather(-1, best).sum(dim=-1), self.kept)
        inside = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter(-1, kept, True)
        return grouped.where(inside.unsqueeze(-1), -torch.inf).flatten(-2)


class NoisyTopK(Router):
    """The k largest gates of a softmax over a linear map of the token, noisy in training."""

    has_equal_rows: ClassVar[bool] = True

    kind: Literal["noisy_top_k"] = "noisy_top_k"
    k: int = Field(2, ge=1, description="experts per token")
    noise_std: float = Field(
        1.0, ge=0, description="noise on the logits in training, in units of 1 / experts"
    )
    capacity_factor: float | None = Field(
        None, gt=0, description="tokens per expert in training over an even share; null: all"
    )
    eval_capacity_factor: float | None = Field(
        None,
        gt=0,
        description=(
            "the same in evaluation and under attack, where a prediction then depends on the "
            "images that share its group; null: no limit"
        ),
    )
    batch_priority: bool = Field(
        False, description="serve tokens in the order of their largest gate"
    )
    group_size: int = Field(8, ge=1, description="images that share a capacity")
    renormalise: token_choice.Renormalise = Field(
        False,
        description=(
            "let the chosen gates sum to 1 (with k = 1 the router then has no task gradient); "
            "straight: so too, but with the gradient of gates that are divided by a constant"
        ),
    )
    task_gradient: bool = Field(
        True, description="false: the router learns from its losses only (TGR)"
    )
    score: Literal["softmax", "sigmoid", "sqrt_softplus"] = Field(
        "softmax",
        description="what makes scores of logits: softmax over all experts, or of each expert by "
        "itself its sigmoid, or the root of its softplus",
    )
    scale: float = Field(1.0, gt=0, allow_inf_nan=False, description="factor of all weights")
    groups: GroupLimitedChoice | None = Field(
        None, description="groups of experts, a few of which a token chooses within; null: none"
    )
    balance: Balance | None = Field(
        None, description="what shifts the choice to an even load, without a loss; null: nothing"
    )
    input_jitter: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="the router's tokens in training are times uniform draws within 1 ± this",
    )
    start: Literal["normal", "orthonormal"] = Field(
        "normal",
        description="orthonormal: the router's rows start so, and have no weight decay (simbal)",
    )

    residual: bool = Field(
        False,
        description="a learned map, 0 at first, of the logits of the MoE layer before is added to "
        "the logits (MoE++)",
    )

    @model_validator(mode="after")
    def _priority_needs_capacity(self) -> "NoisyTopK":
        if self.batch_priority and not self.has_capacity:
            raise ValueError(
                "`batch_priority` orders tokens for a capacity: give `capacity_factor` too"
            )
        return self

    @model_validator(mode="after")
    def _groups_beside_balance(self) -> "NoisyTopK":
        if self.groups is not None and self.balance is not None and self.balance.is_alone:
            problem = f"found a balance of kind {self.balance.kind} beside `groups`"
            raise ValueError(f"{problem}; allowed: loss_free, or no groups")
        return self

    def misfits(self, around: Surroundings) -> Misfits:
        """Yield settings without an effect, and a weight that is always 1 where nothing else
        teaches a choice.
        """
        yield from super().misfits(around)
        if not self.has_capacity:
            why = "without a capacity no images share one"
            yield from changed_settings(self, ["group_size"], why, "a capacity_factor")
        if self.residual and around.layers == 1:
            text = "found true, but the model has one MoE layer, and so none before it"
            yield ("residual",), f"{text}; allowed: false, or more blocks"
        if around.experts is None or self.renormalise is not True or self.renormalises_by_default:
            return
        taught = any(loss.weight and loss.teaches_choice for loss in around.losses)
        if self.chosen_of(around.experts) == 1 and not taught:
            text = "found true with k = 1: the weight is always 1, and no loss teaches the router"
            allowed = "straight, false, a larger k, or a regularizer that teaches it"
            yield ("renormalise",), f"{text}; allowed: {allowed}"

    @property
    def renormalises_by_default(self) -> bool:
        """Return whether weights sum to 1 by the router's very definition."""
        return type(self).model_fields["renormalise"].default is True

    @property
    def chooses_by_logits(self) -> bool:
        """Return whether the largest noisy logits choose: then a chance of being chosen is known"""
        return self.groups is None and self.balance is None

    @property
    def has_capacity(self) -> bool:
        """Return whether experts leave tokens out, in training or in evaluation."""
        return self.capacity_factor is not None or self.eval_capacity_factor is not None

    def check_causal(self, key: str = "router") -> None:
        """Raise UserError where a later token, or one of another sequence, may take a token's place
        in an expert: under a capacity all but one choice per token, in the tokens' own order.
        """
        if self.balance is not None:
            self.balance.check_causal(f"{key}.balance")
        if not self.has_capacity:
            return
        for name, most, why in (
            ("k", 1, "later words' first choices are served before a word's second"),
            ("batch_priority", False, "later words may be served before earlier ones"),
            ("group_size", 1, "words of other texts take a word's place"),
        ):
            if (value := getattr(self, name)) > most:
                problem = f"found {json.dumps(value)}, but with a capacity {why}"
                allowed = f"{json.dumps(most)}, or capacities of null"
                raise UserError(f"{key}.{name}: {problem}; allowed in a causal text: {allowed}")

    @property
    def provides(self) -> frozenset[str]:
        """Return what its record gives beyond probs."""
        given = {"load": self.chooses_by_logits, "orthonormal": self.start == "orthonormal"}
        return frozenset(name for name, is_given in given.items() if is_given)

    @property
    def wants(self) -> frozenset[str]:
        """Return what of the context it reads: the logits of the layer before, if so set."""
        return frozenset({"previous"} if self.residual else ())

    def build(self, width: int, experts: int, basis: Tensor | None = None) -> "NoisyTopKRouter":
        """The router of ``width``-wide tokens; UserError where it cannot be of ``experts``."""
        self.check_experts(width, experts)
        return NoisyTopKRouter(self, width, experts)

    def check_experts(self, width: int, experts: int, key: str = "router") -> None:
        """Raise UserError where k or groups do not fit ``experts``, or ``width`` has no room for as
        many orthonormal rows.
        """
        self.check_k(experts, f"{key}.k")
        if self.groups is not None:
            self.groups.check_experts(experts, self.k, f"{key}.groups")
        if self.start == "orthonormal" and experts > width:
            problem = f"found orthonormal, of {experts} rows (experts.number) of {width} numbers"
            raise UserError(f"{key}.start: {problem}; allowed: at most {width} experts, or normal")


class NoisyTopKRouter(nn.Module):
    """``router(tokens)`` with tokens (B, T, d) returns (SparsePlan, RoutingRecord).

    Logits are fp32 whatever the autocast dtype: in bf16, ties at the k-th place flip. Gates are a
    softmax over all experts before the choice and are not renormalised after it, so that k = 1
    still has a task gradient. Capacity holds in training only, unless ``eval_capacity_factor`` says
    otherwise: it couples the images of a group, and without it evaluation and attacks drop nothing.

    A router of other logits overrides ``logits``; all else is this decision. ``barred``: experts
    that measurements forbid, see ``top_k_and_open_slots``.
    """

    barred: Tensor | None = None

    def __init__(self, config: NoisyTopK, width: int, experts: int) -> None:
        super().__init__()
        self.config = config
        factors = (config.eval_capacity_factor, config.capacity_factor)
        # evaluation's, training's
        self.factors = tuple(
            None if factor is None else exact_fraction(factor) for factor in factors
        )
        self.balance = None if config.balance is None else config.balance.build(experts, config.k)
        # as the ViT's other linears
        self.weight = nn.Parameter(nn.init.trunc_normal_(torch.empty(experts, width), std=0.02))
        if config.start == "orthonormal":
            nn.init.orthogonal_(self.weight)
        self.residual: nn.Parameter | None = None
        if config.residual:
            self.residual = nn.Parameter(torch.zeros(experts, experts))

    @property
    def coupled(self) -> int:
        """Images whose predictions depend on each other in evaluation; 1 where none do."""
        return 1 if self.config.eval_capacity_factor is None else self.config.group_size

    @property
    def training_group(self) -> int:
        """Images whose routing depends on each other in training; 1 where none does."""
        return 1 if self.config.capacity_factor is None else self.config.group_size

    @property
    def is_learning(self) -> bool:
        """Return whether a call draws noise, and what balances learns of a step: in training."""
        return self.training

    @property
    def orthonormal_rows(self) -> list[nn.Parameter]:
        """Return what a loss (simbal) keeps orthonormal, and weight decay leaves alone."""
        return [self.weight] if self.config.start == "orthonormal" else []

    def forward(
        self, tokens: Tensor, context: RoutingContext = RoutingContext()
    ) -> tuple[SparsePlan, RoutingRecord]:
        with full_precision(tokens):
            logits, jittered = self.logits(tokens), self._jittered_logits(tokens)
            previous = context.previous
            if self.residual is None or previous is None or previous.shape[1] != tokens.shape[1]:
                return self.decide(logits, jittered)
            added = token_choice.router_logits(previous, self.residual)
            return self.decide(logits + added, None if jittered is None else jittered + added)

    def logits(self, tokens: Tensor) -> Tensor:
        """The clean logits (B, T, E) of tokens (B, T, d)."""
        return token_choice.router_logits(tokens, self.weight)

    def _jittered_logits(self, tokens: Tensor) -> Tensor | None:
        """The logits of tokens times 1 ± jitter; None where there is none."""
        jitter = self.config.input_jitter
        if not jitter or not self.is_learning:
            return None
        wide = tokens.to(torch.promote_types(tokens.dtype, torch.float32))
        return self.logits(wide * (1 + jitter * (2 * uniform_like(wide) - 1)))

    def decide(
        self, logits: Tensor, jittered: Tensor | None = None
    ) -> tuple[SparsePlan, RoutingRecord]:
        """The decision of these logits (B, T, E): noise, scores, choice, weights, capacity.

        jittered: (B, T, E), by which experts are chosen and weighed in the place of ``logits``.
        """
        settings = self.config
        experts = logits.shape[-1]
        std = settings.noise_std / experts if self.is_learning else 0.0
        noisy = logits if jittered is None else jittered
        if std:
            noisy = noisy + normal_like(noisy) * std
        scores = token_choice.expert_scores(noisy, settings.score)
        preferences = self._preferences(noisy, scores)
        chosen, is_open = token_choice.top_k_and_open_slots(preferences, settings.k, self.barred)
        best = noisy.gather(-1, chosen)
        best_scores = scores.gather(-1, chosen)
        valid = self.valid_slots(best_scores)
        if is_open is not None:
            valid = is_open if valid is None else valid & is_open
        probs = token_choice.expert_probs(logits, settings.score)
        load = None
        if settings.chooses_by_logits and valid is None:
            # 1 − Φ((τ − logits)/σ); without noise smoothed by 1 / E
            load = torch.special.ndtr((logits - best[..., -1:]) / (std or 1 / experts))
        return token_choice.plan_and_record(
            logits=logits,
            probs=probs,
            load=load,
            chosen=chosen,
            weights=self._weights(best, best_scores),
            valid=valid,
            kept=self._kept(chosen, scores),
        )

    def selection_scores(self, record: RoutingRecord) -> Tensor:
        """Return what the experts of its record were chosen by, without noise, (B, T, E).

        Probabilities; with a balance what it prefers; −∞ outside a token's groups of experts.
        """
        if self.balance is None and self.config.groups is None:
            return record.probs
        scores = token_choice.expert_scores(record.logits, self.config.score)
        return self._preferences(record.logits, scores)

    def valid_slots(self, scores: Tensor) -> Tensor | None:
        """Return which of the k best are chosen, (B, T, k) bool, by their scores; None: all."""
        return None

    def _preferences(self, logits: Tensor, scores: Tensor) -> Tensor:
        """Return what a token chooses by, (B, T, E), of its noisy logits and scores."""
        settings = self.config
        if settings.chooses_by_logits:  # in the order of their scores, and finer
            return logits
        preferences = scores if self.balance is None else self.balance(logits, scores)
        if settings.groups is None:
            return preferences
        return settings.groups.limit_scores(preferences, settings.k)

    def after_step(self, records: Sequence[RoutingRecord], place: int, progress: float) -> None:
        """End a training step: what balances without a loss learns from the step's own record."""
        if self.balance is not None and self.is_learning:
            record = records[place]
            scores = token_choice.expert_scores(record.logits.detach(), self.config.score)
            self.balance.after_step(scores, record.chosen, progress)

    def _weights(self, logits: Tensor, scores: Tensor) -> Tensor:
        """Weights (B, T, k) from the noisy logits and the scores of the chosen, both (B, T, k)."""
        settings = self.config
        weights = token_choice.gate_weights(logits, scores, settings.score, settings.renormalise)
        if settings.scale != 1:
            weights = weights * settings.scale
        if settings.task_gradient:
            return weights
        return weights.detach()

    def _kept(self, chosen: Tensor, scores: Tensor) -> Tensor | None:
        settings = self.config
        factor = self.factors[int(self.training)]
        if factor is None:
            return None
        priority = None
        if settings.batch_priority:
            priority = scores.detach().amax(dim=-1)
        return within_capacity(chosen, priority, scores.shape[-1], factor, settings.group_size)
