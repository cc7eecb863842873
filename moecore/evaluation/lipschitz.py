"""How fast a trained model's logits change with its image: at the image exactly, and over a ball from below.

N (or B) images, K classes, P pixels of one image (C·H·W). Everything is computed on a frozen copy in fp64: differences of logits over
the tiny distances of ``halved`` would drown in the rounding of fp32.
"""

import copy
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from moecore.evaluation.predict import batches, device_of, evaluating

LEAST = 1e-3  # of the radius: pairs that are nearer to each other do not count


class Lipschitz(NamedTuple):
    """One value an image, each (N,); fp64, ``crossed`` bool. Logits over pixels in [0, 1].

    local: ‖J‖₂ of image → logits, the Lipschitz constant in ℓ2 in an arbitrarily small neighbourhood without a change of routing.
    margin: max over classes c other than the label y of ‖∇(z_y − z_c)‖₁, how fast an ℓ∞ attack can change a margin there.
    reached: largest ‖f(a) − f(b)‖₂ / ‖a − b‖₂ of the pairs that the ascent visits; a and b lie in the ball.
    lower_bound: the same after halving that pair; a lower bound of the Lipschitz constant on the ball, as ``reached`` is.
    crossed: whether the ends of the halved pair choose different experts; their ratio then grows without limit as they approach.
    jump: ‖f(a) − f(b)‖₂ of the halved pair where crossed, else 0.
    """

    local: Tensor
    margin: Tensor
    reached: Tensor
    lower_bound: Tensor
    crossed: Tensor
    jump: Tensor


class Pair(NamedTuple):
    """Two images a and b, each (B, C, H, W), and ‖f(a) − f(b)‖₂ / ‖a − b‖₂, (B,)."""

    first: Tensor
    second: Tensor
    ratio: Tensor


def lipschitz_estimates(model: nn.Module, images, labels: Tensor, batch: int, radius: float, steps: int, halvings: int) -> Lipschitz:
    """The Lipschitz estimates of a model at images, on the CPU.

    images: (N, C, H, W) as ``predictions`` takes them; labels: (N,); radius: of the ℓ2 ball around an image, met with [0, 1];
    steps: of the ascent; halvings: how often its best pair is halved, to a distance of at most 2·radius/2^halvings.
    The result does not depend on ``batch`` beyond rounding. The model and the global random state are left as they were.
    """
    exact, parts = frozen_copy(model), []
    with evaluating(exact), torch.autocast(device_of(exact).type, enabled=False):
        for pixels, targets in zip(batches(images, batch, device_of(exact)), labels.split(batch), strict=True):
            parts.append(_of_batch(exact, pixels.double(), targets.to(pixels.device), radius, steps, halvings))
    return Lipschitz(*(torch.cat(field).cpu() for field in zip(*parts, strict=True)))


def _of_batch(model: nn.Module, images: Tensor, labels: Tensor, radius: float, steps: int, halvings: int) -> Lipschitz:
    jacobians = row_jacobians(lambda pixels: model(pixels).prediction, images)
    local, direction = strongest(jacobians)
    best = ascended(model, images, direction.view_as(images), radius, steps)
    pair, crossed, jump = halved(model, best, halvings)
    return Lipschitz(local, margin_slope(jacobians, labels), best.ratio, pair.ratio, crossed, jump)


def frozen_copy(module: nn.Module) -> nn.Module:
    """The module in fp64 and evaluation mode, without gradients of parameters; the module itself is untouched."""
    return copy.deepcopy(module).double().eval().requires_grad_(False)


def row_jacobians(function: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
    """Jacobian of each row of a function whose row b depends on row b of its input only: inputs (B, …) and outputs (B, K) to (B, K, P).

    One backward pass an output: the grouped products and the dispatch have no forward-mode derivatives.
    """
    with torch.enable_grad():
        leaf = inputs.detach().clone().requires_grad_(True)
        outputs = function(leaf).sum(dim=0)
        rows = [torch.autograd.grad(output, leaf, retain_graph=True)[0] for output in outputs]
    return torch.stack(rows, dim=1).flatten(2)


def strongest(jacobians: Tensor) -> tuple[Tensor, Tensor]:
    """The largest singular value (B,) of Jacobians (B, K, P), and the direction (B, P) that it stretches, of length 1 (0 where the value is).

    By the (K, K) matrix JJᵀ, as K is far below P.
    """
    values, vectors = torch.linalg.eigh(jacobians @ jacobians.transpose(1, 2))
    largest = values[:, -1].clamp_min(0).sqrt()
    return largest, _unit((jacobians.transpose(1, 2) @ vectors[:, :, -1:]).squeeze(-1))


def margin_slope(jacobians: Tensor, labels: Tensor) -> Tensor:
    """max over c ≠ y of ‖∇(z_y − z_c)‖₁, (B,), of Jacobians (B, K, P) and labels y (B,)."""
    own = jacobians[torch.arange(len(labels), device=labels.device), labels]
    return (own.unsqueeze(1) - jacobians).abs().sum(dim=-1).amax(dim=1)  # 0 for c = y, which is never above the others


def ascended(model: nn.Module, images: Tensor, direction: Tensor, radius: float, steps: int) -> Pair:
    """The steepest pair that gradient ascent of ‖f(x + δ) − f(x)‖₂ meets in the ball, from x ± radius · direction.

    Pairs are (x, current) and (previous, current), both inside the ball. The gradient at δ = 0 is 0, hence that start; both signs, because
    a singular vector has none. A step is 2.5 · radius / steps long (as in PGD), so that the ball can be crossed.
    """
    best, clean = Pair(images, images, torch.zeros_like(images[:, 0, 0, 0])), model(images).prediction
    for sign in (1, -1):
        previous, current = images, in_ball(images + sign * radius * direction, images, radius)
        before = clean
        for step in range(steps + 1):
            logits, gradient = _change(model, current, clean)
            best = _steeper(best, images, current, logits - clean, LEAST * radius)
            best = _steeper(best, previous, current, logits - before, LEAST * radius)
            previous, before = current, logits
            current = in_ball(current + 2.5 * radius / max(steps, 1) * _unit(gradient.flatten(1)).view_as(images), images, radius)
    return best


def halved(model: nn.Module, pair: Pair, halvings: int) -> tuple[Pair, Tensor, Tensor]:
    """The pair halved again and again, each time to its steeper half; whether its ends choose different experts, (B,) bool; the jump there, (B,).

    The ratio never falls: the change over the whole is at most the sum of the changes over its halves. For a continuous model it tends
    to a local slope; at a jump it doubles every time. The jump is ‖f(a) − f(b)‖₂ where the choices differ, else 0.
    """
    first, second = pair.first, pair.second
    with torch.no_grad():
        start, end = model(first).prediction, model(second).prediction
        for _ in range(halvings):
            middle = (first + second) / 2
            between = model(middle).prediction
            left = (between - start).norm(dim=1) >= (end - between).norm(dim=1)
            first, second = _where(left, first, middle), _where(left, middle, second)
            start, end = torch.where(left.unsqueeze(1), start, between), torch.where(left.unsqueeze(1), between, end)
        crossed = torch.zeros(len(first), dtype=torch.bool, device=first.device)
        for one, other in zip(model(first).routing, model(second).routing, strict=True):
            crossed |= (one.chosen != other.chosen).flatten(1).any(dim=1)
    ratio = _steeper(pair, first, second, end - start).ratio
    return Pair(first, second, ratio), crossed, torch.where(crossed, (end - start).norm(dim=1), 0)


def in_ball(points: Tensor, centre: Tensor, radius: float) -> Tensor:
    """Points (B, C, H, W) drawn into the ℓ2 ball around ``centre`` (which lies in [0, 1]), then into [0, 1], which leads no farther from it."""
    change = points - centre
    shrink = (radius / _lengths(change).clamp_min(radius)).view(-1, 1, 1, 1)
    return (centre + change * shrink).clamp(0, 1)


def _change(model: nn.Module, images: Tensor, clean: Tensor) -> tuple[Tensor, Tensor]:
    """Logits (B, K), and the gradient (B, C, H, W) of their distance from ``clean``, squared: it has the same direction and exists at 0."""
    with torch.enable_grad():
        leaf = images.detach().requires_grad_(True)
        logits = model(leaf).prediction
        (gradient,) = torch.autograd.grad((logits - clean).square().sum(), leaf)
    return logits.detach(), gradient


def _steeper(best: Pair, first: Tensor, second: Tensor, change: Tensor, least: float = 0.0) -> Pair:
    """For each image the better of a pair and of (first, second), over which the logits change by ``change`` (B, K).

    Two images at most ``least`` apart do not count: over a step of 1e-17, which an iterate at the rim of its ball makes, rounding decides.
    """
    distance = _lengths(second - first)
    ratio = torch.where(distance > least, change.norm(dim=1) / distance, 0)
    better = ratio > best.ratio
    return Pair(_where(better, first, best.first), _where(better, second, best.second), torch.where(better, ratio, best.ratio))


def _where(which: Tensor, these: Tensor, others: Tensor) -> Tensor:
    return torch.where(which.view(-1, 1, 1, 1), these, others)


def _lengths(changes: Tensor) -> Tensor:
    return changes.flatten(1).norm(dim=1)


def _unit(rows: Tensor) -> Tensor:
    """Rows (B, P) of length 1; a row of zeros stays."""
    length = rows.norm(dim=1, keepdim=True)
    return torch.where(length > 0, rows / length, 0)
