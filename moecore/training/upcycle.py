"""Sparse upcycling: a dense checkpoint's MLP becomes every expert of an MoE block.

Komatsuzaki et al. 2023; MoGE, §3.1. Or a piece of it: see upcycling_kinds.py. A foreign model
(timm's ViT, DeiT, Swin) is upcycled in place: its forward pass stays its own.
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
from moecore.nn.experts.base import Experts, ExpertsModule
from moecore.nn.experts.eigen import EigenExperts
from moecore.nn.experts.mlp import MlpExperts
from moecore.nn.layers.block import FeedForward
from moecore.nn.layers.moe import Blocks, MoEFeedForward, MoELayer, sparse_block_indices
from moecore.nn.routers.base import Router
from moecore.training import upcycling_kinds
from moecore.training.artifacts import rescale_head

Settings = TypeVar("Settings")

ACTIVATIONS = {"GELU": "gelu", "ReLU": "relu", "QuickGELU": "quick_gelu"}  # timm's, ours
ALLOWED = "timm's ViT, DeiT and Swin, whose blocks have an mlp of fc1, activation, fc2"


def inherit_pretrained_windows(
    config: Settings, image: ImageSpec, dense: BackboneModel
) -> Settings:
    """Return ``config`` for a model that starts from ``dense``: a continuous position bias goes on
    counting in the windows that it was learned for, unless ``config`` says which those are.
    """
    theirs = dense.config
    if not isinstance(config, SwinSettings) or not isinstance(theirs, SwinSettings):
        return config
    # A null on both sides with one size of windows is exact, oblong windows too: leave it.
    same = theirs.pretrained_windows is None and config.depths == theirs.depths
    if same and config.windows(image) == theirs.windows(dense.image):
        return config
    if config.pretrained_windows is not None or config.depths != theirs.depths:
        return config
    learned = theirs.trained_on(dense.image).pretrained_windows
    return config.model_copy(update={"pretrained_windows": learned})


@torch.no_grad()
def upcycle_model(
    model: BackboneModel, dense: BackboneModel, kind: upcycling_kinds.Upcycling = True
) -> BackboneModel:
    """Copy the weights of ``dense`` into ``model``, in place: shared layers as they are, each dense
    MLP into all experts of its block, positions interpolated to the model's grid.

    kind: granular cuts the MLPs. Routers keep their fresh weights, the head too where the classes
    differ. With ``renormalise`` on the router the model then computes what ``dense`` does. Raises
    UserError for what does not fit.
    """
    _check_settings(model, dense)
    _check_positions(model, dense)
    weights = _adapted_weights(model, dense)
    own = model.state_dict()
    replaced = dict(dense.named_modules())
    for name, layer in model.named_modules():
        if isinstance(layer, FeedForward):
            _check_activation(layer, replaced.get(name), name)
        if isinstance(layer, MoEFeedForward):
            check_no_shared_experts(layer)
            moe = model.moe_settings_of(name)
            assert moe is not None  # the layer was built by it
            pieces = cut_mlp(layer.router, moe.router, moe.experts, kind)
            fill_experts(layer.experts, weights, f"{name}.", pieces)
            own = {key: value for key, value in own.items() if not key.startswith(f"{name}.")}
    if dense.image.answers != model.image.answers:
        own = {name: value for name, value in own.items() if not name.startswith("head")}
    for name in dict.fromkeys([*weights, *own]):
        there, here = (
            tuple(state[name].shape) if name in state else "absent" for state in (weights, own)
        )
        if here != there:
            problem = f"found {name} {here} in the model, {there} in the teacher"
            raise UserError(f"upcycle: {problem}; allowed: the same model, but for its MLPs")
        own[name].copy_(weights[name])
    return model


def _check_settings(model: BackboneModel, dense: BackboneModel) -> None:
    """Raise UserError where the teacher's weights would compute something else in the model."""
    if dense.config.kind != model.config.kind:
        problem = f"the teacher is a {dense.config.kind}, the model a {model.config.kind}"
        raise UserError(f"upcycle: {problem}; allowed: both of one kind")
    for name, here, there in differing_settings(model.config, dense.config):
        values = (json.dumps(value, default=str) for value in (here, there))
        problem = "found {} {} in the model, {} in the teacher".format(name, *values)
        raise UserError(f"upcycle: {problem}; allowed: the same in both")


def differing_settings(ours: Config, theirs: Config) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name and both values of each setting that decides what weights compute, and differs
    between two backbones of one kind.
    """
    free = getattr(ours, "free_settings", frozenset())
    for name in type(ours).model_fields:
        here, there = getattr(ours, name), getattr(theirs, name)
        if name in free or here == there:
            continue
        if isinstance(here, Config) and type(here) is type(there):
            for inner, *values in differing_settings(here, there):
                yield f"{name}.{inner}", *values
        else:
            yield name, getattr(here, "kind", here), getattr(there, "kind", there)


def _adapted_weights(model: BackboneModel, dense: BackboneModel) -> dict[str, torch.Tensor]:
    """Return the teacher's weights for the model's images and task; no head for other answers.

    Raises UserError where pixels of other statistics cannot be balanced.
    """
    ours, theirs = model.image, dense.image
    weights = dict(dense.state_dict())
    if theirs.answers != ours.answers:
        weights = {name: value for name, value in weights.items() if not name.startswith("head")}
    elif theirs.task.head != ours.task.head:
        weights |= rescale_head(weights, theirs.task.head, ours.task.head)
    try:
        weights = model.adapt_weights(weights, dense.config, theirs)
    except ValueError as error:
        raise UserError(f"upcycle: {error}") from error
    changed = model.renormalise_weights(weights, theirs)
    if not changed and (ours.mean, ours.std) != (theirs.mean, theirs.std):
        problem = f"the teacher's pixels have means of {theirs.mean} and deviations of {theirs.std}"
        here = f"the model's {ours.mean} and {ours.std}"
        raise UserError(f"upcycle: {problem}, {here}; allowed: the same of a {model.config.kind}")
    return weights | changed


def _check_positions(model: BackboneModel, dense: BackboneModel) -> None:
    """Raise UserError where a position bias would count in other windows than it learned."""
    if not isinstance(model.config, SwinSettings) or model.config.depths != dense.config.depths:
        return
    here = model.config.trained_on(model.image).pretrained_windows
    there = dense.config.trained_on(dense.image).pretrained_windows
    if here != there:
        problem = f"the teacher's positions are of windows of {there}, the model's of {here}"
        mend = "set model.pretrained_windows to the teacher's, or null"
        raise UserError(f"upcycle: {problem}; {mend}")


def check_no_shared_experts(layer: MoEFeedForward) -> None:
    """Raise UserError where it is open which expert the dense MLP becomes."""
    if layer.shared is not None:
        problem = "shared experts beside copies would count the dense MLP twice"
        raise UserError(f"experts.shared: {problem}; allowed: 0, or upcycle: false")


def _check_activation(layer: FeedForward, mlp: nn.Module | None, name: str) -> None:
    """Raise UserError where a dense MLP has another activation than what begins as it."""
    if mlp is None:
        return  # that there is none is said by name
    there = getattr(mlp, "activation", "gelu")
    problem = f"the teacher's MLP at {name} has {there}"
    if isinstance(layer, MoEFeedForward):
        if (here := getattr(layer.experts, "activation", "gelu")) != there:
            mend = f"set experts.activation: {there}"
            raise UserError(f"upcycle: {problem}, the experts have {here}; {mend}")
    elif (here := getattr(layer, "activation", "gelu")) != there:
        raise UserError(f"upcycle: {problem}, the model's {here}; set model.activation: {there}")


def cut_mlp(
    module: nn.Module, router: Router, experts: Experts, kind: upcycling_kinds.Upcycling
) -> upcycling_kinds.MlpPieceScales:
    """Return how the MLPs are cut; of several pieces the router begins with equal rows.

    module: the router of these settings, in a layer of such experts. Raises UserError where the
    pieces would not be chosen together.
    """
    if not isinstance(kind, upcycling_kinds.Granular):
        return upcycling_kinds.WHOLE_MLP
    for key, problem in kind.list_parting_settings(router, experts):
        raise UserError(f"{'.'.join(key)}: {problem}")
    upcycling_kinds.repeat_router_rows(module, kind.pieces)
    return kind.cut_mlp(router, experts.number)


def fill_experts(
    experts: ExpertsModule,
    weights: dict[str, torch.Tensor],
    prefix: str,
    pieces: upcycling_kinds.MlpPieceScales = upcycling_kinds.WHOLE_MLP,
) -> None:
    """Move the dense MLP under ``prefix`` out of ``weights`` into every expert, or its ``pieces``
    one after the other.

    An eigen expert gets what of the MLP its own basis sees: x B Bᵀ W1ᵀ in the place of x W1ᵀ.
    Raises UserError for experts of another kind or size.
    """
    eigen = isinstance(experts, EigenExperts)
    if not (eigen and experts.down_inner is None) and not isinstance(experts, MlpExperts):
        mend = "allowed: experts.factored_output: false, or upcycle: false"
        raise UserError(f"upcycle: an MLP fits experts of kind mlp or eigen, W2 in one; {mend}")
    up = weights.pop(f"{prefix}fc1.weight", None)
    hidden, width = experts.down.shape[1:]
    if experts.up_bias is None or experts.down_bias is None:
        raise UserError("experts.activation: found swiglu, and a dense MLP has none; allowed: gelu")
    if up is None or up.shape != (pieces.number * hidden, width):
        held = "no dense MLP"
        if up is not None:
            held = f"an MLP of hidden width {up.shape[0]} and width {up.shape[1]}"
        there = f"the teacher has {held} at {prefix[:-1]}"
        here = f"the experts are {hidden} and {width} wide"
        mend = "its mlp_ratio, over upcycle.pieces where it is cut, and fine: null"
        raise UserError(f"upcycle: {there}, {here}; set experts.hidden_ratio to {mend}")
    up_bias = weights.pop(f"{prefix}fc1.bias")
    down = weights.pop(f"{prefix}fc2.weight")
    down_bias = weights.pop(f"{prefix}fc2.bias")
    # A linear layer holds (out, in), experts (expert, in, out); expert c · pieces + s has piece s.
    cut = (pieces.number, hidden)
    copies = len(experts.up) // pieces.number
    if isinstance(experts, EigenExperts):
        experts.up.copy_(experts.basis.transpose(1, 2) @ up.t())  # (E, r, h)
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
    if isinstance(kind, upcycling_kinds.Drop):
        kind.redraw_experts(nn.ModuleList(layers), seed)
    for block, layer in zip(chosen, layers, strict=True):
        block.mlp = layer.to(_mlp_of(block).fc1.weight)
    return layers


def _mlp_of(block: nn.Module) -> Any:
    return getattr(block, "mlp", None)


def _sparse_copy(
    mlp: Any, router: Router, experts: Experts, kind: upcycling_kinds.Upcycling
) -> MoELayer:
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
