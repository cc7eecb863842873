"""Pruning: the experts of the lowest score are dropped, one-shot (REAP, Lasby et al. 2025).

E experts before, M after.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from moecore.core.files import UserError
from moecore.nn.backbones.base_model import Model
from moecore.nn.layers.moe import MoESettings
from moecore.training.surgery.expert_reduction import (
    ExpertReduction,
    ExpertUse,
    build_reduced_model,
    check_token_choice,
    rebuild_with_moe_settings,
    with_number,
)

# A router's map of the logits of the MoE layer before: (E of this layer, E of that one)
MAP_OF_PREVIOUS_LOGITS = "router.residual"


class Prune(ExpertReduction):
    """The experts of the lowest score leave each layer, with all that its router has of them."""

    section: ClassVar[str] = "prune"

    by: Literal["reap", "load"] = Field(
        "reap",
        description="reap: mean over a token's choices of weight times length of the expert's "
        "output; load: how many tokens chose the expert",
    )

    def reduced_settings(self, moe: MoESettings) -> MoESettings:
        """Return the settings with fewer experts; UserError for routers without rows to drop."""
        check_token_choice(moe, "pruned")
        if not moe.router.has_expert_rows:
            problem = f"found {moe.router.kind}, which has no parameters of each expert"
            raise UserError(f"router.kind: {problem}; allowed: routers that learn to choose")
        router = moe.router.fix_sizes(moe.experts.number)
        return with_number(moe.model_copy(update={"router": router}), self.number_left(moe))

    def reduce_experts(self, model: Model, uses: Mapping[str, ExpertUse]) -> Model:
        """Return the model without the experts of the lowest score."""
        moe = self.reduced_settings(model.experts_and_router)
        kept = {
            name: self.kept_experts(model.experts_and_router, use) for name, use in uses.items()
        }
        return build_reduced_model(model, moe, select_expert_weights(model, moe, kept))

    def kept_experts(self, moe: MoESettings, use: ExpertUse) -> Tensor:
        """Return the experts (M,) of a layer that stay, in their order; UserError where a router's
        groups would be of several sizes. moe: before.
        """
        order = order_of_pruning(use.reap if self.by == "reap" else use.counts)
        kept = order[-self.number_left(moe) :].sort().values
        groups = getattr(getattr(moe.router, "router", moe.router), "groups", None)
        if groups is not None:
            group = kept // (moe.experts.number // groups.number)
            sizes = torch.bincount(group, minlength=groups.number).tolist()
            if len(set(sizes)) > 1:
                problem = f"found {groups.number}, of which {sizes} experts would be left"
                raise UserError(f"router.groups: {problem}; allowed: null, or as many of each")
        return kept


def order_of_pruning(scores: Tensor) -> Tensor:
    """Return the experts (E,) by their scores, lowest first; of equals the lowest index first."""
    return torch.argsort(scores, stable=True)


def select_expert_weights(
    model: Model, moe: MoESettings, kept: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the weights of ``model`` for fewer experts: the kept ones, (M,) by layer, along every
    axis that has another length in a model of the settings ``moe``. Layers are in their order.
    """
    fresh = rebuild_with_moe_settings(model, moe).state_dict()
    weights = model.state_dict()
    previous: Tensor | None = None
    for layer, own in kept.items():
        for name in [one for one in weights if one.startswith(f"{layer}.")]:
            value = weights[name]
            columns = own
            if previous is not None and name == f"{layer}.{MAP_OF_PREVIOUS_LOGITS}":
                columns = previous
            for axis, (there, here) in enumerate(zip(value.shape, fresh[name].shape, strict=True)):
                if there != here:
                    experts = own if axis == 0 else columns
                    value = value.index_select(axis, experts.to(value.device))
            weights[name] = value
        previous = own
    return weights
