"""What a training loop sums between two logged points, and what must not go on."""

import time

import torch
from torch import Tensor, nn

from moecore.core.files import UserError


class Meter:
    """Sums on the device between two logged points, read once each time.

    So a step makes the host wait for nothing.
    """

    def __init__(self, device: torch.device, measure: str = "train_accuracy") -> None:
        """``measure``: the name of the mean, per image, of the scores."""
        self.device = device
        self.measure = measure
        self.start()

    def start(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.images = 0
        self.count = 0
        self.begun = time.perf_counter()
        self.first_bad = torch.full((), torch.iinfo(torch.int64).max, device=self.device)

    def add(self, step: int, images: int, terms: dict[str, Tensor], score: Tensor) -> None:
        """The terms of one step, and the sum of the scores of its images."""
        for name, value in (terms | {"score": score}).items():
            self.sums[name] = self.sums.get(name, 0) + value.double()
        earlier = self.first_bad.clamp(max=step + 1)
        self.first_bad = torch.where(torch.isfinite(terms["loss"]), self.first_bad, earlier)
        self.images += images
        self.count += 1

    def take(self, last_good: str) -> dict[str, float]:
        """The means since the last point. Raises UserError where a loss was not finite."""
        sums = {name: float(value) for name, value in self.sums.items()}
        score = sums.pop("score")
        means = {name: value / self.count for name, value in sums.items()}
        if self.first_bad < torch.iinfo(torch.int64).max:
            found = f"the loss is not finite since step {int(self.first_bad)} ({_shown(means)})"
            raise UserError(f"{found}; {last_good}. Lower the learning rate or a weight")
        seconds = time.perf_counter() - self.begun
        rate = self.images / seconds
        return means | {self.measure: score / self.images, "images_per_second": rate}


def taken(
    meter: Meter, model: nn.Module, step: int, rate: float, last_good: str
) -> dict[str, float]:
    """What the meter holds, and the learning rate.

    Raises UserError where the loss was not finite, or the weights are not: a finite loss can leave
    such weights, and they must not become a checkpoint.
    """
    values = meter.take(last_good) | {"learning_rate": rate}
    sums = torch.stack([parameter.detach().sum() for parameter in model.parameters()])
    if not sums.isfinite().all():
        found = f"the weights are not finite after step {step} ({_shown(values)})"
        raise UserError(f"{found}; {last_good}. Lower the learning rate or a weight")
    return values


def _shown(means: dict[str, float]) -> str:
    listed = ", ".join(f"{name} {value:.4g}" for name, value in means.items())
    return f"means since the last logged point: {listed}"
