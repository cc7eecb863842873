"""Merge experts with similar mean outputs (HC-SMoE, Chen et al. 2024)."""

from collections.abc import Mapping
from typing import ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from moecore.core.files import UserError
from moecore.nn.backbones.base_model import Model
from moecore.nn.layers.moe import MoESettings
from moecore.nn.routers.folded import Folded, refuse_unclusterable_router
from moecore.training.surgery import expert_reduction

Linkage = Literal["average", "single", "complete"]
LINKAGES = {"average": np.mean, "single": np.min, "complete": np.max}


class Merge(expert_reduction.ExpertReduction):
    """Cluster experts by their mean outputs, and average the weights of each cluster."""

    section: ClassVar[str] = "merge"

    linkage: Linkage = Field("average", description="distance: mean, smallest or largest of pairs")
    weights: Literal["frequency", "mean"] = Field(
        "frequency", description="an expert's weight in its cluster: by its tokens, or equal"
    )
    fold: bool = Field(True, description="sum routing in clusters; false: E equal experts")

    def reduced_settings(self, moe: MoESettings) -> MoESettings:
        expert_reduction.check_tokens_choose_experts(moe, "merged")
        if not moe.experts.has_hidden_units:
            raise UserError.at("experts.kind", found=moe.experts.kind, allowed="mlp (hidden units)")
        number = self.count_remaining_experts(moe)
        if not self.fold:
            return moe
        reason = "which has a bias or threshold for each expert"
        allowed = "others, or merge.fold: false"
        if (balance := getattr(moe.router, "balance", None)) is not None:
            raise UserError.at("router.balance", found=f"{balance.kind}, {reason}", allowed=allowed)
        if moe.router.has_expert_thresholds:
            raise UserError.at("router.kind", found=f"{moe.router.kind}, {reason}", allowed=allowed)
        refuse_unclusterable_router(moe.router, "router", ", or merge.fold: false")
        router = Folded(router=moe.router, experts=moe.experts.number)
        return expert_reduction.set_expert_number(moe.model_copy(update={"router": router}), number)

    def reduce_experts(self, model: Model, uses: Mapping[str, expert_reduction.ExpertUse]) -> Model:
        """Return the model with merged experts; routers score all E, ``fold`` sums by cluster."""
        moe = self.reduced_settings(model.experts_and_router)
        number = self.count_remaining_experts(model.experts_and_router)
        weights = model.state_dict()
        for layer, use in uses.items():
            clusters, _ = cluster_experts(use.means, number, self.linkage)
            counts = use.counts if self.weights == "frequency" else torch.ones_like(use.counts)
            shares = member_shares(clusters, counts, number)
            for name in [name for name in weights if name.startswith(f"{layer}.experts.")]:
                weights[name] = merge_parameter(weights[name], shares)
                if not self.fold:
                    weights[name] = weights[name][clusters.to(weights[name].device)]
            if self.fold:  # the folded router holds the whole router, and each expert's cluster
                prefix = f"{layer}.router."
                for name in [name for name in weights if name.startswith(prefix)]:
                    weights[f"{prefix}router.{name.removeprefix(prefix)}"] = weights.pop(name)
                weights[f"{prefix}clusters"] = clusters
        return expert_reduction.build_reduced_model(model, moe, weights)


def cluster_experts(
    means: Tensor, number: int, linkage: Linkage
) -> tuple[Tensor, tuple[float, ...]]:
    """Cluster experts by mean outputs; return clusters (E,) int64 and merge distances."""
    # The two nearest clusters, by the mean outputs (E, d), are joined until ``number`` remain; ties
    # go to the lowest expert indices. Clusters are ordered by their lowest expert.
    points = means.double()
    exact = "donot_use_mm_for_euclid_dist"  # matrix products lose precision at small distances
    distances = torch.cdist(points, points, compute_mode=exact).numpy()
    linkage_distance = LINKAGES[linkage]
    clusters = [[expert] for expert in range(len(means))]
    heights = []
    while len(clusters) > number:
        height, first, second = min(
            (float(linkage_distance(distances[np.ix_(clusters[i], clusters[j])])), i, j)
            for i in range(len(clusters))
            for j in range(i + 1, len(clusters))
        )
        clusters[first] += clusters.pop(second)
        heights.append(height)
    labels = torch.empty(len(means), dtype=torch.int64)
    for label, members in enumerate(clusters):
        labels[members] = label
    return labels, tuple(heights)


def member_shares(clusters: Tensor, counts: Tensor, number: int) -> Tensor:
    """Return experts' weights per cluster, (number, E), by token counts; equal if all are 0."""
    members = torch.nn.functional.one_hot(clusters, number).T.double()
    shares = members * counts.double()
    shares = torch.where(shares.sum(dim=1, keepdim=True) > 0, shares, members)
    return shares / shares.sum(dim=1, keepdim=True)


def merge_parameter(values: Tensor, shares: Tensor) -> Tensor:
    """Average a parameter (E, …) over M clusters by weights ``shares`` (M, E); return (M, …)."""
    flat = shares.to(values.device) @ values.flatten(1).double()
    return flat.unflatten(1, values.shape[1:]).to(values.dtype)
