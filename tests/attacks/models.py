"""Tiny models whose gradients are known, plainly nonlinear, or missing."""

import torch
from torch import Tensor, nn

from moecore.backbones import MoESettings, Vit
from moecore.core.routing_records import ModelOutput, RoutingRecord
from moecore.nn.backbones.base_model import ImageSpec
from moecore.tasks import classification, multi_label, regression

CLASSES = classification.Classification(classes=("a", "b", "c", "d"))
SETS = multi_label.MultiLabel(classes=("a", "b"))
YEARS = regression.Regression(target="age", unit="years")


class Plain(nn.Module):
    """A model whose labels are what the task compares predictions with."""

    def targets(self, labels: Tensor) -> Tensor:
        return labels

    def beside(self, labels: Tensor) -> tuple[Tensor, ...]:
        return ()


class Linear(Plain):
    """Two classes, logits (0, w·x + bias): the loss gradient has the sign of ±w everywhere."""

    def __init__(self, weight: Tensor, bias: float = 0.0) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight), bias

    def forward(self, images: Tensor) -> ModelOutput:
        score = images.flatten(1) @ self.weight + self.bias
        return ModelOutput(torch.stack([torch.zeros_like(score), score], dim=1))


class Curved(Plain):
    """Strongly bent logits: the gradient's sign turns inside a small ball."""

    def __init__(self, pixels: int, classes: int = 3, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.first = nn.Parameter(12 * torch.randn(pixels, 16, generator=generator))
        self.second = nn.Parameter(torch.randn(16, classes, generator=generator))
        self.dropout = nn.Dropout(0.0)

    def forward(self, images: Tensor) -> ModelOutput:
        return ModelOutput(torch.sin(self.dropout(images.flatten(1)) @ self.first) @ self.second)


class Smooth(Plain):
    """A gentle classifier with one layer of routing over 4 experts, one token a row of pixels."""

    def __init__(self, side: int = 4, classes: int = 4, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.first = nn.Parameter(torch.randn(side * side, 16, generator=generator))
        self.second = nn.Parameter(2 * torch.randn(16, classes, generator=generator))
        self.router = nn.Parameter(3 * torch.randn(side, 4, generator=generator))

    def forward(self, images: Tensor) -> ModelOutput:
        logits = (images[:, 0] - 0.5) @ self.router
        probs = logits.softmax(dim=-1)
        best = probs.topk(2, dim=-1).indices
        chosen = torch.zeros_like(probs, dtype=torch.bool).scatter(-1, best, True)
        record = RoutingRecord(logits, probs, probs.square(), chosen, torch.where(chosen, probs, 0))
        prediction = torch.tanh((images.flatten(1) - 0.5) @ self.first) @ self.second
        return ModelOutput(prediction, (record,))


class Blind(Plain):
    """A model behind a rounding of its images to 1/1000: nearly the same logits, no gradient."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> ModelOutput:
        return self.model((images * 1000).round() / 1000)


def vit(router: dict | None, number: int = 3, seed: int = 0) -> nn.Module:
    """A tiny ViT of 8 × 8 grey pixels with large weights, to evaluate; dense without a router."""
    torch.manual_seed(seed)
    image = ImageSpec(channels=1, size=8, task=CLASSES, mean=(0.5,), std=(0.3,))
    experts = {"kind": "mlp", "number": number, "hidden_ratio": 1.0}
    moe = None
    if router is not None:
        moe = MoESettings(router=router, experts=experts, blocks=(0, 1))
    model = Vit(patch=4, width=16, depth=2, heads=2).build(image, moe).eval()
    for name, parameter in model.named_parameters():
        parameter.data *= 8 if parameter.ndim > 1 and "embed" not in name else 1
    return model
