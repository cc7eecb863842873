"""Sparse upcycling of a foreign model, whose forward pass stays its own: timm's ViT, DeiT, Swin."""

from typing import Any

import torch
from torch import nn

from moecore.core.files import UserError
from moecore.nn.backbones.base_model import Model
from moecore.nn.experts.base import Experts
from moecore.nn.layers.moe import Blocks, MoELayer, sparse_block_indices
from moecore.nn.routers.base import Router
from moecore.training.upcycle import check_no_shared_experts, cut_mlp, fill_experts
from moecore.training.upcycling_kinds import Drop, Upcycling

ACTIVATIONS = {"GELU": "gelu", "ReLU": "relu", "QuickGELU": "quick_gelu"}  # timm's, ours
ALLOWED = "timm's ViT, DeiT and Swin, whose blocks have an mlp of fc1, activation, fc2"


def upcycle_in_place(
    model: nn.Module,
    *,
    router: Router,
    experts: Experts,
    blocks: Blocks = "last_2",
    kind: Upcycling = True,
    seed: int = 0,
) -> tuple[MoELayer, ...]:
    """Replace the MLP of some blocks of ``model`` by MoE layers; return these layers.

    Every expert starts as a copy of the block's MLP, on its device and in its dtype, so that the
    model computes what it did where combine weights sum to 1 (a router with ``renormalise: true``,
    ``top_k_softmax``). blocks: indices from 0, over all stages of a Swin, or every_2, last_2, all.
    kind: Granular cuts each copy into pieces, Drop draws a share of each copy's hidden units anew,
    by ``seed``. Raises UserError, and changes nothing, for what does not fit.
    """
    if isinstance(model, Model):
        mend = "give its method `upcycle: true`"
        raise UserError(f"upcycle: a model of moecore is not changed in place; {mend}")
    owners = [block for block in model.modules() if isinstance(_mlp_of(block), nn.Module)]
    if not owners:
        raise UserError(f"upcycle: {type(model).__name__} has no block with an mlp; {ALLOWED}")
    chosen = [owners[index] for index in sparse_block_indices(blocks, len(owners))]
    layers = tuple(_sparse_copy(block.mlp, router, experts, kind) for block in chosen)
    if isinstance(kind, Drop):
        kind.redraw_experts(nn.ModuleList(layers), seed)
    for block, layer in zip(chosen, layers, strict=True):
        block.mlp = layer.to(_mlp_of(block).fc1.weight)
    return layers


def _mlp_of(block: nn.Module) -> Any:
    return getattr(block, "mlp", None)


def _sparse_copy(mlp: Any, router: Router, experts: Experts, kind: Upcycling) -> MoELayer:
    """Return a MoE layer on the CPU that starts as the dense ``mlp``."""
    check_dense_mlp(mlp)
    activation = ACTIVATIONS[type(mlp.act).__name__]
    if (other := getattr(experts, "activation", activation)) != activation:
        raise UserError(f"experts.activation: found {other}; allowed: {activation}, as the model's")
    layer = MoELayer(mlp.fc1.in_features, router, experts)
    check_no_shared_experts(layer.feed_forward)
    with torch.no_grad():
        pieces = cut_mlp(layer.feed_forward.router, router, experts, kind)
        fill_experts(layer.feed_forward.experts, mlp.state_dict(), "", pieces)
    return layer.train(mlp.training)


def check_dense_mlp(mlp: Any) -> None:
    """Raise UserError where experts of kind mlp would not compute what ``mlp`` does."""
    if isinstance(mlp, MoELayer):
        raise UserError("upcycle: a chosen block has experts already; allowed: dense blocks")
    kind = type(mlp).__name__
    if kind != "Mlp":
        raise UserError(f"upcycle: found a feed-forward of the kind {kind}; allowed: {ALLOWED}")
    linears = (mlp.fc1, mlp.fc2)
    activation = type(mlp.act).__name__
    parts = {
        "convolutions": not all(isinstance(layer, nn.Linear) for layer in linears),
        "no biases": any(layer.bias is None for layer in linears),
        f"the activation {activation}": activation not in ACTIVATIONS,
        "an approximated GELU": getattr(mlp.act, "approximate", "none") != "none",
        "a norm": not isinstance(mlp.norm, nn.Identity),
        "dropout": mlp.drop1.p > 0 or mlp.drop2.p > 0,
    }
    if odd := [words for words, is_there in parts.items() if is_there]:
        raise UserError(f"upcycle: found an mlp with {', '.join(odd)}; allowed: {ALLOWED}")
