"""Race of the attacks: ours against pyautoattack alone, on the same V-MoE, images and number of
gradient steps.

    python -m benchmarks.attacks [--rounds 8] [--size default vit_tiny vit_s] [--steps 10] [--images
    64] [--device cuda] [--autoattack linf --epsilon 0.0157 --queries 50]

With --autoattack the whole ensemble of that norm races, each side from its own random numbers;
labels are what the model answers, so that every image is right when clean.

"Alone" is the package's APGD on the model as it was trained: parameters that take gradients,
nothing frozen. All take turns in one process; a ratio is time over time of one round, so below 1
ours is faster. Run it with nothing else on the machine.
"""

import argparse
from collections.abc import Callable
from statistics import median

import torch
from pyautoattack import AutoAttack
from pyautoattack.autopgd_base import APGDAttack
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.layers import wait
from benchmarks.timing import LEAST, Ratio, Run, take_turns
from benchmarks.training_step import bench, sizes
from moecore.attacks.apgd import Apgd
from moecore.attacks.attack_target import BFloat16Model
from moecore.attacks.autoattack import Autoattack
from moecore.attacks.base import Attack, seed_generator_per_image
from moecore.attacks.pgd import Pgd
from moecore.nn.backbones.base_model import BackboneModel
from moecore.nn.predict import eval_mode
from moecore.training.runtime import tune_runtime

EPSILON = 4 / 255
BATCH = 250  # images per pass of AutoAttack
ALONE = "pyautoattack alone"
Attacked = Callable[[], Tensor]


def contestants(
    model: BackboneModel, images: Tensor, labels: Tensor, steps: int
) -> dict[str, Attacked]:
    """Return name → attack; a call returns adversarial images (B, C, H, W).

    Each call of ours draws its starting points, as in the stage.
    """

    def ours(attack: Attack, attacked: BackboneModel = model) -> Attacked:
        task = model.image.task
        indices = range(len(images))
        return lambda: attack(
            attacked, task, images, labels, EPSILON, seed_generator_per_image(0, indices)
        )

    return {
        ALONE: lambda: run_package_apgd(model, images, labels, steps),
        "ours apgd": ours(Apgd(steps=steps)),
        "ours apgd, bf16": ours(Apgd(steps=steps), BFloat16Model(model)),
        "ours pgd": ours(Pgd(steps=steps)),
    }


def run_package_apgd(model: nn.Module, images: Tensor, labels: Tensor, steps: int) -> Tensor:
    """Attack by pyautoattack's APGD with its usual call."""
    attack = APGDAttack(
        lambda pixels: model(pixels).prediction,
        n_iter=steps,
        eps=EPSILON,
        loss="ce",
        device=images.device,
    )
    return attack.perturb(images, labels, best_loss=True)


def ensembles(
    model: BackboneModel, images: Tensor, steps: int, queries: int, epsilon: float, norm: str
) -> dict[str, Attacked]:
    """Return name → AutoAttack, ours and the package's; a call returns images (B, C, H, W)."""
    with torch.no_grad():
        labels = torch.cat([model(few).prediction.argmax(1) for few in images.split(BATCH)])

    def package() -> Tensor:
        name = {"linf": "Linf", "l2": "L2"}[norm]
        attack = AutoAttack(
            lambda pixels: model(pixels).prediction, norm=name, eps=epsilon, device=images.device
        )
        attack.fab.n_iter = steps
        for part in (attack.apgd, attack.apgd_targeted):
            part.n_iter = steps
            # Checkpoints, which its constructor derives from 100 steps
            part.n_iter_2, part.n_iter_min, part.size_decr = (
                max(int(share * steps), 1) for share in (0.22, 0.06, 0.03)
            )
        attack.square.n_queries = queries
        attacked, _ = attack.run_standard_evaluation(images, labels, batch_size=BATCH)
        return told(ALONE, attacked)

    def ours() -> Tensor:
        attack = Autoattack(norm=norm, steps=steps, queries=queries)
        generators = seed_generator_per_image(0, range(len(images)))
        options = (model.image.task, images, labels, epsilon, generators)
        return told("ours", attack(model, *options, batch=BATCH))

    def told(who: str, attacked: Tensor) -> Tensor:
        changed = (attacked != images).flatten(1).any(1)
        print(f"{who}: {int(changed.sum())} of {len(images)} images are misclassified")
        return attacked

    return {ALONE: package, "ours autoattack": ours}


def race(
    name: str, images: int, steps: int, rounds: int, device: str = "cpu", ensemble: tuple = ()
) -> list[dict]:
    """Return a row per contestant: images per second, and time / time of the package.

    ensemble: queries, ε and norm, to race AutoAttack; () races single attacks.
    """
    size = sizes()[name]
    if "l2" in ensemble:  # the package's Square stops with an error at 24 × 24 pixels in L2
        size = size._replace(side=32)
    model = bench(size, size.vmoe, torch.float32, device=device).model
    generator = torch.Generator().manual_seed(0)
    pixels = torch.rand(images, size.channels, size.side, size.side, generator=generator).to(device)
    labels = torch.randint(0, size.classes, (images,), generator=generator).to(device)

    def waited(run: Attacked) -> Run:
        return lambda: (run(), wait(device))

    with eval_mode(model):
        if ensemble:
            runs = ensembles(model, pixels, steps, *ensemble)
        else:
            runs = contestants(model, pixels, labels, steps)
        warm = 0 if ensemble else 10
        seconds = take_turns({who: waited(run) for who, run in runs.items()}, rounds, warm)
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
    """Return the rows as a table, with the ratio's quartiles in brackets."""
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
    parser.add_argument("--autoattack", choices=("linf", "l2"))
    parser.add_argument("--epsilon", type=float, default=EPSILON)
    parser.add_argument("--queries", type=int, default=5000)
    chosen = parser.parse_args()
    ensemble = ()
    if chosen.autoattack:
        ensemble = (chosen.queries, chosen.epsilon, chosen.autoattack)
    tune_runtime(chosen.device)
    for name in chosen.size:
        rows = race(name, chosen.images, chosen.steps, chosen.rounds, chosen.device, ensemble)
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
