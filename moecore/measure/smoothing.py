"""Randomised smoothing (Cohen et al. 2019): certified accuracy with free and with fixed routes.

The smoothed model answers with the class that most noisy copies of an image get. Its answer is
certified within σ · Φ⁻¹(p) in ℓ2, p a lower limit of that class's probability at confidence 1 − α;
with p ≤ 1/2 it abstains. With fixed routes the clean image decides the experts of all its copies:
that certificate holds against changes of the image that cannot change its routes.
"""

from contextlib import ExitStack
from functools import partial
from typing import Annotated, Self

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from moecore.attacks.base import seed_generator_per_image
from moecore.core.files import format_found_and_allowed
from moecore.data.prepared import Split, evenly_spaced_indices
from moecore.measure.base import SEED, MeasuredModel, Measurement
from moecore.measure.routing_metrics.interventions import bar_experts, why_no_expert_can_be_barred
from moecore.measure.values import Chart, Metric, OnPage, Values
from moecore.nn.backbones.base_model import Model
from moecore.nn.predict import coupled_image_count, image_batches, model_device

BATCH = 250  # draws per forward pass, half of the default; draws depend on it
ROUTES = ("free", "fixed")
Radius = Annotated[float, Field(ge=0, allow_inf_nan=False)]
METRICS = {
    "smoothed_radius": Metric(
        "Smoothed radius, {} routes",
        "higher",
        note="certified ℓ2 radius under randomised smoothing, 0 if wrong or abstaining; mean over "
        "images",
        over="routes",
        items="exact",
    ),
    "abstained": Metric(
        "Abstained, {} routes",
        "lower",
        "share",
        note="images for which the smoothed model gives no answer",
        over="routes",
        items="hits",
        detail=True,
    ),
    "certified_accuracy": Metric("", form="share"),  # over radii with each kind of routes
}


class Smoothing(Measurement):
    """Certified accuracy of the model smoothed by Gaussian noise on the pixels."""

    flat_classes = True
    classes_for = "one_class"
    metrics = METRICS
    page = OnPage(
        "randomised smoothing",
        place=13,
        heading="Randomised smoothing",
        charts=tuple(
            Chart(
                "certified_accuracy",
                routes,
                title=f"Certified accuracy, {routes} routes",
                x="ℓ2 radius",
                y="Certified accuracy",
                words="Images that are right for every change up to the radius.",
                share=True,
                top=1.02,
            )
            for routes in ROUTES
        ),
    )

    images: int = Field(100, ge=1, description="Test images, evenly spread.")
    sigma: float = Field(0.25, gt=0, le=2, description="σ of the noise, of pixels in [0, 1].")
    guesses: int = Field(100, ge=1, description="Draws per image that choose its class (n₀).")
    draws: int = Field(400, ge=1, description="Draws per image that certify this class (n).")
    alpha: float = Field(0.001, gt=0, lt=0.5, description="Probability of a wrong certificate (α).")
    radii: tuple[Radius, ...] = Field(
        (0.0, 0.125, 0.25, 0.375, 0.5),
        min_length=1,
        description="ℓ2 radii of the curve, of pixels in [0, 1].",
    )

    @model_validator(mode="after")
    def _can_certify(self) -> Self:
        if self.alpha ** (1 / self.draws) <= 1 / 2:  # the limit if all draws agree
            needed = f"{int(-np.log2(self.alpha)) + 1} or more for alpha: {self.alpha:g}"
            raise ValueError(format_found_and_allowed(found=f"draws: {self.draws}", allowed=needed))
        return self

    @classmethod
    def model_refusal(cls, model: Model) -> str | None:
        """Return a reason if an image's prediction depends on other images, else None."""
        if coupled_image_count(model) > 1:
            return "experts have a capacity, so that one draw's prediction depends on others"
        return None

    def places(self) -> dict[str, tuple[str, ...]]:
        """Return "routes" → free and fixed."""
        return {"routes": ROUTES}

    def measure(self, subject: MeasuredModel, out: Values) -> None:
        """Put radius, abstentions, accuracy with copies routed freely, then as the clean image."""
        test = subject.data.test
        indices = evenly_spaced_indices(len(test.labels), self.images)
        few = Split(test.images[indices], test.labels[indices], test.people_at(indices))
        out.people = few.people
        out.piece("free", partial(self.put_certificates, subject.model, few, "free"))
        if reason := why_no_expert_can_be_barred(subject.model):
            out.skipped.append(f"fixed routes: {reason}")
        else:
            out.piece("fixed", partial(self.put_certificates, subject.model, few, "fixed"))

    def put_certificates(self, model: Model, images: Split, routes: str, out: Values) -> None:
        pictures = image_batches(images.images, 1, model_device(model))
        generators = seed_generator_per_image(SEED, range(len(images.labels)))
        pairs = zip(pictures, generators, strict=True)
        is_fixed = routes == "fixed"
        counts = np.array([self.count_copies_per_class(model, *pair, is_fixed) for pair in pairs])
        classes = counts[:, 0].argmax(axis=1)
        votes = counts[np.arange(len(classes)), 1, classes]
        radii = smoothing_radius(votes, self.draws, self.sigma, self.alpha)
        abstains = radii < 0
        right = (classes == np.array(images.labels)) & ~abstains
        out.put("smoothed_radius", np.where(right, radii, 0.0), routes=routes)
        out.put("abstained", abstains.astype(float), routes=routes)
        for radius in self.radii:
            is_certified = right & (radii >= radius)
            out.put("certified_accuracy", is_certified.astype(float), **{routes: radius})

    def count_copies_per_class(
        self, model: Model, image: Tensor, generator: torch.Generator, is_fixed: bool
    ) -> np.ndarray:
        """Count noisy copies (guesses, draws) by class, (2, K) int64; is_fixed: image's routes."""
        # Row 0: of the draws that choose the class; row 1: of the draws that certify it.
        channels, numbers = model.image.channels, (self.guesses, self.draws)
        predicted = []
        with ExitStack() as stack, torch.inference_mode():
            stack.enter_context(torch.autocast(image.device.type, enabled=False))
            if is_fixed:
                barred = [~record.chosen for record in model.routing_of(image)]
                stack.enter_context(bar_experts(model, barred))
            for start in range(0, sum(numbers), BATCH):
                copies = image.repeat(min(BATCH, sum(numbers) - start), 1, 1, 1)
                noise = torch.randn(copies[:, :channels].shape, generator=generator)
                copies[:, :channels] += self.sigma * noise.to(image)
                predicted.append(model(copies).prediction.argmax(dim=1).cpu())
        parts = torch.cat(predicted).split(numbers)
        return np.stack([torch.bincount(part, minlength=model.image.outputs) for part in parts])


def smoothing_radius(votes: np.ndarray, draws: int, sigma: float, alpha: float) -> np.ndarray:
    """Return σ · Φ⁻¹ of Clopper and Pearson's lower limit of votes / draws; −1 to abstain."""
    # ``Certify`` of Cohen et al. (2019): alpha is the one-sided error of the limit
    import scipy

    lowest = scipy.stats.beta.ppf(alpha, votes, draws - votes + 1)  # NaN without votes
    return np.where(lowest > 1 / 2, sigma * scipy.special.ndtri(lowest), -1.0)
