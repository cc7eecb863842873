"""Models and data that the explorer must show: small, and made without training."""

from pathlib import Path

import numpy as np
import torch

from moecore.data.prepared import Prepared, Split
from moecore.measure.base import Subject
from moecore.measure.explorer import Explorer
from moecore.nn.backbones.image import ImageSpec
from moecore.nn.backbones.vit import Vit
from moecore.nn.backbones.vit3d import Vit3d
from moecore.nn.layers.moe import MoE
from moecore.tasks.classification import Classification
from tests.cohort import write_cohort

NASTY = "<img src=x onerror=alert(1)>"
MOVED = {"name": "moved", "views": {"affine": {"degrees": 40, "translate": 0.3}}}
FEW = Explorer.model_validate(
    {
        "images": 5,
        "gallery": 40,
        "favourites": 3,
        "sigmas": [0.1, 0.5],
        "epsilons": [0.02, 0.1],
        "attack": {"kind": "pgd", "steps": 2},
        "augmentations": [MOVED, "rotation", "brightness"],
    }
)
OF_VOLUMES = FEW.model_copy(update={"augmentations": ("shift", "noise")})


def moe(experts: int = 4, blocks: tuple[int, ...] = (0, 1)) -> MoE:
    """Noisy top-2 over MLPs."""
    return MoE(
        router={"kind": "noisy_top_k", "k": min(2, experts)},
        experts={"kind": "mlp", "number": experts, "hidden_ratio": 0.25},
        blocks=blocks,
    )


def images(classes: int = 3, size: int = 12, channels: int = 1, number: int = 50) -> Prepared:
    """Generated images; the first class has a name that a page must not read as HTML."""
    names = (NASTY, *(f"class {place}" for place in range(1, classes)))
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (number, channels, size, size), dtype=np.uint8)
    split = Split(pixels, random.integers(0, classes, number))
    card = {
        "name": "generated",
        "task": Classification(classes=names).model_dump(),
        "channels": channels,
        "size": size,
        "mean": [0.5] * channels,
        "std": [0.3] * channels,
        "simulated": False,
    }
    return Prepared(card, split, split, split)


def subject(data: Prepared, layers: MoE | None, patch: int = 4, seed: int = 0) -> Subject:
    """An untrained model of two blocks whose routers are sure."""
    torch.manual_seed(seed)
    backbone = Vit(patch=patch, width=16, depth=2, heads=2)
    model = backbone.build(ImageSpec.from_card(data.card), layers)
    return Subject(surer(model).eval(), data)


def volumes(folder: Path, seed: int = 0) -> Subject:
    """A model of age on volumes of 16³ voxels, in cubes of 4³."""
    data = write_cohort(folder)
    torch.manual_seed(seed)
    backbone = Vit3d(patch=4, width=16, depth=2, heads=2, mlp_ratio=1)
    model = backbone.build(ImageSpec.from_card(data.card), moe())
    return Subject(surer(model).eval(), data)


def surer(model: torch.nn.Module) -> torch.nn.Module:
    """The model with weights that make its tokens differ."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight *= 30 if "router" in name else 4
    return model
