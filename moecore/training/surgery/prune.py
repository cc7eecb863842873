"""Prune the experts with the lowest scores in one step (REAP, Lasby et al. 2025)."""

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from moecore.core.files import UserError
from moecore.nn.backbones.base_model import Model
from moecore.nn.layers.moe import MoESettings
from moecore.training.surgery import expert_reduction

# A router's map of the previous MoE layer's logits: (E of this layer, E of the previous layer).
MAP_OF_PREVIOUS_LOGITS = "router.residual"


class Prune(expert_reduction.ExpertReduction):
    """Remove the experts with the lowest score from each layer, and their parts of its router."""

    section: ClassVar[str] = "prune"

    by: Literal["reap", "load"] = Field(
        "reap",
        description="reap: weight times length of the expert's output, mean over the tokens that "
        "chose it; load: number of tokens that chose it",
    )

    def reduced_settings(self, moe: MoESettings) -> MoESettings:
        expert_reduction.check_tokens_choose_experts(moe, "pruned")
        if not moe.router.has_expert_rows:
            raise UserError.at(
                "router.kind",
                found=f"{moe.router.kind}, which has no parameters of each expert",
                allowed="routers that learn to choose",
            )
        router = moe.router.fix_sizes(moe.experts.number)
        reduced = moe.model_copy(update={"router": router})
        return expert_reduction.set_expert_number(reduced, self.count_remaining_experts(moe))

    def reduce_experts(self, model: Model, uses: Mapping[str, expert_reduction.ExpertUse]) -> Model:
        before = model.experts_and_router
        moe = self.reduced_settings(before)
        remaining = {name: self.select_remaining_experts(before, use) for name, use in uses.items()}
        weights = select_expert_weights(model, moe, remaining)
        return expert_reduction.build_reduced_model(model, moe, weights)

    def select_remaining_experts(self, moe: MoESettings, use: expert_reduction.ExpertUse) -> Tensor:
        """Return M remaining experts' sorted indices; UserError if router groups become unequal."""
        order = torch.argsort(use.reap if self.by == "reap" else use.counts, stable=True)
        experts = order[-self.count_remaining_experts(moe) :].sort().values  # ties: highest index
        groups = getattr(getattr(moe.router, "router", moe.router), "groups", None)
        if groups is not None:
            group = experts // (moe.experts.number // groups.number)
            sizes = torch.bincount(group, minlength=groups.number).tolist()
            if len(set(sizes)) > 1:
                raise UserError.at(
                    "router.groups",
                    found=f"{groups.number}, in which {sizes} experts would remain",
                    allowed="null, or groups that keep equally many experts",
                )
        return experts


def select_expert_weights(
    model: Model, moe: MoESettings, remaining: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the weights of ``model`` for the ``remaining`` experts (layer → indices (M,))."""
    reduced = expert_reduction.build_untrained_with_moe_settings(model, moe).state_dict()
    weights = model.state_dict()
    previous: Tensor | None = None
    for layer, experts in remaining.items():
        for name in [name for name in weights if name.startswith(f"{layer}.")]:
            value = weights[name]
            columns = experts
            if previous is not None and name == f"{layer}.{MAP_OF_PREVIOUS_LOGITS}":
                columns = previous
            lengths = zip(value.shape, reduced[name].shape, strict=True)
            for axis, (old_length, new_length) in enumerate(lengths):
                if old_length != new_length:  # an axis of experts
                    selected = experts if axis == 0 else columns
                    value = value.index_select(axis, selected.to(value.device))
            weights[name] = value
        previous = experts
    return weights
