"""Lipschitz estimates of a trained model's logits, and Lemma 1 of Puigcerver et al. (2022)."""

from functools import partial

import torch
from pydantic import Field

from moecore.data.prepared import evenly_spaced_indices
from moecore.measure.base import SEED, MeasuredModel, Measurement
from moecore.measure.theory.output_lipschitz_slopes import LipschitzSlopes, put_lemma, slopes_at
from moecore.measure.values import Metric, OnPage, Values
from moecore.statistics.intervals import bootstrap_mean, wilson

BATCH = 50  # images per forward pass
RADIUS = 0.5  # of the ℓ2 ball around an image that the ascent searches, with pixels in [0, 1]
STEPS = 10  # gradient steps of the ascent, from each of two starts
HALVINGS = 10  # of the steepest pair: at the end its distance is at most 2 · RADIUS / 2¹⁰
METRICS = {  # slopes in ℓ2, logits over pixels in [0, 1]: see theory/output_lipschitz_slopes.py
    "lipschitz_local_mean": Metric(
        "Local Lipschitz",
        "lower",
        note="spectral norm of the gradient image → logits, mean over images",
    ),
    "lipschitz_margin_mean": Metric(
        "Slope of the margin",
        "lower",
        note="rate at which an ℓ∞ attack can change the margin between two classes, mean over "
        "images",
    ),
    "lipschitz_lower_bound_mean": Metric(
        "Lipschitz, at least",
        "lower",
        note="slope of the steepest pair of images found around an image; mean over images",
    ),
    "lipschitz_lower_bound": Metric(
        "Lipschitz, at least (largest)", "lower", note="over all images"
    ),
    # share of images whose steepest pair chooses different experts
    "at_boundary": Metric("", form="share"),
    "jump_max": Metric(""),
    "lemma1_router_share": Metric(
        "Lemma 1, router",
        form="share",
        note="share of the bound that is the router's term, mean over layers",
        detail=True,
    ),
    "lemma1_violations": Metric(
        "Lemma 1, violated", form="count", note="tokens; none is expected", detail=True
    ),
}
METRICS = {name: metric._replace(paper="adversarial") for name, metric in METRICS.items()}


class Lipschitz(Measurement):
    """Slopes of the logits at test images, and Lemma 1 at their tokens."""

    flat_classes = True
    classes_for = "decision"
    changes_images = True
    metrics = METRICS
    page = OnPage("a Lipschitz estimate", place=13)

    images: int = Field(
        100, ge=1, description="Test images, evenly spread; the same for every method."
    )
    lemma_tokens: int = Field(
        64, ge=1, description="Tokens of these images at which Lemma 1 is evaluated, per MoE layer."
    )

    def measure(self, subject: MeasuredModel, out: Values) -> None:
        """Put slopes of the logits at test images, and Lemma 1 at their tokens."""
        model = subject.model
        test = subject.data.test
        indices = evenly_spaced_indices(len(test.labels), self.images)
        images = test.images[indices]
        labels = torch.from_numpy(test.labels[indices])

        def compute_slopes(part: Values) -> None:
            put_slopes(slopes_at(model, images, labels, BATCH, RADIUS, STEPS, HALVINGS), part)

        out.piece("slopes", compute_slopes)
        lemma = (subject, images, self.lemma_tokens, BATCH, SEED)
        out.piece("lemma", partial(put_lemma, *lemma))


def put_slopes(slopes: LipschitzSlopes, out: Values) -> None:
    """Put means over images with intervals, maxima, and the share ``at_boundary``."""
    for name, values in (
        ("local_mean", slopes.local),
        ("margin_mean", slopes.margin),
        ("lower_bound_mean", slopes.lower_bound),
    ):
        out.put(f"lipschitz_{name}", bootstrap_mean(values.double().numpy()))
    out.put("lipschitz_lower_bound", float(slopes.lower_bound.max()))
    out.put("at_boundary", wilson(int(slopes.crossed.sum()), len(slopes.crossed)))
    out.put("jump_max", float(slopes.jump.max()))
