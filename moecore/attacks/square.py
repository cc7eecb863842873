"""Square attack (Andriushchenko et al. 2020), equal to the code in AutoAttack query by query."""

import math
from functools import cache, partial
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from moecore.attacks import base, gradient, survivor_attack

INITIAL_AREA_SHARE = 0.8  # share of the image that the first square covers
HALVING_QUERIES = (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)  # after which it is halved
QUERIES_PER_DRAW = 100  # queries whose random numbers are drawn together
TILES_PER_AXIS = 5  # along each axis of an L2 start
MIN_SIDE = 3  # pixels, of a square in L2


class Square(survivor_attack.SurvivorAttack):
    """Change squares of random place and sign, and keep what lowers the margin; no gradients."""

    kind: Literal["square"] = "square"
    queries: int = Field(5000, ge=1, description="Number of passes per image.")

    def trials(self, classes: int) -> list[survivor_attack.Trial]:
        return [partial(search_squares, queries=self.queries)]


def search_squares(victims: survivor_attack.Victims, queries: int) -> Tensor:
    """Return images (B, C, H, W) of the smallest margin found; misclassified ones stop early."""
    ball = victims.ball
    channels, height, width = ball.centre.shape[1:]
    if ball.norm == "linf":
        start = striped_start(ball, victims.generators)
        propose = propose_square
        numbers = 2 + channels  # random numbers per query
    else:
        start = tiled_start(ball, victims.generators)
        propose = propose_pyramid
        numbers = 5 + channels
    best = ball.restore_fixed_pixels(start)
    margin = margins(victims, best)
    result = best.clone()
    active = torch.arange(len(best), device=best.device)
    draws = best.new_empty(len(best), QUERIES_PER_DRAW, numbers)
    for query in range(queries):
        keep = margin > 0
        if not keep.all():
            result[active] = best
            rows = keep.nonzero()[:, 0]
            victims = victims.take(rows)
            best, margin, active, draws = (each[rows] for each in (best, margin, active, draws))
        if not len(active):
            return result
        if query % QUERIES_PER_DRAW == 0:
            shape = (min(QUERIES_PER_DRAW, queries - query), numbers)
            draws = draw_uniform(victims.generators, shape).to(best.device)
        area = INITIAL_AREA_SHARE / 2 ** sum(query > halving for halving in HALVING_QUERIES)
        side = round(math.sqrt(area * height * width))
        proposal = propose(victims.ball, best, side, draws[:, query % QUERIES_PER_DRAW])
        proposal = victims.ball.restore_fixed_pixels(proposal)
        new_margin = margins(victims, proposal)
        better = new_margin < margin
        best = base.pick_per_image(better, proposal, best)
        margin = torch.where(better, new_margin, margin)
    result[active] = best
    return result


def margins(victims: survivor_attack.Victims, images: Tensor) -> Tensor:
    """Return z_y − max_{i≠y} z_i of images (B, C, H, W), (B,)."""
    logits = gradient.predict_logits(victims.model, images)
    label = victims.labels[:, None]
    return logits.gather(1, label)[:, 0] - logits.scatter(1, label, -torch.inf).amax(dim=1)


def draw_uniform(generator: base.ImageGenerators, shape: tuple[int, ...]) -> Tensor:
    """Return uniform numbers in [0, 1) for each image, (B, *shape), on the CPU."""
    if generator is None:
        raise ValueError("attack: square draws random squares; pass a CPU generator")
    return torch.stack([torch.rand(shape, generator=each) for each in generator])


def to_signs(draws: Tensor) -> Tensor:
    return torch.sign(2 * draws - 1)


def striped_start(ball: base.Ball, generator: base.ImageGenerators) -> Tensor:
    """Return the images ± ε in vertical stripes of one pixel, in [0, 1]."""
    _, channels, _, width = ball.centre.shape
    stripes = to_signs(draw_uniform(generator, (channels, 1, width))).to(ball.centre.device)
    return (ball.centre + ball.epsilon * stripes).clamp(0, 1)


def propose_square(ball: base.Ball, best: Tensor, side: int, draws: Tensor) -> Tensor:
    """Return images with one square, per channel, moved by ± 2ε and projected."""
    # draws: (B, 2 + C): of the top and left edge, and of the signs
    height, width = best.shape[2:]
    side = min(max(side, 1), height, width)
    top, leftmost = draws_to_corners(draws, height - side, width - side)
    rows, columns = (torch.arange(size, device=best.device) for size in (height, width))
    inside_rows = (rows >= top[:, None]) & (rows < top[:, None] + side)
    inside_columns = (columns >= leftmost[:, None]) & (columns < leftmost[:, None] + side)
    inside = inside_rows[:, None, :, None] & inside_columns[:, None, None, :]
    change = 2 * ball.epsilon * to_signs(draws[:, 2:])[:, :, None, None]
    return ball.project(best + inside * change)


def draws_to_corners(draws: Tensor, last_row: int, last_column: int) -> tuple[Tensor, Tensor]:
    """Return the top and left edges (B,) of windows, from uniform draws (B, 2 or more)."""
    return (last_row * draws[:, 0]).long(), (last_column * draws[:, 1]).long()


def tiled_start(ball: base.Ball, generator: base.ImageGenerators) -> Tensor:
    """Return images plus ± pyramids (bumps) on about 5 × 5 tiles, together of norm ε, in [0, 1]."""
    images, channels, height, width = ball.centre.shape
    side = max(height // TILES_PER_AXIS, 1)
    first = (height - side * TILES_PER_AXIS) // 2
    change = torch.zeros_like(ball.centre)
    for row in range(height // side):
        for column in range(width // side):
            draws = draw_uniform(generator, (1 + channels,)).to(change.device)
            tiles = orient_and_sign_pyramid_pairs(side, draws)
            top, leftmost = first + row * side, first + column * side
            part = change[:, :, top : top + side, leftmost : leftmost + side]
            part += tiles[:, :, : part.shape[2], : part.shape[3]]
    return (ball.centre + ball.direction(change) * ball.epsilon).clamp(0, 1)


def propose_pyramid(ball: base.Ball, best: Tensor, side: int, draws: Tensor) -> Tensor:
    """Return images: one window's change becomes 0, ± pyramids in a second window get its norm."""
    # draws: (B, 5 + C): of two corners, then as in ``orient_and_sign_pyramid_pairs``
    images, channels, height, width = best.shape
    side = max(side, MIN_SIDE)
    side = min(side + (side % 2 == 0), height, width)
    change = best - ball.centre
    span = torch.arange(side, device=best.device)

    def window(numbers: Tensor) -> tuple[Tensor, ...]:
        top, leftmost = draws_to_corners(numbers, height - side, width - side)
        image = torch.arange(images, device=best.device)[:, None, None, None]
        channel = torch.arange(channels, device=best.device)[None, :, None, None]
        row = (top[:, None] + span)[:, None, :, None]
        return image, channel, row, (leftmost[:, None] + span)[:, None, None, :]

    target, source = window(draws[:, :2]), window(draws[:, 2:4])
    in_windows = torch.zeros_like(change)
    in_windows[target] = 1
    in_windows[source] = 1
    length = base.unsqueeze_like(ball.lengths(change), change)
    unused = (ball.epsilon**2 - length.square()).clamp(min=0)
    budget = unused / channels + window_l2_norms(change * in_windows).square()
    old = change[target] / (base.TINY + window_l2_norms(change[target]))
    new = orient_and_sign_pyramid_pairs(side, draws[:, 4:]) + old
    new = new / (base.TINY + window_l2_norms(new)) * budget.sqrt()
    change[source] = 0
    change[target] = new
    return (ball.centre + ball.direction(change) * ball.epsilon).clamp(0, 1)


def window_l2_norms(window: Tensor) -> Tensor:
    """Return the L2 norm per channel of windows (B, C, h, w), (B, C, 1, 1)."""
    return window.square().sum(dim=(-2, -1), keepdim=True).sqrt()


def orient_and_sign_pyramid_pairs(side: int, draws: Tensor) -> Tensor:
    """Return a positive and a negative pyramid of L2 norm 1, one above or beside the other."""
    # draws: (B, 1 + C), of the direction and of the signs. Returns (B, C, side, side).
    pair = unit_norm_pyramid_pair(side).to(draws.device)
    is_upright = (draws[:, 0] > 0.5)[:, None, None]
    return torch.where(is_upright, pair.T, pair)[:, None] * to_signs(draws[:, 1:])[:, :, None, None]


@cache
def unit_norm_pyramid_pair(side: int) -> Tensor:
    """Return the pair of pyramids one above the other, (side, side)."""
    half = side // 2
    pair = torch.cat([unit_norm_pyramid(half, side), -unit_norm_pyramid(side - half, side)])
    return pair / pair.square().sum().sqrt()


def unit_norm_pyramid(height: int, width: int) -> Tensor:
    """Return nested rectangles around the centre, the k-th adding 1 / k², of L2 norm 1."""
    steps = torch.zeros(height, width)
    top, leftmost = height // 2, width // 2
    for ring in range(max(top, leftmost) + 1):
        rows = slice(max(top - ring, 0), min(top + ring + 1, height))
        columns = slice(max(leftmost - ring, 0), min(leftmost + ring + 1, width))
        steps[rows, columns] += 1 / (ring + 1) ** 2
    return steps / steps.square().sum().sqrt()
