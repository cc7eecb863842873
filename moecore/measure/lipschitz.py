"""Estimate Lipschitz constants of a model's logits; check Lemma 1 (Puigcerver et al. 2022)."""

from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from moecore.core.streams import derived_seed
from moecore.data.prepared import evenly_spaced_indices
from moecore.measure.base import SEED, MeasuredModel, Measurement
from moecore.measure.values import Metric, OnPage, Values
from moecore.nn.backbones.base_model import BackboneModel, EncodeOptions, Model
from moecore.nn.layers import lipschitz_lemma, moe
from moecore.nn.layers.lipschitz_lemma import LemmaTerms
from moecore.nn.predict import ImageSequence, eval_mode, image_batches, model_device
from moecore.statistics.intervals import bootstrap_mean, wilson

BATCH = 50  # images per forward pass
RADIUS = 0.5  # of the ℓ2 ball around an image that the ascent searches, with pixels in [0, 1]
STEPS = 10  # gradient steps of the ascent, from each of two starts
HALVINGS = 10  # of the steepest pair: at the end its distance is at most 2 · RADIUS / 2¹⁰
METRICS = {  # slopes in ℓ2, logits over pixels in [0, 1]: see ``LipschitzSlopes``
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
    "lipschitz_lower_bound": Metric("Lipschitz, at least (largest)", "lower", note="of all images"),
    # share of images whose steepest pair chooses different experts
    "at_boundary": Metric("", form="share"),
    "jump_max": Metric(""),
    "lemma1_router_share": Metric(
        "Lemma 1, router",
        form="share",
        note="share of the bound that is the router's term, mean over layers",
        detail=True,
    ),
    "lemma1_violations": Metric("Lemma 1, violated", form="count", note="expected: 0", detail=True),
}
METRICS = {name: metric._replace(paper="adversarial") for name, metric in METRICS.items()}
MIN_DISTANCE = 1e-3  # of a pair, relative to the radius; closer pairs do not count


def put_lemma(
    subject: MeasuredModel, images: np.ndarray, tokens: int, batch: int, seed: int, out: Values
) -> None:
    if reason := why_lemma_undefined(subject.model):
        out.facts["lemma_reason"] = reason
        return
    terms = lemma_terms_by_layer(subject.model, images, tokens, batch, seed, subject.device)
    shares = [float((layer.router / layer.bound).nan_to_num().mean()) for layer in terms]
    # a violation would be an error of the code
    out.put("lemma1_violations", sum(int(layer.violated.sum()) for layer in terms))
    out.put("lemma1_router_share", sum(shares) / len(shares))
    names = ("bound", "jacobian", "router")
    out.facts["lemma_terms"] = [{name: getattr(layer, name) for name in names} for layer in terms]


def why_lemma_undefined(model: Model) -> str | None:
    if model.moe is None:
        return "dense: there is no router and there are no experts"
    score = getattr(model.moe.router, "score", "softmax")
    if score != "softmax":
        return f"router {model.moe.router.kind}: its score is {score}, no softmax"
    if model.moe.experts.networks != model.moe.experts.choices:
        return "experts.zero_computation: some experts are no networks"
    if "previous" in model.moe.router.wants:
        return f"router {model.moe.router.kind}: its logits also depend on the layer before"
    return lipschitz_lemma.why_lemma_fails(model.moe.router.kind)


def lemma_terms_by_layer(
    model: Model, images: np.ndarray, tokens: int, batch: int, seed: int, device: str
) -> list[LemmaTerms]:
    layers = [module for module in model.modules() if isinstance(module, moe.MoEFeedForward)]
    inputs = sample_layer_inputs(model, images, tokens, batch, seed, device)
    return [
        LemmaTerms(*(term.cpu() for term in lipschitz_lemma.lemma_1_terms(layer, tokens)))
        for layer, tokens in zip(layers, inputs, strict=True)
    ]


def sample_layer_inputs(
    model: Model, images: np.ndarray, tokens: int, batch: int, seed: int, device: str
) -> list[Tensor]:
    """Return ``tokens`` random inputs (n, d) per MoE layer, the same positions for any method."""
    if not isinstance(model, BackboneModel):
        raise TypeError("layer_tokens: a guided model has no encoding block by block")
    blocks = model.experts_and_router.indices(model.depth)
    no_autocast = torch.autocast(torch.device(device).type, enabled=False)
    with eval_mode(model), torch.no_grad(), no_autocast:
        encoded = [
            model.encode(pixels, EncodeOptions("mlp_input", blocks)).features
            for pixels in image_batches(images, batch, device)
        ]
    samples = []
    for layer in zip(*encoded, strict=True):
        layer_inputs = torch.cat(layer).flatten(0, 1)
        # Layers with equally many tokens get the same positions.
        generator = np.random.default_rng(derived_seed("measured_tokens", seed))
        places = np.sort(generator.permutation(len(layer_inputs))[:tokens])
        samples.append(layer_inputs[torch.from_numpy(places).to(layer_inputs.device)])
    return samples


class LipschitzSlopes(NamedTuple):
    """Slopes (N,) over pixels in [0, 1]: at images, of margins, of the steepest pair; its jump."""

    # ‖J‖₂ of image → logits, the Lipschitz constant in ℓ2 in an arbitrarily small neighbourhood
    # without a change of routing
    local: Tensor
    # max over classes c ≠ label y of ‖∇(z_y − z_c)‖₁: how fast an ℓ∞ attack can change a margin
    margin: Tensor
    # ‖f(a) − f(b)‖₂ / ‖a − b‖₂ of the steepest pair that the ascent visits, after repeated halving;
    # a lower bound of the Lipschitz constant on the ball
    lower_bound: Tensor
    # the ends of the halved pair choose different experts: no limit as they approach
    crossed: Tensor
    jump: Tensor  # ‖f(a) − f(b)‖₂ of the halved pair if crossed, else 0


class ImagePairSlope(NamedTuple):
    first: Tensor  # a, (B, C, H, W)
    second: Tensor  # b, (B, C, H, W)
    ratio: Tensor  # (B,), ‖f(a) − f(b)‖₂ / ‖a − b‖₂


def find_slopes(
    model: Model,
    images: ImageSequence,  # (N, C, H, W)
    labels: Tensor,
    batch: int,
    radius: float,  # of the ℓ2 ball around an image, intersected with [0, 1]
    steps: int,  # of the ascent
    halvings: int,  # of its best pair, to a distance of at most 2·radius/2^halvings
) -> LipschitzSlopes:
    exact = lipschitz_lemma.frozen_double_copy(model)
    device = model_device(exact)
    chunks = []
    with eval_mode(exact), torch.autocast(device.type, enabled=False):
        batches = image_batches(images, batch, device)
        for pixels, targets in zip(batches, labels.split(batch), strict=True):
            pixels = pixels.double()
            jacobians = lipschitz_lemma.row_jacobians(lambda rows: exact(rows).prediction, pixels)
            local, direction = top_singular_pair(jacobians)
            best = find_steepest_pair(exact, pixels, direction.view_as(pixels), radius, steps)
            pair, crossed, jump = bisect_steepest(exact, best, halvings)
            margin = margin_slope(jacobians, targets.to(pixels.device))
            chunks.append((local, margin, pair.ratio, crossed, jump))
    return LipschitzSlopes(*(torch.cat(field).cpu() for field in zip(*chunks, strict=True)))


def top_singular_pair(jacobians: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest singular value (B,) of Jacobians (B, K, P), and its direction (B, P)."""
    # Right singular vectors of length 1 (0 if the value is 0), by JJᵀ, as K is far below P.
    values, vectors = torch.linalg.eigh(jacobians @ jacobians.transpose(1, 2))
    largest = values[:, -1].clamp_min(0).sqrt()
    return largest, _unit_rows((jacobians.transpose(1, 2) @ vectors[:, :, -1:]).squeeze(-1))


def margin_slope(jacobians: Tensor, labels: Tensor) -> Tensor:
    """Return max over c ≠ y of ‖∇(z_y − z_c)‖₁, (B,), of Jacobians (B, K, P) and labels y (B,)."""
    label_gradient = jacobians[torch.arange(len(labels), device=labels.device), labels]
    slopes = (label_gradient.unsqueeze(1) - jacobians).abs().sum(dim=-1)
    return slopes.amax(dim=1)  # c = y gives 0, which is never above the others


def find_steepest_pair(
    model: Model, images: Tensor, direction: Tensor, radius: float, steps: int
) -> ImagePairSlope:
    """Return the steepest pair that gradient ascent of ‖f(x + δ) − f(x)‖₂ visits in the ball."""
    # Pairs are (x, current) and (previous, current).
    best = ImagePairSlope(images, images, torch.zeros_like(images[:, 0, 0, 0]))
    clean = model(images).prediction
    length = 2.5 * radius / max(steps, 1)  # as in PGD; it can cross the ball
    # the gradient at δ = 0 is 0, and a singular vector has no sign
    for sign in (1, -1):
        previous = images
        before = clean
        current = project_to_l2_ball(images + sign * radius * direction, images, radius)
        for _ in range(steps + 1):
            with torch.enable_grad():
                leaf = current.detach().requires_grad_(True)
                logits = model(leaf).prediction
                # The squared distance has the same direction, and a gradient at 0.
                (gradient,) = torch.autograd.grad((logits - clean).square().sum(), leaf)
            logits = logits.detach()
            best = _steeper_pair(best, images, current, logits - clean, MIN_DISTANCE * radius)
            best = _steeper_pair(best, previous, current, logits - before, MIN_DISTANCE * radius)
            previous = current
            before = logits
            step = length * _unit_rows(gradient.flatten(1)).view_as(images)
            current = project_to_l2_ball(current + step, images, radius)
    return best


def bisect_steepest(
    model: Model, pair: ImagePairSlope, halvings: int
) -> tuple[ImagePairSlope, Tensor, Tensor]:
    """Keep pairs' steeper half ``halvings`` times; return them, if experts differ, jumps (B,)."""
    # The ratio never decreases, as the change over a pair is at most the sum over its halves. For a
    # continuous model it tends to a local slope; at a jump it doubles with every halving.
    first, second, _ = pair
    with torch.no_grad():
        start = model(first).prediction
        end = model(second).prediction
        for _ in range(halvings):
            middle = (first + second) / 2
            between = model(middle).prediction
            is_first = (between - start).norm(dim=1) >= (end - between).norm(dim=1)
            first = _where_images(is_first, first, middle)
            second = _where_images(is_first, middle, second)
            start = torch.where(is_first.unsqueeze(1), start, between)
            end = torch.where(is_first.unsqueeze(1), between, end)
        crossed = torch.zeros(len(first), dtype=torch.bool, device=first.device)
        for record, other in zip(model(first).routing, model(second).routing, strict=True):
            crossed |= (record.chosen != other.chosen).flatten(1).any(dim=1)
    ratio = _steeper_pair(pair, first, second, end - start).ratio
    return (
        ImagePairSlope(first, second, ratio),
        crossed,
        torch.where(crossed, (end - start).norm(dim=1), 0),
    )


def project_to_l2_ball(points: Tensor, centre: Tensor, radius: float) -> Tensor:
    """Project points (B, C, H, W) into the ℓ2 ball around ``centre``, then into [0, 1]."""
    # As the centre is in [0, 1], the second step does not increase the distance.
    change = points - centre
    shrink = (radius / _lengths(change).clamp_min(radius)).view(-1, 1, 1, 1)
    return (centre + change * shrink).clamp(0, 1)


def _steeper_pair(
    best: ImagePairSlope, first: Tensor, second: Tensor, change: Tensor, min_distance: float = 0.0
) -> ImagePairSlope:
    """Return, per image, (first, second) if steeper than ``best`` and ``min_distance`` apart."""
    distance = _lengths(second - first)
    # Over a step of 1e-17, as at the boundary of the ball, rounding would decide the ratio.
    ratio = torch.where(distance > min_distance, change.norm(dim=1) / distance, 0)
    better = ratio > best.ratio
    return ImagePairSlope(
        _where_images(better, first, best.first),
        _where_images(better, second, best.second),
        torch.where(better, ratio, best.ratio),
    )


def _where_images(condition: Tensor, images: Tensor, other_images: Tensor) -> Tensor:
    return torch.where(condition.view(-1, 1, 1, 1), images, other_images)


def _lengths(changes: Tensor) -> Tensor:
    return changes.flatten(1).norm(dim=1)


def _unit_rows(rows: Tensor) -> Tensor:
    """Return rows (B, P) scaled to length 1; a row of zeros does not change."""
    length = rows.norm(dim=1, keepdim=True)
    return torch.where(length > 0, rows / length, 0)


class Lipschitz(Measurement):
    """Slopes of logits; check of Lemma 1's bound on MoE layers' slopes (Puigcerver et al. 2022)."""

    flat_classes = True
    classes_for = "decision"
    changes_images = True
    metrics = METRICS
    page = OnPage("a Lipschitz estimate", place=13)

    images: int = Field(100, ge=1, description="Test images, evenly spread.")
    lemma_tokens: int = Field(64, ge=1, description="Their tokens for Lemma 1, per MoE layer.")

    def measure(self, subject: MeasuredModel, out: Values) -> None:
        model = subject.model
        test = subject.data.test
        indices = evenly_spaced_indices(len(test.labels), self.images)
        images = test.images[indices]
        labels = torch.from_numpy(test.labels[indices])

        def compute_slopes(part: Values) -> None:
            slopes = find_slopes(model, images, labels, BATCH, RADIUS, STEPS, HALVINGS)
            put_lipschitz_slopes(slopes, part)

        out.piece("slopes", compute_slopes)
        lemma = (subject, images, self.lemma_tokens, BATCH, SEED)
        out.piece("lemma", partial(put_lemma, *lemma))


def put_lipschitz_slopes(slopes: LipschitzSlopes, out: Values) -> None:
    for name, values in (
        ("local_mean", slopes.local),
        ("margin_mean", slopes.margin),
        ("lower_bound_mean", slopes.lower_bound),
    ):
        out.put(f"lipschitz_{name}", bootstrap_mean(values.double().numpy()))
    out.put("lipschitz_lower_bound", float(slopes.lower_bound.max()))
    out.put("at_boundary", wilson(int(slopes.crossed.sum()), len(slopes.crossed)))
    out.put("jump_max", float(slopes.jump.max()))
