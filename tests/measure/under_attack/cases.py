"""Targets for the audit, and curves of attacks that were never run."""

import torch

from moecore.attacks.target import Target
from moecore.measure.under_attack.curves import Curve, Row
from tests.attacks.models import CLASSES, YEARS
from tests.attacks.test_target import Regressor

WEIGHT = torch.linspace(-3, 4, 8)


def of_classes(model: torch.nn.Module, images: int = 40, side: int = 4) -> Target:
    """Images with the classes that the model gives them, so that it is right on all."""
    pixels = torch.rand(images, 1, side, side, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        labels = model(pixels).prediction.argmax(dim=1)
    return Target(model, CLASSES, pixels, labels, batch=16)


def of_years(model: torch.nn.Module, images: int = 30) -> Target:
    """Volumes of 2³ voxels; the plain model is a tenth off, in turn too old and too young."""
    pixels = torch.rand(images, 1, 2, 2, 2, generator=torch.Generator().manual_seed(2))
    sign = (-1) ** torch.arange(images)
    labels = Regressor(WEIGHT)(pixels).prediction[:, 0].detach() + 0.1 * sign
    return Target(model, YEARS, pixels, labels, batch=8)


def curve(*scores: float, loss: float = 1.0, hits: tuple[int, ...] = (1,)) -> Curve:
    """Rows at 0.1, 0.2, … with these mean scores; ``hits`` are those of every row."""
    return tuple(
        Row(
            epsilon=0.1 * (place + 1),
            score=score,
            low=None,
            high=None,
            scores=CLASSES.packed(torch.tensor(hits).bool()),
            loss=loss,
            unchanged_images=0.0,
            routing_change=(),
            processing_change=(),
        )
        for place, score in enumerate(scores)
    )
