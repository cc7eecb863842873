"""Race of the attacks: ours against pyautoattack alone, on the same V-MoE, images and number of
gradient steps.

    python -m benchmarks.attacks [--rounds 8] [--size default vit_tiny vit_s] [--steps 10] [--images
    64] [--device cuda]

"Alone" is the package's APGD on the model as it was trained: parameters that take gradients,
nothing frozen. All take turns in one process; a ratio is time over time of one round, so below 1
ours is faster. Run it with nothing else on the machine.
"""

import argparse
from collections.abc import Callable
from statistics import median

import torch
from pyautoattack.autopgd_base import APGDAttack
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.layers import wait
from benchmarks.timing import LEAST, Ratio, Run, take_turns
from benchmarks.training_step import bench, sizes
from moecore.attacks.apgd import Apgd
from moecore.attacks.attack_setup import BFloat16Model
from moecore.attacks.base import Attack, image_generators
from moecore.attacks.pgd import Pgd
from moecore.nn.backbones.base_model import BackboneModel
from moecore.nn.predict import eval_mode
from moecore.training.runtime import tune_runtime

EPSILON = 4 / 255
ALONE = "pyautoattack alone"
Attacked = Callable[[], Tensor]


def contestants(
    model: BackboneModel, images: Tensor, labels: Tensor, steps: int
) -> dict[str, Attacked]:
    """Attacks by name; each call returns adversarial images (B, C, H, W).

    Ours draw their starts each time, as in the stage.
    """

    def ours(attack: Attack, attacked: BackboneModel = model) -> Attacked:
        task = model.image.task
        indices = range(len(images))
        return lambda: attack(attacked, task, images, labels, EPSILON, image_generators(0, indices))

    return {
        ALONE: lambda: alone(model, images, labels, steps),
        "ours apgd": ours(Apgd(steps=steps)),
        "ours apgd, bf16": ours(Apgd(steps=steps), BFloat16Model(model)),
        "ours pgd": ours(Pgd(steps=steps)),
    }


def alone(model: nn.Module, images: Tensor, labels: Tensor, steps: int) -> Tensor:
    """The package as one calls it first."""
    attack = APGDAttack(
        lambda pixels: model(pixels).prediction,
        n_iter=steps,
        eps=EPSILON,
        loss="ce",
        device=images.device,
    )
    return attack.perturb(images, labels, best_loss=True)


def race(name: str, images: int, steps: int, rounds: int, device: str = "cpu") -> list[dict]:
    """One row per contestant: images a second, and its time over that of the package alone."""
    size = sizes()[name]
    model = bench(size, size.vmoe, torch.float32, device=device).model
    generator = torch.Generator().manual_seed(0)
    pixels = torch.rand(images, size.channels, size.side, size.side, generator=generator).to(device)
    labels = torch.randint(0, size.classes, (images,), generator=generator).to(device)

    def waited(run: Attacked) -> Run:
        return lambda: (run(), wait(device))

    with eval_mode(model):
        runs = contestants(model, pixels, labels, steps)
        seconds = take_turns({who: waited(run) for who, run in runs.items()}, rounds)
    return [
        {
            "size": name,
            "attack": who,
            "images_per_second": images / median(turns),
            **Ratio.of(turns, seconds[ALONE])._asdict(),
        }
        for who, turns in seconds.items()
    ]


def table(rows: list[dict], title: str) -> Table:
    """The rows as a table; the ratio's quartiles stand in brackets."""
    shown = Table("size", "attack", "images/s", "time / alone", "of minima", title=title)
    for row in rows:
        ratio = f"{row['median']:.3f} ({row['low']:.3f} – {row['high']:.3f})"
        shown.add_row(
            row["size"],
            row["attack"],
            f"{row['images_per_second']:.1f}",
            ratio,
            f"{row['minimum']:.3f}",
        )
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=LEAST)
    parser.add_argument("--size", nargs="+", default=["default"])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    chosen = parser.parse_args()
    tune_runtime(chosen.device)
    for name in chosen.size:
        rows = race(name, chosen.images, chosen.steps, chosen.rounds, chosen.device)
        Console().print(
            table(
                rows,
                (
                    f"{chosen.images} images, {chosen.steps} steps, {chosen.rounds} rounds, "
                    f"{torch.get_num_threads()} threads"
                ),
            )
        )


if __name__ == "__main__":
    main()
