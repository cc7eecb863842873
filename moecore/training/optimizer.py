"""The groups of parameters that an optimizer gets, and the cosine schedule."""

import math
from collections.abc import Sequence

import torch
from torch import nn

from moecore.training.settings import Training

FREE = ("_token", "pos_embed", "bias", "basis", "scale", "target")


def build_optimizer(
    model: nn.Module, settings: Training, routers: Sequence[nn.Parameter] = ()
) -> torch.optim.Optimizer:
    """The optimizer of ``settings``, fused; weight decay on matrices only, so on no bias, norm,
    token, position embedding, and no expert's basis, whose lengths its orthogonality penalty holds,
    nor on a router's rows that are to stay orthonormal.

    routers: those of the teacher where they learn too; a group of their own, without decay.
    """
    decayed, free = [], []
    held = {id(one) for part in model.modules() for one in getattr(part, "orthonormal_rows", ())}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        matrix = parameter.ndim >= 2 and not name.endswith(FREE) and id(parameter) not in held
        (decayed if matrix else free).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": settings.weight_decay},
        {"params": free, "weight_decay": 0.0},
        {"params": list(routers), "weight_decay": 0.0},
    ]
    filled = [group for group in groups if group["params"]]
    return settings.optimizer.build(filled, settings.learning_rate)


def learning_rate(step: int, steps: int, warmup: float, settings: Training) -> float:
    """Rate of a step from 0: linear over ``warmup`` steps, then a half cosine to the final."""
    if step < warmup:
        return settings.learning_rate * (step + 1) / (warmup + 1)
    share = (step - warmup) / max(1.0, steps - warmup)
    span = settings.learning_rate - settings.final_learning_rate
    return settings.final_learning_rate + span * (1 + math.cos(math.pi * share)) / 2
