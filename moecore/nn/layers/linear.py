"""The linear layer that every dense part of a transformer starts from."""

from torch import nn


def linear(inputs: int, outputs: int, bias: bool = True) -> nn.Linear:
    """A Linear with truncated-normal weights (std 0.02) and zero bias: the start of ViT and DeiT
    (timm's scheme).
    """
    layer = nn.Linear(inputs, outputs, bias=bias)
    nn.init.trunc_normal_(layer.weight, std=0.02)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer
