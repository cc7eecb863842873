"""Sparse upcycling: a dense checkpoint's MLP becomes every expert of an MoE block.

Komatsuzaki et al. 2023; MoGE, §3.1. An expert may also be a piece of the MLP (upcycling_kinds.py).
An outside model (timm's ViT, DeiT, Swin) is upcycled in place.
"""

import json
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import nn

from moecore.core.config import Config
from moecore.core.files import UserError
from moecore.nn.backbones.base_model import BackboneModel, ImageSpec, Model
from moecore.nn.backbones.swin import SwinSettings
from moecore.nn.experts.base import Experts
from moecore.nn.layers.block import FeedForward
from moecore.nn.layers.moe import Blocks, MoEFeedForward, MoELayer, sparse_block_indices
from moecore.nn.routers.base import Router
from moecore.training import artifacts, upcycling_kinds

Settings = TypeVar("Settings")

ACTIVATION_BY_TIMM_NAME = {"GELU": "gelu", "ReLU": "relu", "QuickGELU": "quick_gelu"}
ALLOWED = "timm's ViT, DeiT and Swin, whose blocks have an mlp of fc1, activation, fc2"


def inherit_learned_windows(config: Settings, image: ImageSpec, dense: BackboneModel) -> Settings:
    """Return ``config``; a Swin with null ``pretrained_windows`` gets window sizes of ``dense``."""
    theirs = dense.config
    if not isinstance(config, SwinSettings) or not isinstance(theirs, SwinSettings):
        return config
    if config.pretrained_windows is not None or config.depths != theirs.depths:
        return config
    # With equal windows and null in both settings the copy is exact, also for oblong windows.
    if theirs.pretrained_windows is None and config.windows(image) == theirs.windows(dense.image):
        return config
    learned = theirs.trained_on(dense.image).pretrained_windows
    return config.model_copy(update={"pretrained_windows": learned})


@torch.no_grad()
def copy_dense_into_moe(
    model: BackboneModel, dense: BackboneModel, kind: upcycling_kinds.Upcycling = True
) -> BackboneModel:
    """Copy the weights of ``dense`` into ``model``, in place, each dense MLP into all experts."""
    # Routers keep their random weights, as does the head if the classes differ. With
    # ``renormalise`` on the router the model then computes the same as ``dense``.
    _check_equal_settings(model, dense)
    weights = _adapted_weights(model, dense)
    state = model.state_dict()
    dense_modules = dict(dense.named_modules())
    for name, layer in model.named_modules():
        if isinstance(layer, FeedForward):
            _check_equal_activation(layer, dense_modules.get(name), name)
        if isinstance(layer, MoEFeedForward):
            check_no_shared_experts(layer)
            moe = model.moe_settings_of(name)
            assert moe is not None  # the layer was built from it
            pieces = scale_pieces_and_tie_router_rows(layer.router, moe.router, moe.experts, kind)
            copy_mlp_into_experts(layer.experts, weights, f"{name}.", pieces)
            state = {key: value for key, value in state.items() if not key.startswith(f"{name}.")}
    if dense.image.answers != model.image.answers:
        state = {name: value for name, value in state.items() if not name.startswith("head")}
    for name in dict.fromkeys([*weights, *state]):
        theirs = tuple(weights[name].shape) if name in weights else "absent"
        ours = tuple(state[name].shape) if name in state else "absent"
        if ours != theirs:
            raise _difference_error(name, ours, theirs, "the same model, except for its MLPs")
        state[name].copy_(weights[name])
    return model


def _difference_error(name: str, ours: object, theirs: object, allowed: str) -> UserError:
    difference = f"{name} {ours} in the model, {theirs} in the teacher"
    return UserError.at("upcycle", found=difference, allowed=allowed)


def _check_equal_settings(model: BackboneModel, dense: BackboneModel) -> None:
    """Raise UserError if the teacher's weights would have another effect in the model."""
    if dense.config.kind != model.config.kind:
        raise UserError(
            f"upcycle: the teacher is a {dense.config.kind}, the model a {model.config.kind}; "
            "allowed: both of one kind"
        )
    for name, *values in differing_settings(model.config, dense.config):
        ours, theirs = [json.dumps(value, default=str) for value in values]
        raise _difference_error(name, ours, theirs, "the same in both")
    if not isinstance(model.config, SwinSettings) or model.config.depths != dense.config.depths:
        return
    ours = model.config.trained_on(model.image).pretrained_windows
    theirs = dense.config.trained_on(dense.image).pretrained_windows
    if ours != theirs:  # a position bias would be used in windows of another size
        raise UserError(
            f"upcycle: the teacher learned positions in windows of {theirs}, the model has {ours}; "
            "set model.pretrained_windows to the teacher's, or null"
        )


def differing_settings(ours: Config, theirs: Config) -> Iterator[tuple[str, Any, Any]]:
    """Yield (name, our value, their value) per different setting that changes the computation."""
    free = getattr(ours, "free_settings", frozenset())
    for name in type(ours).model_fields:
        mine, other = getattr(ours, name), getattr(theirs, name)
        if name in free or mine == other:
            continue
        if isinstance(mine, Config) and type(mine) is type(other):
            for inner, *values in differing_settings(mine, other):
                yield f"{name}.{inner}", *values
        else:
            yield name, getattr(mine, "kind", mine), getattr(other, "kind", other)


def _adapted_weights(model: BackboneModel, dense: BackboneModel) -> dict[str, torch.Tensor]:
    """Adapt the teacher's weights to the model's images and task; drop the head if tasks differ."""
    ours, theirs = model.image, dense.image
    try:
        weights = artifacts.rescale_or_drop_head_weights(dict(dense.state_dict()), theirs, ours)
        weights = model.adapt_weights(weights, dense.config, theirs)
    except ValueError as error:
        raise UserError(f"upcycle: {error}") from error
    changed = model.renormalise_weights(weights, theirs)
    if not changed and (ours.mean, ours.std) != (theirs.mean, theirs.std):
        raise UserError(
            f"upcycle: the teacher's pixels have means of {theirs.mean} and deviations of "
            f"{theirs.std}, the model's {ours.mean} and {ours.std}; allowed: equal ones for a "
            f"{model.config.kind}"
        )
    return weights | changed


def check_no_shared_experts(layer: MoEFeedForward) -> None:
    if layer.shared is not None:
        raise UserError(
            "experts.shared: shared experts in addition to copies would count the dense MLP "
            "twice; allowed: 0, or upcycle: false"
        )


def _check_equal_activation(layer: FeedForward, mlp: nn.Module | None, name: str) -> None:
    theirs = getattr(mlp, "activation", "gelu")
    is_sparse = isinstance(layer, MoEFeedForward)
    ours = getattr(layer.experts if is_sparse else layer, "activation", "gelu")
    if mlp is not None and ours != theirs:  # ``copy_mlp_into_experts`` refuses a missing MLP
        key = "experts" if is_sparse else "model"
        raise UserError(
            f"upcycle: the teacher's MLP at {name} has {theirs}, {key}.activation is {ours}; set "
            f"{key}.activation: {theirs}"
        )


def scale_pieces_and_tie_router_rows(
    module: nn.Module, router: Router, experts: Experts, kind: upcycling_kinds.Upcycling
) -> upcycling_kinds.MlpPieceScales:
    """Return how ``kind`` cuts the MLP; give its pieces equal rows in the router ``module``."""
    if not isinstance(kind, upcycling_kinds.Granular):
        return upcycling_kinds.WHOLE_MLP
    for key, refusal in kind.list_settings_parting_pieces(router, experts):
        raise UserError(f"{'.'.join(key)}: {refusal}")
    upcycling_kinds.repeat_router_rows(module, kind.pieces)
    return kind.piece_scales(router, experts.number)


def copy_mlp_into_experts(
    experts: Any,
    weights: dict[str, torch.Tensor],
    prefix: str,
    pieces: upcycling_kinds.MlpPieceScales = upcycling_kinds.WHOLE_MLP,
) -> None:
    """Move the dense MLP ``prefix`` from ``weights`` into every expert, or pieces of it."""
    if not experts.can_copy_mlp:
        raise UserError(
            "upcycle: an MLP fits experts of kind mlp, or eigen with unfactored W2; allowed: "
            "experts.factored_output: false, or upcycle: false"
        )
    up = weights.pop(f"{prefix}fc1.weight", None)
    hidden, width = experts.down.shape[1:]
    if experts.up_bias is None or experts.down_bias is None:
        raise UserError("experts.activation: found swiglu, and a dense MLP has none; allowed: gelu")
    if up is None or up.shape != (pieces.number * hidden, width):
        mlp = "no dense MLP"
        if up is not None:
            mlp = f"an MLP of hidden width {up.shape[0]} and width {up.shape[1]}"
        raise UserError(
            f"upcycle: the teacher has {mlp} at {prefix[:-1]}, the experts are {hidden} and "
            f"{width} wide; set experts.hidden_ratio to its mlp_ratio, over upcycle.pieces where "
            "it is cut, and fine: null"
        )
    up_bias = weights.pop(f"{prefix}fc1.bias")
    down = weights.pop(f"{prefix}fc2.weight")
    down_bias = weights.pop(f"{prefix}fc2.bias")
    # A linear layer is (out, in), experts (expert, in, out); expert c · pieces + s has piece s.
    cut = (pieces.number, hidden)
    copies = len(experts.up) // pieces.number
    if (basis := experts.lent_basis()) is not None:
        # The part of the MLP that the basis sees: x B Bᵀ W1ᵀ instead of x W1ᵀ.
        experts.up.copy_(basis.transpose(1, 2) @ up.t())  # (E, r, h)
    else:
        experts.up.copy_(up.t().unflatten(1, cut).transpose(0, 1).repeat(copies, 1, 1))
    experts.up_bias.copy_(up_bias.unflatten(0, cut).repeat(copies, 1))
    experts.down.copy_(pieces.output_scale * down.t().unflatten(0, cut).repeat(copies, 1, 1))
    experts.down_bias.copy_((pieces.bias_scale * down_bias).expand_as(experts.down_bias))


def upcycle_in_place(
    model: nn.Module,
    *,
    router: Router,
    experts: Experts,
    blocks: Blocks = "last_2",
    kind: upcycling_kinds.Upcycling = True,
    seed: int = 0,
) -> tuple[MoELayer, ...]:
    """Replace the MLP of some blocks of ``model`` by MoE layers; return these layers.

    Every expert starts as a copy of the block's MLP, on its device and in its dtype. If combine
    weights sum to 1 (a router with ``renormalise: true``, ``top_k_softmax``), the model computes
    the same as before.

    Args:
        model: timm's ViT, DeiT or Swin.
        router: settings of the layers' routers.
        experts: settings of the layers' experts.
        blocks: indices from 0, over all stages of a Swin, or every_2, last_2, all.
        kind: Granular cuts each copy into pieces, Drop draws a share of its hidden units again.
        seed: of the units that Drop draws.

    Returns:
        The new layers, in the order of the blocks.

    Raises:
        UserError: for a model or settings that do not fit; the model is then not changed.
    """
    if isinstance(model, Model):
        raise UserError("upcycle: moecore's models do not change; give the method `upcycle: true`")
    owners = [part for part in model.modules() if isinstance(getattr(part, "mlp", None), nn.Module)]
    if not owners:
        raise UserError(f"upcycle: {type(model).__name__} has no block with an mlp; {ALLOWED}")
    chosen = [owners[index] for index in sparse_block_indices(blocks, len(owners))]
    layers = tuple(_build_moe_from_mlp(block.mlp, router, experts, kind) for block in chosen)
    if isinstance(kind, upcycling_kinds.Drop):
        kind.redraw_experts(nn.ModuleList(layers), seed)
    for block, layer in zip(chosen, layers, strict=True):
        dense: Any = block.mlp
        block.mlp = layer.to(dense.fc1.weight)
    return layers


def _build_moe_from_mlp(
    mlp: Any, router: Router, experts: Experts, kind: upcycling_kinds.Upcycling
) -> MoELayer:
    check_dense_mlp(mlp)
    activation = ACTIVATION_BY_TIMM_NAME[type(mlp.act).__name__]
    if (other := getattr(experts, "activation", activation)) != activation:
        raise UserError(f"experts.activation: found {other}; allowed: {activation}, as the model's")
    layer = MoELayer(mlp.fc1.in_features, router, experts)
    check_no_shared_experts(layer.feed_forward)
    with torch.no_grad():
        pieces = scale_pieces_and_tie_router_rows(layer.feed_forward.router, router, experts, kind)
        copy_mlp_into_experts(layer.feed_forward.experts, mlp.state_dict(), "", pieces)
    return layer.train(mlp.training)


def check_dense_mlp(mlp: Any) -> None:
    """Raise UserError if experts of kind mlp would not compute the same as ``mlp``."""
    if isinstance(mlp, MoELayer):
        raise UserError("upcycle: a chosen block has experts already; allowed: dense blocks")
    kind = type(mlp).__name__
    if kind != "Mlp":
        raise UserError(f"upcycle: found a feed-forward of the kind {kind}; allowed: {ALLOWED}")
    linears = (mlp.fc1, mlp.fc2)
    activation = type(mlp.act).__name__
    unsupported = []
    if not all(isinstance(layer, nn.Linear) for layer in linears):
        unsupported.append("convolutions")
    if any(layer.bias is None for layer in linears):
        unsupported.append("no biases")
    if activation not in ACTIVATION_BY_TIMM_NAME:
        unsupported.append(f"the activation {activation}")
    if getattr(mlp.act, "approximate", "none") != "none":
        unsupported.append("an approximated GELU")
    if not isinstance(mlp.norm, nn.Identity):
        unsupported.append("a norm")
    if mlp.drop1.p > 0 or mlp.drop2.p > 0:
        unsupported.append("dropout")
    if unsupported:
        raise UserError(f"upcycle: found an mlp with {', '.join(unsupported)}; allowed: {ALLOWED}")
