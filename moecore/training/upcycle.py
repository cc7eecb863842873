"""Sparse upcycling (Komatsuzaki et al. 2023; MoGE, §3.1): a dense checkpoint's MLP becomes every expert of an MoE block."""

import torch
from torch import nn

from moecore.files import StageError
from moecore.layers.positions import resize_positions


@torch.no_grad()
def upcycle(model: nn.Module, dense: nn.Module) -> nn.Module:
    """Copy the weights of ``dense`` into ``model``, in place: shared layers as they are, each dense MLP into all experts of its block.

    Routers keep their fresh weights, the head too where the classes differ; positions are interpolated to the model's grid.
    With ``renormalise`` on the router the model then computes what ``dense`` does. Raises StageError where the sizes differ,
    or where the experts are no plain MLPs.
    """
    weights, own = dict(dense.state_dict()), model.state_dict()
    if dense.image.answers != model.image.answers:
        weights = {name: value for name, value in weights.items() if not name.startswith("head")}
    if "pos_embed" in weights:  # fixed positions are no weights
        weights["pos_embed"] = resize_positions(weights["pos_embed"], model.positioned, model.layout.grid, old=dense.layout.grid)
    sparse = () if model.moe is None else model.moe.indices(model.depth)
    for index in sparse:
        _fill_experts(model.blocks[index].mlp.experts, weights, f"blocks.{index}.mlp.")
    for name, value in weights.items():
        if name not in own or own[name].shape != value.shape:
            found = f"{tuple(value.shape)} in the teacher, {tuple(own[name].shape) if name in own else 'absent'} in the model"
            raise StageError(f"upcycle: {name} is {found}; the teacher must have the model's patch, width, depth, heads and pooling")
        own[name].copy_(value)
    return model


def _fill_experts(experts: nn.Module, weights: dict[str, torch.Tensor], prefix: str) -> None:
    """Move the dense MLP under ``prefix`` out of ``weights`` into every expert."""
    if {name for name, _ in experts.named_parameters()} != {"up", "up_bias", "down", "down_bias"}:
        raise StageError("upcycle: a dense MLP can be copied into experts of kind mlp only; set experts.kind: mlp, or upcycle: false")
    up, up_bias, down, down_bias = (weights.pop(prefix + name, None) for name in ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"))
    if up is None or up.shape != experts.up.shape[:0:-1]:
        found = "no dense MLP" if up is None else f"an MLP of hidden width {up.shape[0]} and width {up.shape[1]}"
        raise StageError(f"upcycle: the teacher has {found} at {prefix[:-1]}, the experts are {experts.up.shape[2]} and {experts.up.shape[1]} wide; set experts.hidden_ratio to its mlp_ratio")
    for parameter, value in ((experts.up, up.t()), (experts.up_bias, up_bias), (experts.down, down.t()), (experts.down_bias, down_bias)):
        parameter.copy_(value.expand_as(parameter))
