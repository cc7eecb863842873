"""Sparse upcycling: a dense checkpoint's MLP becomes every expert of an MoE block.

Komatsuzaki et al. 2023; MoGE, §3.1.
"""

import torch
from torch import nn

from moecore.core.files import UserError
from moecore.nn.backbones.model import BackboneModel
from moecore.nn.experts.base import ExpertsModule
from moecore.nn.experts.mlp import MlpExperts
from moecore.nn.layers.moe import MoELayer


@torch.no_grad()
def upcycle(model: BackboneModel, dense: BackboneModel, noise: float = 0.0) -> BackboneModel:
    """Copy the weights of ``dense`` into ``model``, in place: shared layers as they are, each dense
    MLP into all experts of its block.

    noise: standard deviation of what is added to each expert's weights, in that of the weights
    copied; drawn from the global generator, in the model's order.
    Routers keep their fresh weights, the head too where the classes differ; positions are
    interpolated to the model's grid. With ``renormalise`` on the router the model then computes
    what ``dense`` does. Raises UserError where the sizes differ, or where the experts are no plain
    MLPs.
    """
    if dense.config.kind != model.config.kind:
        found = f"the teacher is a {dense.config.kind}, the model a {model.config.kind}"
        raise UserError(f"upcycle: {found}; allowed: both of one kind")
    weights = dict(dense.state_dict())
    own = model.state_dict()
    if dense.image.answers != model.image.answers:
        weights = {name: value for name, value in weights.items() if not name.startswith("head")}
    weights = model.moved(weights, dense.config, dense.image)
    weights |= model.renormalised(weights, dense.image)
    replaced = dict(dense.named_modules())
    for name, layer in model.named_modules():
        if isinstance(layer, MoELayer):
            _same_activation(layer.experts, replaced.get(name), name)
            _fill_experts(layer.experts, weights, f"{name}.", noise)
    for name, value in weights.items():
        if name not in own or own[name].shape != value.shape:
            here = tuple(own[name].shape) if name in own else "absent"
            found = f"{tuple(value.shape)} in the teacher, {here} in the model"
            needed = "the teacher must have the model's patch, width, depth, heads and pooling"
            raise UserError(f"upcycle: {name} is {found}; {needed}")
        own[name].copy_(value)
    return model


def _same_activation(experts: ExpertsModule, mlp: nn.Module | None, name: str) -> None:
    """Raise UserError where a dense MLP has another activation than the experts made of it."""
    there = "quick_gelu" if getattr(mlp, "quick", False) else "gelu"
    here = getattr(experts, "activation", there)
    if here != there:
        found = f"the teacher's MLP at {name} has {there}, the experts have {here}"
        raise UserError(f"upcycle: {found}; set experts.activation: {there}")


def _fill_experts(
    experts: ExpertsModule, weights: dict[str, torch.Tensor], prefix: str, noise: float
) -> None:
    """Move the dense MLP under ``prefix`` out of ``weights`` into every expert."""
    if not isinstance(experts, MlpExperts):
        mend = "set experts.kind: mlp, or upcycle: false"
        raise UserError(f"upcycle: a dense MLP can be copied into experts of kind mlp only; {mend}")
    up = weights.pop(f"{prefix}fc1.weight", None)
    _, width, hidden = experts.up.shape
    if up is None or up.shape != (hidden, width):
        found = "no dense MLP"
        if up is not None:
            found = f"an MLP of hidden width {up.shape[0]} and width {up.shape[1]}"
        there = f"the teacher has {found} at {prefix[:-1]}"
        here = f"the experts are {hidden} and {width} wide"
        raise UserError(f"upcycle: {there}, {here}; set experts.hidden_ratio to its mlp_ratio")
    up_bias = weights.pop(f"{prefix}fc1.bias")
    down = weights.pop(f"{prefix}fc2.weight")
    down_bias = weights.pop(f"{prefix}fc2.bias")
    # A linear layer holds (out, in), experts (expert, in, out).
    experts.up.copy_(up.t().expand_as(experts.up))
    experts.up_bias.copy_(up_bias.expand_as(experts.up_bias))
    experts.down.copy_(down.t().expand_as(experts.down))
    experts.down_bias.copy_(down_bias.expand_as(experts.down_bias))
    for copied in (experts.up, experts.down) if noise else ():
        copied.add_(noise * copied[0].std() * torch.randn_like(copied))
