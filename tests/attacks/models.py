"""Tiny models whose gradients are known or plainly nonlinear."""

import torch
from torch import Tensor, nn

from moecore.records import ModelOutput


class Linear(nn.Module):
    """Two classes, logits (0, w·x): the loss gradient has the sign of ±w everywhere."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, images: Tensor) -> ModelOutput:
        score = images.flatten(1) @ self.weight
        return ModelOutput(torch.stack([torch.zeros_like(score), score], dim=1))


class Curved(nn.Module):
    """Logits of strongly bent functions of the pixels, so that the gradient's sign turns inside a small ball."""

    def __init__(self, pixels: int, classes: int = 3, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.first = nn.Parameter(12 * torch.randn(pixels, 16, generator=generator))
        self.second = nn.Parameter(torch.randn(16, classes, generator=generator))
        self.dropout = nn.Dropout(0.0)

    def forward(self, images: Tensor) -> ModelOutput:
        return ModelOutput(torch.sin(self.dropout(images.flatten(1)) @ self.first) @ self.second)
