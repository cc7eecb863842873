"""Fast adaptive boundary attack (Croce & Hein 2020b), equal to the authors' code step by step."""

from functools import partial
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import pad

from moecore.attacks.base import TINY, Norm, pick_per_image, random_start, unsqueeze_like
from moecore.attacks.gradient import Targets, count_targets, not_finite_error, why_too_many_targets
from moecore.attacks.survivor_attack import SurvivorAttack, Trial, Victims

OVERSHOOT = 1.05  # η: of each step, over the hyperplane
BACKWARD_STEP_FACTOR = 0.9  # β: share of its change that a misclassified image keeps
MAX_CLEAN_BIAS = 0.1  # α_max: towards the clean image's projection
MIN_LENGTH = 1e-8  # of a step, in the ratio of two
MIN_WEIGHT = 1e-8  # of a pixel in a normal, for it to move in L2
DISTANCE_IF_NOT_MISCLASSIFIED = 1e10


class Fab(SurvivorAttack):
    """Seek the nearest misclassified image, by steps to the model's linearised boundary."""

    kind: Literal["fab"] = "fab"
    steps: int = Field(100, ge=1, description="Number of steps.")
    aim: Literal["classes", "nearest"] = Field(
        "classes",
        description="classes: at one after the other (FAB-T). nearest: at that of the nearest "
        "boundary, which takes all classes' gradients at each step.",
    )
    targets: Targets = Field(None, description="Other classes to aim at, as of `targeted_dlr`.")
    restarts: int = Field(1, ge=1, description="Starts; all but the first are random.")

    def why_too_few_classes(self, classes: int) -> str | None:
        return why_too_many_targets(self.targets, classes)

    def trials(self, classes: int) -> list[Trial]:
        ranks: list[int | None] = [None]
        if self.aim == "classes":
            ranks = list(range(count_targets(self.targets, classes)))
        search = partial(search_nearest_error, steps=self.steps)
        starts = [restart > 0 for restart in range(self.restarts)]
        return [partial(search, rank=rank, is_random=start) for rank in ranks for start in starts]


def search_nearest_error(victims: Victims, rank: int | None, steps: int, is_random: bool) -> Tensor:
    """Return nearest errors in the ball, else clean images (B, C, H, W); start: clean or random."""
    # rank: of the other class to aim at, 0 for the most likely; None: the nearest at each step.
    ball = victims.ball
    targets = victims.others
    if rank is not None:
        targets = targets[:, rank : rank + 1]
    clean = ball.centre
    current = clean
    if is_random:
        half = ball._replace(epsilon=ball.epsilon / 2)
        current = ball.restore_fixed_pixels(random_start(half, victims.generators, "fab"))
    best = clean
    best_length = torch.full_like(victims.labels, DISTANCE_IF_NOT_MISCLASSIFIED, dtype=clean.dtype)
    for _ in range(steps):
        normal, offset = find_nearest_hyperplane(victims, targets, current)
        both = torch.cat([current, clean]).flatten(1)
        moves = hyperplane_moves(both, normal.repeat(2, 1), offset.repeat(2), ball.norm)
        length, clean_length = ball.lengths(moves).clamp(min=MIN_LENGTH).chunk(2)
        bias = unsqueeze_like((length / (length + clean_length)).clamp(0, MAX_CLEAN_BIAS), clean)
        move, clean_move = moves.view(-1, *clean.shape[1:]).chunk(2)
        near = (current + OVERSHOOT * move) * (1 - bias)
        current = (near + (clean + OVERSHOOT * clean_move) * bias).clamp(0, 1)
        wrong = victims.are_wrong(current)
        length = ball.lengths(current - clean)
        nearer = wrong & (length < best_length)
        best = pick_per_image(nearer, current, best)
        best_length = torch.where(nearer, length, best_length)
        current = pick_per_image(wrong, clean + (current - clean) * BACKWARD_STEP_FACTOR, current)
    return pick_per_image(best_length <= ball.epsilon, best, clean)


def find_nearest_hyperplane(victims: Victims, targets: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    """Linearise the boundaries to ``targets``; return the closest: normal (B, n), offset (B,)."""
    differences = []
    gradients = []
    with torch.enable_grad(), torch.autocast(at.device.type, enabled=False):
        leaf = at.detach().requires_grad_(True)
        logits = victims.model(leaf).prediction.float()
        right = logits.gather(1, victims.labels[:, None])
        for target in targets.split(1, dim=1):
            difference = logits.gather(1, target) - right
            last = len(differences) + 1 == targets.shape[1]
            (gradient,) = torch.autograd.grad(difference.sum(), leaf, retain_graph=not last)
            differences.append(difference.detach())
            gradients.append(gradient.flatten(1))
    difference = torch.cat(differences, dim=1)
    gradient = torch.stack(gradients, dim=1)
    if not gradient.isfinite().all():
        raise not_finite_error(difference.sum())
    if victims.ball.may_change is not None:
        gradient = gradient * victims.ball.may_change.flatten(1)[:, None]
    # The distance to a hyperplane is measured by the dual norm of its normal.
    order = {"linf": 1, "l2": 2}[victims.ball.norm]
    distance = difference.abs() / (TINY + gradient.norm(order, dim=-1))
    rows = torch.arange(len(at), device=at.device)
    nearest = distance.argmin(dim=1)
    normal = gradient[rows, nearest]
    return normal, (normal * at.flatten(1)).sum(dim=1) - difference[rows, nearest]


def hyperplane_moves(points: Tensor, normal: Tensor, offset: Tensor, norm: Norm) -> Tensor:
    """Return the shortest moves (B, n) of points in [0, 1] to normal · x = offset, inside [0, 1].

    Where it cannot be reached, each coordinate moves as far as it can.
    """
    gap = (normal * points).sum(dim=1) - offset
    sign = torch.where(gap >= 0, 1.0, -1.0)[:, None]
    normal = normal * sign  # every coordinate now moves against it
    gap = gap.abs()[:, None]
    room = torch.where(normal > 0, points, 1 - points)
    weight = normal.abs()
    if norm == "linf":
        pace = (weight > 0).to(weight.dtype)
    else:
        weight = torch.where(weight > MIN_WEIGHT, weight, 0)
        pace = weight
    # A coordinate moves by min(λ · pace, room), and all moves together close the gap by
    # Σ weight · min(λ · pace, room): piecewise linear in λ, with a knot where a room is used up.
    knots, order = torch.where(pace > 0, room / pace, torch.inf).sort(dim=1)
    rate = (weight * pace).gather(1, order)
    rest = pad(rate.flip(1).cumsum(dim=1).flip(1), (0, 1))  # of coordinates that still move
    done = pad((weight * room).gather(1, order).cumsum(dim=1), (1, 0))
    closed = torch.where(knots.isfinite(), done[:, :-1] + knots * rest[:, :-1], torch.inf)
    place = (closed < gap).sum(dim=1, keepdim=True)
    slope = rest.gather(1, place)
    pull = torch.where(slope > 0, (gap - done.gather(1, place)).clamp(min=0) / slope, torch.inf)
    return -normal.sign() * torch.where(pace > 0, torch.minimum(pull * pace, room), 0)
