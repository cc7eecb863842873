"""The noisy top-k router of V-MoE (Riquelme et al. 2021), the baseline of every paper here."""

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from moecore.core.config import Config, Misfits, Surroundings, list_idle_misfits
from moecore.core.files import UserError, format_found_and_allowed
from moecore.core.routing_records import NO_CONTEXT, RoutingContext, RoutingRecord
from moecore.core.streams import normal_like, uniform_like
from moecore.nn.balances.base import Balance
from moecore.nn.kernels.grouped import full_precision
from moecore.nn.routers import token_choice
from moecore.nn.routers.base import NoiseStd, Router, exact_fraction, within_capacity
from moecore.nn.routers.token_choice import PlanAndRecord


class GroupLimitedChoice(Config):
    """Limit a token's choice to the ``kept`` groups of adjacent experts with the largest values.

    A group's value is the sum of its ``per_group`` best scores. Only the choice is constrained:
    experts are not placed on devices by group, so that no communication is saved.
    """

    number: int = Field(ge=2, description="number of groups, which have equally many experts")
    kept: int = Field(ge=1, description="number of groups that a token chooses within")
    per_group: int | None = Field(
        None, ge=1, description="best scores that value a group; null: k / kept, at least 1"
    )

    def misfits(self, around: Surroundings) -> Misfits:
        k = around.router.k
        if self.kept == self.number:
            text = f"found {self.kept}, which is the number of groups: none is excluded"
            yield ("kept",), f"{text}; allowed: 1 to {self.number - 1}"
        elif self.kept >= k and (self.per_group or max(1, k // self.kept)) == 1:
            text = f"found {self.kept}: the groups of the {k} best experts are always kept"
            yield ("kept",), f"{text}; allowed: fewer than router.k, or a per_group above 1"

    def check_experts(self, experts: int, k: int, key: str) -> None:
        """Raise UserError if groups are of unequal size, or offer a token fewer than k experts."""
        size = experts // self.number
        if experts % self.number:
            raise UserError.at(
                f"{key}.number",
                found=self.number,
                allowed=f"a divisor of experts.number, {experts}",
            )
        if self.kept > self.number:
            raise UserError.at(
                f"{key}.kept",
                found=self.kept,
                allowed=f"at most {self.number}, the number of groups",
            )
        if k > self.kept * size:
            raise UserError.at(f"{key}.kept", found=self.kept, allowed=f"enough for router.k, {k}")
        if (self.per_group or 1) > size:
            raise UserError.at(
                f"{key}.per_group",
                found=self.per_group,
                allowed=f"at most {size}, the experts of a group",
            )

    def limit_scores(self, scores: Tensor, k: int) -> Tensor:
        """Return scores (B, T, E) with −∞ outside the groups that each token keeps."""
        grouped = scores.unflatten(-1, (self.number, -1))
        best = token_choice.top_k(grouped, self.per_group or max(1, k // self.kept))
        groups = token_choice.top_k(grouped.gather(-1, best).sum(dim=-1), self.kept)
        inside = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter(-1, groups, True)
        return grouped.where(inside.unsqueeze(-1), -torch.inf).flatten(-2)


class NoisyTopK(Router):
    """Choose the k largest gates of a softmax over a linear map of the token, noisy in training."""

    has_equal_rows: ClassVar[bool] = True

    kind: Literal["noisy_top_k"] = "noisy_top_k"
    k: int = Field(2, ge=1, description="experts per token")
    noise_std: NoiseStd = 1.0
    capacity_factor: float | None = Field(
        None, gt=0, description="maximum tokens per expert in training / even share; null: all"
    )
    eval_capacity_factor: float | None = Field(
        None,
        gt=0,
        description=(
            "likewise in evaluation and under attack; predictions then depend on the other images "
            "of a group; null: no limit"
        ),
    )
    batch_priority: bool = Field(False, description="serve tokens by largest gate, highest first")
    group_size: int = Field(8, ge=1, description="images that share a capacity")
    renormalise: token_choice.Renormalise = Field(
        False,
        description=(
            "let the chosen gates sum to 1 (with k = 1 the router then has no task gradient); "
            "straight: likewise, but with the gradient of gates divided by a constant"
        ),
    )
    task_gradient: bool = Field(True, description="false: only the router's losses teach it (TGR)")
    score: Literal["softmax", "sigmoid", "sqrt_softplus"] = Field(
        "softmax",
        description="function from logits to scores: softmax over all experts, or per expert a "
        "sigmoid or the root of softplus",
    )
    scale: float = Field(1.0, gt=0, allow_inf_nan=False, description="factor of all weights")
    groups: GroupLimitedChoice | None = Field(
        None, description="groups of experts; a token chooses within a few of them; null: none"
    )
    balance: Balance | None = Field(
        None, description="balancing of the load without a loss, by shifting the choice; null: none"
    )
    input_jitter: float = Field(0.0, ge=0, lt=1, description="training: tokens × uniform 1 ± this")
    start: Literal["normal", "orthonormal"] = Field(
        "normal", description="orthonormal: initial rows, without weight decay (simbal)"
    )
    residual: bool = Field(False, description="add a map, first 0, of the last layer's logits")

    @model_validator(mode="after")
    def _settings_fit(self) -> "NoisyTopK":
        if self.batch_priority and not self.has_capacity:
            raise ValueError("`batch_priority` needs a capacity: give `capacity_factor` too")
        if self.groups is not None and self.balance is not None and self.balance.is_alone:
            raise ValueError(
                format_found_and_allowed(
                    found=f"a balance of kind {self.balance.kind} with `groups`",
                    allowed="loss_free, or no groups",
                )
            )
        return self

    def misfits(self, around: Surroundings) -> Misfits:
        yield from super().misfits(around)
        if not self.has_capacity:
            why = "without a capacity no images share one"
            yield from list_idle_misfits(self, ["group_size"], why, "a capacity_factor")
        if self.residual and around.layers == 1:
            text = "found true, but the model has only one MoE layer"
            yield ("residual",), f"{text}; allowed: false, or more blocks"
        is_default = type(self).model_fields["renormalise"].default is True
        if around.experts is None or self.renormalise is not True or is_default:
            return
        is_taught = any(loss.weight and loss.teaches_choice for loss in around.losses)
        if self.chosen_of(around.experts) == 1 and not is_taught:
            text = "found true with k = 1: the weight is always 1, and no loss teaches the router"
            allowed = "straight, false, a larger k, or a regularizer that teaches it"
            yield ("renormalise",), f"{text}; allowed: {allowed}"

    @property
    def chooses_by_logits(self) -> bool:
        """Return whether the k largest noisy logits are chosen, unshifted by groups or balance."""
        return self.groups is None and self.balance is None

    @property
    def has_capacity(self) -> bool:
        """Return whether experts drop tokens, in training or in evaluation."""
        return self.capacity_factor is not None or self.eval_capacity_factor is not None

    def check_causal(self, key: str = "router") -> None:
        if self.balance is not None:
            self.balance.check_causal(f"{key}.balance")
        if not self.has_capacity:
            return
        if self.k > 1:
            why = "later words' first choices are served before a word's second"
            raise _causal_capacity_error(f"{key}.k", self.k, why, "1")
        if self.batch_priority:
            why = "later words can be served before earlier ones"
            raise _causal_capacity_error(f"{key}.batch_priority", "true", why, "false")
        if self.group_size > 1:
            why = "words of other texts take a word's place"
            raise _causal_capacity_error(f"{key}.group_size", self.group_size, why, "1")

    @property
    def provides(self) -> frozenset[str]:
        provided = {"load": self.chooses_by_logits, "orthonormal": self.start == "orthonormal"}
        return frozenset(name for name, is_provided in provided.items() if is_provided)

    @property
    def wants(self) -> frozenset[str]:
        return frozenset({"previous"} if self.residual else ())

    def build(self, width: int, experts: int, basis: Tensor | None = None) -> "NoisyTopKRouter":
        self.check_experts(width, experts)
        return NoisyTopKRouter(self, width, experts)

    def check_experts(self, width: int, experts: int, key: str = "router") -> None:
        """Raise UserError if k, groups or orthonormal rows do not fit ``experts`` and ``width``."""
        self.check_k(experts, f"{key}.k")
        if self.groups is not None:
            self.groups.check_experts(experts, self.k, f"{key}.groups")
        if self.start == "orthonormal" and experts > width:
            raise UserError.at(
                f"{key}.start",
                found=f"orthonormal, with {experts} rows (experts.number) of {width} numbers",
                allowed=f"at most {width} experts, or normal",
            )


def _causal_capacity_error(key: str, value: object, why: str, allowed: str) -> UserError:
    return UserError.at(
        key,
        found=f"{value}, but with a capacity {why}",
        allowed=f"{allowed} in a causal text, or capacities of null",
    )


# Logits are fp32 whatever the autocast dtype: in bf16, ties at the k-th place flip. Gates are a
# softmax over all experts before the choice and are not renormalised after it, so that k = 1 still
# has a task gradient. A router with other logits overrides ``logits``. ``barred``: experts that
# measurements forbid, see ``top_k_and_unbarred_mask``.
class NoisyTopKRouter(nn.Module):
    """``router(tokens)`` with tokens (B, T, d) returns (SparsePlan, RoutingRecord)."""

    barred: Tensor | None = None
    batch_views = 1  # see ``Dropout``

    def __init__(self, config: NoisyTopK, width: int, experts: int) -> None:
        super().__init__()
        self.config = config
        factors = (config.eval_capacity_factor, config.capacity_factor)
        # capacity factors in evaluation, and in training
        self.factors = tuple(None if value is None else exact_fraction(value) for value in factors)
        self.balance = None if config.balance is None else config.balance.build(experts, config.k)
        # like the other linear maps of the ViT
        self.weight = nn.Parameter(nn.init.trunc_normal_(torch.empty(experts, width), std=0.02))
        if config.start == "orthonormal":
            nn.init.orthogonal_(self.weight)
        self.residual: nn.Parameter | None = None
        if config.residual:
            self.residual = nn.Parameter(torch.zeros(experts, experts))

    @property
    def images_coupled_in_eval(self) -> int:
        """Number of images that share a capacity in evaluation; 1 if images are independent."""
        if self.config.eval_capacity_factor is None:
            return 1
        return self.config.group_size

    @property
    def images_coupled_in_training(self) -> int:
        if self.config.capacity_factor is None:
            return 1
        return self.config.group_size

    @property
    def is_learning(self) -> bool:
        """Return whether a call draws noise and a step updates the balance: in training."""
        return self.training

    @property
    def orthonormal_rows(self) -> list[nn.Parameter]:
        """Parameters whose rows the loss simbal keeps orthonormal; they get no weight decay."""
        return [self.weight] if self.config.start == "orthonormal" else []

    def forward(self, tokens: Tensor, context: RoutingContext = NO_CONTEXT) -> PlanAndRecord:
        with full_precision(tokens):
            logits, jittered = self.logits(tokens), self._jittered_logits(tokens)
            previous = context.previous
            if self.residual is None or previous is None or previous.shape[1] != tokens.shape[1]:
                return self.decide(logits, jittered)
            residual = token_choice.router_logits(previous, self.residual)
            return self.decide(logits + residual, None if jittered is None else jittered + residual)

    def logits(self, tokens: Tensor) -> Tensor:
        """Return the clean logits (B, T, E) of tokens (B, T, d)."""
        return token_choice.router_logits(tokens, self.weight)

    def _jittered_logits(self, tokens: Tensor) -> Tensor | None:
        jitter = self.config.input_jitter
        if not jitter or not self.is_learning:
            return None
        wide = tokens.to(torch.promote_types(tokens.dtype, torch.float32))
        return self.logits(wide * (1 + jitter * (2 * uniform_like(wide, self.batch_views) - 1)))

    def decide(self, logits: Tensor, jittered: Tensor | None = None) -> PlanAndRecord:
        """Return plan and record for logits (B, T, E); ``jittered`` logits, if given, choose."""
        settings = self.config
        experts = logits.shape[-1]
        std = settings.noise_std / experts if self.is_learning else 0.0
        noisy = logits if jittered is None else jittered
        if std:
            noisy = noisy + normal_like(noisy, self.batch_views) * std
        scores = token_choice.scores_from_logits(noisy, settings.score)
        preferences = self._preferences(noisy, scores)
        chosen, is_open = token_choice.top_k_and_unbarred_mask(preferences, settings.k, self.barred)
        best = noisy.gather(-1, chosen)
        best_scores = scores.gather(-1, chosen)
        valid = self.valid_slots(best_scores)
        if is_open is not None:
            valid = is_open if valid is None else valid & is_open
        probs = token_choice.expert_probs(logits, settings.score)
        weights = token_choice.gate_weights(best, best_scores, settings.score, settings.renormalise)
        if settings.scale != 1:
            weights = weights * settings.scale
        load = None
        if settings.chooses_by_logits and valid is None:
            # 1 − Φ((τ − logits)/σ), V-MoE's load; without noise σ = 1 / E
            load = torch.special.ndtr((logits - best[..., -1:]) / (std or 1 / experts))
        return token_choice.plan_and_record(
            logits=logits,
            probs=probs,
            load=load,
            chosen=chosen,
            weights=weights if settings.task_gradient else weights.detach(),
            valid=valid,
            kept=self._within_capacity(chosen, scores),
        )

    def selection_scores(self, record: RoutingRecord) -> Tensor:
        """Return the scores (B, T, E) by which the record's experts were chosen, without noise."""
        if self.config.chooses_by_logits:
            return record.probs
        scores = token_choice.scores_from_logits(record.logits, self.config.score)
        return self._preferences(record.logits, scores)

    def valid_slots(self, scores: Tensor) -> Tensor | None:
        """Return which of the k best experts are chosen, (B, T, k) bool; None if all are."""
        return None

    def _preferences(self, logits: Tensor, scores: Tensor) -> Tensor:
        """Return the values (B, T, E) by which each token's k best experts are chosen."""
        settings = self.config
        if settings.chooses_by_logits:  # same order as scores, at a higher resolution
            return logits
        preferences = scores if self.balance is None else self.balance(logits, scores)
        if settings.groups is None:
            return preferences
        return settings.groups.limit_scores(preferences, settings.k)

    def after_step(self, records: Sequence[RoutingRecord], place: int, progress: float) -> None:
        if self.balance is not None and self.is_learning:
            record = records[place]
            scores = token_choice.scores_from_logits(record.logits.detach(), self.config.score)
            self.balance.after_step(scores, record.chosen, progress)

    def _within_capacity(self, chosen: Tensor, scores: Tensor) -> Tensor | None:
        factor = self.factors[int(self.training)]
        if factor is None:
            return None
        priority = scores.detach().amax(dim=-1) if self.config.batch_priority else None
        return within_capacity(chosen, priority, scores.shape[-1], factor, self.config.group_size)
