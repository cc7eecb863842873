"""How fast a trained model's logits can change, and Lemma 1 of Puigcerver et al. (2022)."""

import torch
from pydantic import Field

from moecore.core.config import Config
from moecore.data.prepared import evenly_spaced_indices
from moecore.measure.base import (
    SEED,
    Estimate,
    MeasuredModel,
    Measurement,
    PartStore,
    load_or_compute,
    no_changed_images_reason,
)
from moecore.measure.theory.lipschitz_lemma import (
    LemmaPoints,
    LemmaResult,
    LemmaSummary,
    evaluate_lemma,
)
from moecore.measure.theory.output_lipschitz_slopes import LipschitzSlopes, slopes_at
from moecore.statistics.intervals import wilson

BATCH = 50  # images a forward pass
RADIUS = 0.5  # of the ℓ2 ball around an image, with pixels in [0, 1], in which the ascent looks
STEPS = 10  # gradient steps of the ascent, from each of two starts
HALVINGS = 10  # how often the steepest pair is halved: to 1 / 2¹⁰ apart at most


class Lipschitz(Measurement):
    """Which test images and tokens are measured, and how far from an image the ascent looks."""

    images: int = Field(
        100, ge=1, description="Test images, evenly spread; the same for every method."
    )
    lemma_tokens: int = Field(
        64, ge=1, description="Their tokens at which Lemma 1 is evaluated in each MoE layer."
    )

    @classmethod
    def applies(cls, subject: MeasuredModel) -> str | None:
        """Why not, in words: it needs flat images of one class each, whose margins can change."""
        return no_changed_images_reason(subject, "decision")

    def measure(self, subject: MeasuredModel, parts: PartStore) -> "Result":
        """The slopes at images of the test split, and the lemma at their tokens."""
        test = subject.data.test
        where = evenly_spaced_indices(len(test.labels), self.images)
        images = test.images[where]
        labels = torch.from_numpy(test.labels[where])

        def estimates() -> SlopeEstimates:
            return summarize_slopes(
                slopes_at(subject.model, images, labels, BATCH, RADIUS, STEPS, HALVINGS)
            )

        def tokens() -> LemmaResult:
            chosen = (self.lemma_tokens, BATCH, SEED)
            return evaluate_lemma(subject.model, images, *chosen, subject.device)

        slopes = load_or_compute(parts, "slopes", SlopeEstimates, estimates)
        lemma1 = load_or_compute(parts, "lemma", LemmaResult, tokens)
        return Result(images=len(labels), **slopes.model_dump(), **lemma1.model_dump())


class SlopeEstimates(Config):
    """Slopes in ℓ2, logits over pixels in [0, 1]; theory/slopes.py says what each of them is."""

    local_mean: Estimate
    margin_mean: Estimate
    lower_bound: float
    lower_bound_mean: Estimate
    at_boundary: Estimate  # share of images whose steepest pair chooses different experts
    jump_max: float


class Result(SlopeEstimates):
    """The slopes, and Lemma 1 over all MoE layers and at each token."""

    images: int
    lemma1: LemmaSummary
    lemma_terms: tuple[LemmaPoints, ...] = ()


def summarize_slopes(slopes: LipschitzSlopes) -> SlopeEstimates:
    """Means with intervals and maxima over images."""
    crossed = int(slopes.crossed.sum())
    return SlopeEstimates(
        local_mean=Estimate.of_mean(slopes.local, is_share=False),
        margin_mean=Estimate.of_mean(slopes.margin, is_share=False),
        lower_bound=float(slopes.lower_bound.max()),
        lower_bound_mean=Estimate.of_mean(slopes.lower_bound, is_share=False),
        at_boundary=Estimate.of(wilson(crossed, len(slopes.crossed))),
        jump_max=float(slopes.jump.max()),
    )
