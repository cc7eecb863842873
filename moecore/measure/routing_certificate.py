"""Certified radii of the first MoE layer's routing: pixel changes that change no token's experts.

A radius is a token's margin between chosen and other experts over a bound of the margin's change
(``moecore.nn.deviation_bounds``). Rounding: bounds are computed in fp64, from derivatives in fp32
with an allowance; radii are shortened by SHORTENING; of every margin ROUNDING_GUARD times the
largest difference of fp32 and fp64 logits is kept.
"""

from collections.abc import Iterable
from functools import partial
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from moecore.attacks.base import Ball, unsqueeze_like
from moecore.core.routing_records import choice_margin
from moecore.data.prepared import evenly_spaced_indices
from moecore.measure.base import SEED, MeasuredModel, Measurement
from moecore.measure.routing_metrics.interventions import list_routers
from moecore.measure.values import Chart, Metric, OnPage, Place, Values
from moecore.nn import deviation_bounds
from moecore.nn.backbones.base_model import Model
from moecore.nn.backbones.patch_transformer_base import PatchTransformer
from moecore.nn.layers.lipschitz_lemma import ROUTERS_WITH_LEMMA, frozen_double_copy
from moecore.nn.predict import image_batches, model_device

BALL_SIZES_PER_NORM = 31  # from 1e-9 of the pixels' range to all of it; each twice the last
PIXELS_PER_PASS = 4608  # pixels, times channels, per pass
SHORTENING = 1e-6
ROUNDING_GUARD = 16
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
        (1e-7, 1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 1e-3),
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
        if router.kind not in (*ROUTERS_WITH_LEMMA, "cosine"):
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
        out.piece("radii", partial(self.put_radii, subject.model, np.array(test.images[indices])))

    def put_radii(self, model: Model, images: np.ndarray, out: Values) -> None:
        violations = 0
        for norm, radii in certified_radii(model, images).items():
            out.put("routing_radius", radii.mean(dim=1), norm=norm)
            for epsilon in self.epsilons:
                share = (radii >= epsilon).double().mean(dim=1)
                out.put("certified_tokens", share, **{norm: float(np.log10(epsilon))})
            tokens = radii.nonzero()
            tokens = tokens[evenly_spaced_indices(len(tokens), self.attacked)]
            if len(tokens):
                changed = attack_tokens(model, images, tokens, radii, norm, self.steps)
                violations += int(changed.sum())
        out.put("routing_violations", float(violations))


@torch.no_grad()
def certified_radii(model: Model, images: np.ndarray) -> dict[str, Tensor]:
    """Return norm → each token's radius (N, T), fp64, on the CPU; 0 where nothing is certified."""
    exact: Any = frozen_double_copy(model)
    device = model_device(model)
    radii: list[Tensor] = []  # (2, B, T), of both norms
    linf = torch.logspace(-9, 0, BALL_SIZES_PER_NORM, dtype=torch.float64, device=device)
    balls = linf, linf * images[0].size ** 0.5  # the largest balls have the pixels' range
    with torch.autocast(device.type, enabled=False):
        for stored in image_batches(images, max(1, PIXELS_PER_PASS // images[0].size), device):
            pixels = exact.seen_channels(stored)
            record, exact_record = model.routing_of(pixels)[0], exact.routing_of(pixels.double())[0]
            guard = ROUNDING_GUARD * float((record.logits - exact_record.logits).abs().amax())
            at = deviation_bounds.deviation_of_pixels(pixels.double(), *balls)
            shares = deviation_bounds.certify_radius_shares(exact, at, record.chosen, guard)
            proven = shares.nan_to_num(0, posinf=1).clamp(0, 1) * torch.cat(balls)[:, None, None]
            parts = [part.amax(dim=0) for part in proven.split([len(sizes) for sizes in balls])]
            if not radii:
                balls = select_ball_sizes(balls[0], parts[0]), select_ball_sizes(balls[1], parts[1])
            radii.append(torch.stack(parts).cpu() * (1 - SHORTENING))
    return dict(zip(NORMS, torch.cat(radii, dim=1), strict=True))


def select_ball_sizes(sizes: Tensor, radii: Tensor) -> Tensor:
    """Return ``sizes``, radii to try, from median / 16 to 4 · maximum of certified radii > 0."""
    proven = radii[radii > 0]
    if len(proven):
        sizes = sizes[(sizes > proven.median() / 16) & (sizes < proven.amax() * 4)]
    return sizes


def attack_tokens(
    model: Model, images: np.ndarray, tokens: Tensor, radii: Tensor, norm: Any, steps: int
) -> Tensor:
    """Return whether an attack within a token's radius changes its experts, (n,) bool."""
    # tokens: (n, 2), image and position; radii: (N, T). PGD on each token's margin, in fp64.
    exact: Any = frozen_double_copy(model)
    few = images[tokens[:, 0].numpy()]
    stored = next(image_batches(few, len(few), model_device(model)))
    pixels = exact.seen_channels(stored).double()
    radius = radii[tokens[:, 0], tokens[:, 1]].to(pixels).view(-1, 1, 1, 1)
    rows = torch.arange(len(tokens)), tokens[:, 1]
    ball = Ball(pixels, 1.0, norm)
    clean = exact.routing_of(pixels)[0].chosen[rows]
    changed = torch.zeros_like(clean[:, 0])
    change = torch.zeros_like(pixels)
    direction = torch.randn(pixels.shape, generator=torch.Generator().manual_seed(SEED)).to(pixels)
    for step in range(steps + 1):
        size = radius if step == 0 else 2.5 / steps * radius
        change = change + size * ball.direction(direction)
        if norm == "linf":
            change = change.clamp(-radius, radius)
        else:
            change = change * (radius / unsqueeze_like(ball.lengths(change), change)).clamp(max=1)
        with torch.enable_grad():
            leaf = (pixels + change).clamp(0, 1).requires_grad_(True)
            record = exact.routing_of(leaf)[0]
            margins = choice_margin(record.logits[rows], clean)
            (direction,) = torch.autograd.grad(-margins.sum(), leaf)
        changed |= (record.chosen[rows] != clean).any(dim=1)
    return changed.cpu()
