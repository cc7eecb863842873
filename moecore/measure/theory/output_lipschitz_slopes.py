"""How fast a trained model's logits change with its image: at the image exactly, and over a ball.

N (or B) images, K classes, P pixels of one image (C·H·W). Everything is computed on a frozen copy
in fp64: fp32 would drown the differences over ``bisect_pair``'s distances.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from moecore.nn.backbones.base_model import Model
from moecore.nn.layers.layer_lipschitz_bound import frozen_double_copy, row_jacobians
from moecore.nn.predict import ImageSequence, eval_mode, image_batches, model_device

LEAST = 1e-3  # of the radius: pairs that are nearer to each other do not count


class LipschitzSlopes(NamedTuple):
    """One value an image, each (N,); fp64, ``crossed`` bool. Logits over pixels in [0, 1].

    local: ‖J‖₂ of image → logits, the Lipschitz constant in ℓ2 in an arbitrarily small
    neighbourhood without a change of routing.
    margin: max over classes c other than the label y of ‖∇(z_y − z_c)‖₁, how fast an ℓ∞ attack can
    change a margin there.
    lower_bound: ‖f(a) − f(b)‖₂ / ‖a − b‖₂ of the steepest pair in the ball that the ascent visits,
    halved again and again; a lower bound of the Lipschitz constant on the ball.
    crossed: whether the ends of the halved pair choose different experts; their ratio then grows
    without limit as they approach.
    jump: ‖f(a) − f(b)‖₂ of the halved pair where crossed, else 0.
    """

    local: Tensor
    margin: Tensor
    lower_bound: Tensor
    crossed: Tensor
    jump: Tensor


class ImagePairSlope(NamedTuple):
    """Two images a and b, each (B, C, H, W), and ‖f(a) − f(b)‖₂ / ‖a − b‖₂, (B,)."""

    first: Tensor
    second: Tensor
    ratio: Tensor


def slopes_at(
    model: Model,
    images: ImageSequence,
    labels: Tensor,
    batch: int,
    radius: float,
    steps: int,
    halvings: int,
) -> LipschitzSlopes:
    """Return how fast a model's logits change at images, on the CPU.

    images: (N, C, H, W) as ``predict_in_batches`` takes them; labels: (N,); radius: of the ℓ2 ball
    around an image, met with [0, 1]; steps: of the ascent; halvings: how often its best pair is
    halved, to a distance of at most 2·radius/2^halvings.  The result does not depend on ``batch``
    beyond rounding. The model and the global random state are left as they were.
    """
    exact = frozen_double_copy(model)
    device = model_device(exact)
    chunks = []
    with eval_mode(exact), torch.autocast(device.type, enabled=False):
        for pixels, targets in zip(
            image_batches(images, batch, device), labels.split(batch), strict=True
        ):
            own = targets.to(pixels.device)
            chunks.append(_batch_slopes(exact, pixels.double(), own, radius, steps, halvings))
    return LipschitzSlopes(*(torch.cat(field).cpu() for field in zip(*chunks, strict=True)))


def _batch_slopes(
    model: Model, images: Tensor, labels: Tensor, radius: float, steps: int, halvings: int
) -> LipschitzSlopes:
    jacobians = row_jacobians(lambda pixels: model(pixels).prediction, images)
    local, direction = top_singular_pair(jacobians)
    best = find_steepest_pair(model, images, direction.view_as(images), radius, steps)
    pair, crossed, jump = bisect_pair(model, best, halvings)
    return LipschitzSlopes(local, margin_slope(jacobians, labels), pair.ratio, crossed, jump)


def top_singular_pair(jacobians: Tensor) -> tuple[Tensor, Tensor]:
    """The largest singular value (B,) of Jacobians (B, K, P), and its direction (B, P).

    The direction it stretches has length 1 (0 where the value is 0). By JJᵀ, as K is far below P.
    """
    values, vectors = torch.linalg.eigh(jacobians @ jacobians.transpose(1, 2))
    largest = values[:, -1].clamp_min(0).sqrt()
    return largest, _unit_rows((jacobians.transpose(1, 2) @ vectors[:, :, -1:]).squeeze(-1))


def margin_slope(jacobians: Tensor, labels: Tensor) -> Tensor:
    """max over c ≠ y of ‖∇(z_y − z_c)‖₁, (B,), of Jacobians (B, K, P) and labels y (B,)."""
    own = jacobians[torch.arange(len(labels), device=labels.device), labels]
    apart = (own.unsqueeze(1) - jacobians).abs().sum(dim=-1)
    return apart.amax(dim=1)  # 0 for c = y, which is never above the others


def find_steepest_pair(
    model: Model, images: Tensor, direction: Tensor, radius: float, steps: int
) -> ImagePairSlope:
    """The steepest pair that gradient ascent of ‖f(x + δ) − f(x)‖₂ meets in the ball.

    It starts at x ± radius · direction: the gradient at δ = 0 is 0, and a singular vector has no
    sign. Pairs are (x, current) and (previous, current), both inside the ball. A step is
    2.5 · radius / steps long (as in PGD), so that the ball can be crossed.
    """
    best = ImagePairSlope(images, images, torch.zeros_like(images[:, 0, 0, 0]))
    clean = model(images).prediction
    length = 2.5 * radius / max(steps, 1)
    for sign in (1, -1):
        previous = images
        before = clean
        current = project_to_l2_ball(images + sign * radius * direction, images, radius)
        for _ in range(steps + 1):
            logits, gradient = _logits_and_gradient(model, current, clean)
            best = _steeper_pair(best, images, current, logits - clean, LEAST * radius)
            best = _steeper_pair(best, previous, current, logits - before, LEAST * radius)
            previous = current
            before = logits
            step = length * _unit_rows(gradient.flatten(1)).view_as(images)
            current = project_to_l2_ball(current + step, images, radius)
    return best


def bisect_pair(
    model: Model, pair: ImagePairSlope, halvings: int
) -> tuple[ImagePairSlope, Tensor, Tensor]:
    """The pair halved again and again, each time to its steeper half.

    Also whether its ends choose different experts, (B,) bool, and the jump there, (B,):
    ‖f(a) − f(b)‖₂ where the choices differ, else 0. The ratio never falls: the change over the
    whole is at most the sum of the changes over its halves. For a continuous model it tends to a
    local slope; at a jump it doubles every time.
    """
    first, second, _ = pair
    with torch.no_grad():
        start = model(first).prediction
        end = model(second).prediction
        for _ in range(halvings):
            middle = (first + second) / 2
            between = model(middle).prediction
            left = (between - start).norm(dim=1) >= (end - between).norm(dim=1)
            first = _where_images(left, first, middle)
            second = _where_images(left, middle, second)
            start = torch.where(left.unsqueeze(1), start, between)
            end = torch.where(left.unsqueeze(1), between, end)
        crossed = torch.zeros(len(first), dtype=torch.bool, device=first.device)
        for one, other in zip(model(first).routing, model(second).routing, strict=True):
            crossed |= (one.chosen != other.chosen).flatten(1).any(dim=1)
    ratio = _steeper_pair(pair, first, second, end - start).ratio
    return (
        ImagePairSlope(first, second, ratio),
        crossed,
        torch.where(crossed, (end - start).norm(dim=1), 0),
    )


def project_to_l2_ball(points: Tensor, centre: Tensor, radius: float) -> Tensor:
    """Points (B, C, H, W) drawn into the ℓ2 ball around ``centre``, then into [0, 1].

    The centre lies in [0, 1], so that the second step leads no farther from it.
    """
    change = points - centre
    shrink = (radius / _lengths(change).clamp_min(radius)).view(-1, 1, 1, 1)
    return (centre + change * shrink).clamp(0, 1)


def _logits_and_gradient(model: Model, images: Tensor, clean: Tensor) -> tuple[Tensor, Tensor]:
    """Logits (B, K), and the gradient (B, C, H, W) of their distance from ``clean``, squared.

    Squared, it has the same direction and exists at 0.
    """
    with torch.enable_grad():
        leaf = images.detach().requires_grad_(True)
        logits = model(leaf).prediction
        (gradient,) = torch.autograd.grad((logits - clean).square().sum(), leaf)
    return logits.detach(), gradient


def _steeper_pair(
    best: ImagePairSlope, first: Tensor, second: Tensor, change: Tensor, least: float = 0.0
) -> ImagePairSlope:
    """For each image the better of a pair and of (first, second).

    change: (B, K), by which the logits of the latter differ.
    Two images at most ``least`` apart do not count: over a step of 1e-17, which an iterate at the
    rim of its ball makes, rounding decides.
    """
    distance = _lengths(second - first)
    ratio = torch.where(distance > least, change.norm(dim=1) / distance, 0)
    better = ratio > best.ratio
    return ImagePairSlope(
        _where_images(better, first, best.first),
        _where_images(better, second, best.second),
        torch.where(better, ratio, best.ratio),
    )


def _where_images(which: Tensor, these: Tensor, others: Tensor) -> Tensor:
    return torch.where(which.view(-1, 1, 1, 1), these, others)


def _lengths(changes: Tensor) -> Tensor:
    return changes.flatten(1).norm(dim=1)


def _unit_rows(rows: Tensor) -> Tensor:
    """Rows (B, P) of length 1; a row of zeros stays."""
    length = rows.norm(dim=1, keepdim=True)
    return torch.where(length > 0, rows / length, 0)
