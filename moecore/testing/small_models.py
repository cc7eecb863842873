"""A small model and data that have everything a part may ask for."""

import numpy as np
import torch

from moecore.core.routing_records import Batch, Guidance, ObjectiveInputs
from moecore.data.prepared import Prepared, Split
from moecore.nn.backbones.base_model import ImageSpec
from moecore.nn.backbones.patch_transformer_base import PatchTransformer
from moecore.nn.backbones.vit import Vit
from moecore.nn.experts.eigen import Eigen
from moecore.nn.layers.moe import MoESettings
from moecore.nn.routers.noisy_top_k import NoisyTopK
from moecore.tasks.classification import Classification
from moecore.testing.check_helpers import draw_weights, seeded_randn

SIDE = 8  # pixels
EXPERTS = 4
CLASSES = Classification(classes=("a", "b", "c", "d"))
IMAGE = ImageSpec(channels=1, size=SIDE, mean=(0.5,), std=(0.3,), task=CLASSES)


def small_vit(image: ImageSpec = IMAGE, moe: MoESettings | None = None) -> PatchTransformer:
    """A ViT of two blocks in evaluation mode; moe: of both, None for experts that have bases."""
    if moe is None:
        router = NoisyTopK(start="orthonormal")
        moe = MoESettings(router=router, experts=Eigen(number=EXPERTS), blocks="all")
    with torch.random.fork_rng(devices=[]):
        model = Vit(patch=4, width=16, depth=2, heads=2).build(image, moe).eval()
    draw_weights(model, std=0.3)
    return model


def small_objective_inputs(model: PatchTransformer, progress: float = 0.0) -> ObjectiveInputs:
    """Return one step as objectives see it: two views of three images, a teacher's routing."""
    images = seeded_randn(6, model.image.stored_channels, SIDE, SIDE).sigmoid()
    labels = torch.arange(6) % len(CLASSES.classes)
    tokens = 1 + (SIDE // 4) ** 2
    experts = model.experts_and_router.experts.choices
    batch = Batch(
        images,
        labels,
        torch.eye(3).expand(6, 3, 3),
        views=2,
        belongs=torch.arange(6 * tokens).view(6, tokens) % experts,
    )
    probs = tuple(
        (2 * seeded_randn(6, tokens, experts, seed=seed)).softmax(dim=-1).requires_grad_()
        for seed in range(2)
    )
    guidance = Guidance(seeded_randn(6, len(CLASSES.classes)), probs)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        output = model.train()(images, guidance, progress)
    return ObjectiveInputs(batch, output, model.eval(), guidance, progress)


def small_data() -> Prepared:
    """Images of noise in memory, 24 of each split, with what a data card says of images."""
    card = {"name": "noise", "task": CLASSES.model_dump(mode="json")}
    card |= {"channels": 1, "size": SIDE, "mean": IMAGE.mean, "std": IMAGE.std}
    return Prepared(card, _noise_split(0), _noise_split(1), _noise_split(2))


def _noise_split(seed: int) -> Split:
    pixels = np.random.default_rng(seed).integers(0, 256, (24, 1, SIDE, SIDE), dtype=np.uint8)
    return Split(pixels, np.arange(24) % len(CLASSES.classes))
