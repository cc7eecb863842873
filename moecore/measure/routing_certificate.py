"""Certified radii of the first MoE layer's routing: pixel changes that change no token's experts.

A radius is a token's margin between chosen and other experts over a bound of the margin's change
(``moecore.nn.deviation_bounds``). Rounding: bounds are computed in fp64 and radii are shortened by
SHORTENING; of every margin GUARD times the largest difference of fp32 and fp64 logits is kept.
"""

from collections.abc import Iterable
from functools import partial
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from moecore.data.prepared import evenly_spaced_indices
from moecore.measure.base import SEED, MeasuredModel, Measurement
from moecore.measure.routing_metrics.alternative_choices import list_routers
from moecore.measure.values import Chart, Metric, OnPage, Place, Values
from moecore.nn.backbones.base_model import Model
from moecore.nn.backbones.patch_transformer_base import PatchTransformer
from moecore.nn.deviation_bounds import Deviation, routing_shares
from moecore.nn.layers.lipschitz_lemma import DEFINED, frozen_double_copy
from moecore.nn.predict import image_batches, model_device

BATCH = 25  # images per pass; several balls are bounded at once
SMALLEST_BALL = 1e-9  # of the largest; bounds in it are as good as linear
BALLS = 8  # per image, from half the smallest radius of its tokens to the largest
SHORTENING = 1e-6
GUARD = 16
NORMS = {"linf": "ℓ∞", "l2": "ℓ2"}
Epsilon = Annotated[float, Field(gt=0, allow_inf_nan=False)]
METRICS = {
    "routing_radius": Metric(
        "Routing radius, {}",
        "higher",
        note="change of the pixels up to which a token provably keeps its experts in the first MoE "
        "layer, mean over tokens",
        over="norm",
        items="exact",
    ),
    "routing_violations": Metric(
        "Routing radii, violated",
        form="count",
        note="tokens that an attack inside of their radius gives other experts; none is expected",
        detail=True,
    ),
    "certified_tokens": Metric("", form="share"),  # over radii of each norm
}


class RoutingCertificate(Measurement):
    """Radii around images within which no change of the pixels changes a token's experts."""

    no_dense = "the model has no routers"
    metrics = METRICS
    page = OnPage(
        "certified routing",
        place=13,
        heading="Certified routing",
        charts=tuple(
            Chart(
                "certified_tokens",
                norm,
                title=f"Tokens that provably keep their experts, {sign}",
                x=f"log₁₀ of the {sign} radius",
                y="Certified tokens",
                words="A lower bound.",
                share=True,
            )
            for norm, sign in NORMS.items()
        ),
    )

    images: int = Field(
        100, ge=1, description="Test images, evenly spread; the same for every method."
    )
    epsilons: tuple[Epsilon, ...] = Field(
        (1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2),
        min_length=1,
        description="Radii, of pixels in [0, 1], at which certified tokens are counted.",
    )
    attacked: int = Field(64, ge=1, le=1024, description="Tokens per norm that an attack checks.")
    steps: int = Field(20, ge=1, description="Steps of this attack on a router's margin.")

    @classmethod
    def model_refusal(cls, model: Model) -> str | None:
        if model.moe is None:
            return cls.no_dense
        router = model.moe.router
        if router.kind == "told" or getattr(router, "by", None) == "position":
            return f"router {router.kind}: no change of the pixels can change its choice"
        if router.kind not in (*DEFINED, "cosine"):
            return f"router {router.kind}: it does not choose by logits that are bounded here"
        if getattr(model.config, "kind", None) != "vit" or not isinstance(model, PatchTransformer):
            return "bounds are derived for the backbone vit alone"
        if model.config.activation != "gelu":
            return f"activation {model.config.activation}: bounds are derived for gelu alone"
        if not all(part.config.chooses_by_logits for part in list_routers(model)):
            return "a balance, or groups of experts, shifts the choice, which is not bounded here"
        return None

    @classmethod
    def place_words(cls, place: Place) -> str:
        return NORMS.get(str(place), str(place))

    def places(self) -> dict[str, Iterable[Place]]:
        return {"norm": list(NORMS)}

    def measure(self, subject: MeasuredModel, out: Values) -> None:
        test = subject.data.test
        indices = evenly_spaced_indices(len(test.images), self.images)
        out.people = test.people_at(indices)
        images = np.array(test.images[indices])
        for norm in NORMS:
            out.piece(norm, partial(self.put_radii, subject.model, images, norm))
        counts = out.found().curve("routing_violations", "norm").values()
        out.put("routing_violations", float(sum(counts)))

    def put_radii(self, model: Model, images: np.ndarray, norm: str, out: Values) -> None:
        radii = certified_radii(model, images, norm)
        out.put("routing_radius", radii.mean(dim=1), norm=norm)
        for epsilon in self.epsilons:
            share = (radii >= epsilon).double().mean(dim=1)
            out.put("certified_tokens", share, **{norm: float(np.log10(epsilon))})
        tokens = radii.nonzero()
        tokens = tokens[evenly_spaced_indices(len(tokens), self.attacked)]
        if len(tokens):
            changed = attack_tokens(model, images, tokens, radii, norm, self.steps)
            out.put("routing_violations", float(changed.sum()), norm=norm)


@torch.no_grad()
def certified_radii(model: Model, images: np.ndarray, norm: str) -> Tensor:
    """Return each token's radius (N, T), fp64, on the CPU; 0 where nothing is certified."""
    exact: Any = frozen_double_copy(model)
    device = model_device(model)
    radii = []
    with torch.autocast(device.type, enabled=False):
        for stored in image_batches(images, BATCH, device):
            pixels = exact.seen_channels(stored)
            record, exact_record = model.routing_of(pixels)[0], exact.routing_of(pixels.double())[0]
            guard = GUARD * float((record.logits - exact_record.logits).abs().amax())
            shares = partial(routing_shares, exact, chosen=record.chosen, guard=guard)
            radii.append(_search_radii(shares, pixels.double(), norm).cpu())
    return torch.cat(radii)


def _search_radii(shares: partial[Tensor], pixels: Tensor, norm: str) -> Tensor:
    """Return proven radii (B, T) from balls of about the radii that a tiny ball suggests."""
    diameter = pixels[0].numel() ** 0.5 if norm == "l2" else 1.0  # of the pixels' range

    def read(balls: Tensor) -> tuple[Tensor, Tensor]:
        edge = balls[..., None, None, None]
        length = edge if norm == "l2" else edge * pixels[0].numel() ** 0.5
        at = Deviation(pixels, edge.expand(*balls.shape, *pixels.shape[1:]), length)
        return balls[..., None], shares(at).nan_to_num(0, posinf=torch.inf).clamp_min(0)

    # Bounds grow faster than the ball, so no ball proves a larger radius than a tiny one suggests.
    ball, share = read(pixels.new_full((1, len(pixels)), SMALLEST_BALL * diameter))
    limits = (ball * share)[0].clamp(max=diameter)
    highest = limits.amax(dim=1)
    lowest = limits.where(limits > 0, highest[:, None]).amin(dim=1) / 2
    power = torch.linspace(0, 1, BALLS).to(pixels)[:, None]
    ball, share = read(highest ** (1 - power) * lowest**power)
    return (ball * share.clamp(max=1)).amax(dim=0) * (1 - SHORTENING)


def attack_tokens(
    model: Model, images: np.ndarray, tokens: Tensor, radii: Tensor, norm: str, steps: int
) -> Tensor:
    """Return whether an attack within their radii gives tokens other experts, (n,) bool."""
    # tokens: (n, 2), image and position; radii: (N, T). PGD on each token's margin, in fp64.
    exact: Any = frozen_double_copy(model)
    few = images[tokens[:, 0].numpy()]
    stored = next(image_batches(few, len(few), model_device(model)))
    pixels = exact.seen_channels(stored).double()
    radius = radii[tokens[:, 0], tokens[:, 1]].to(pixels).view(-1, 1, 1, 1)
    rows = torch.arange(len(tokens)), tokens[:, 1]
    lengths = lambda values: values.flatten(1).norm(dim=1).clamp_min(1e-300).view(-1, 1, 1, 1)
    clean = exact.routing_of(pixels)[0].chosen[rows]
    changed = torch.zeros_like(clean[:, 0])
    change = torch.zeros_like(pixels)
    direction = torch.randn(pixels.shape, generator=torch.Generator().manual_seed(SEED)).to(pixels)
    for step in range(steps + 1):
        size = radius if step == 0 else 2.5 / steps * radius
        if norm == "linf":
            change = (change + size * direction.sign()).clamp(-radius, radius)
        else:
            change = change + size * direction / lengths(direction)
            change = change * (radius / lengths(change)).clamp(max=1)
        with torch.enable_grad():
            leaf = (pixels + change).clamp(0, 1).requires_grad_(True)
            record = exact.routing_of(leaf)[0]
            logits = record.logits[rows]
            weakest = logits.masked_fill(~clean, torch.inf).amin(dim=1)
            rival = logits.masked_fill(clean, -torch.inf).amax(dim=1)
            (direction,) = torch.autograd.grad((rival - weakest).sum(), leaf)
        changed |= (record.chosen[rows] != clean).any(dim=1)
    return changed.cpu()
