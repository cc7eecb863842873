"""Race of Swin's training step: our dense Swin-T against timm's, and a Swin whose last stages hold
experts against the dense one.

    python -m benchmarks.swin [--rounds 8] [--batch 8] [--threads 2] [--kind swin | swin_v2]

Images of 224 pixels (V1, window 7) or 256 (V2, window 8), 1,000 classes; all have torch's own fused
AdamW and, but for the experts, the same weights. timm's model stands twice: as it comes, with
torch's own settings of the machine, and with ours (``tune_runtime``), which are most of what is
gained. Each contestant is a process of its own that waits for its turn.
"""

import argparse
import sys
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.timing import LEAST, Ratio, processes_take_turns, serve
from moecore.nn.backbones.base_model import ImageSpec
from moecore.nn.backbones.swin import Swin
from moecore.nn.backbones.swin_v2 import SwinV2
from moecore.nn.experts.mlp import Mlp
from moecore.nn.layers.moe import MoESettings
from moecore.nn.routers.noisy_top_k import NoisyTopK
from moecore.tasks.classification import Classification
from moecore.training.runtime import tune_runtime
from moecore.training.teachers.timm import define_missing_operators, rename_swin_weights

SIZES = {"swin": (224, 7), "swin_v2": (256, 8)}  # sides of images and windows
CLASSES = 1000
TARGET = 0.85  # ours / timm's


class Step(NamedTuple):
    """The model, optimizer and batch of a training step."""

    model: nn.Module
    logits: Callable[[Any], Tensor]  # model's output → logits
    optimizer: torch.optim.Optimizer
    images: Tensor
    labels: Tensor
    dtype: torch.dtype

    def run(self) -> None:
        """Compute forward, loss, backward and update."""
        with torch.autocast("cpu", dtype=self.dtype, enabled=self.dtype != torch.float32):
            said = self.logits(self.model(self.images))
        loss = cross_entropy(said.float(), self.labels)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()


CONTESTANTS = ("timm", "timm with our settings", "ours", "experts")


def contestant(name: str, kind: Any, batch: int, dtype: torch.dtype) -> Callable[[], None]:
    """Return the step of a contestant."""
    define_missing_operators()
    import timm

    size, window = SIZES[kind]
    known = {"swin": "swin_tiny_patch4_window7_224", "swin_v2": "swinv2_tiny_window8_256"}[kind]
    theirs = timm.create_model(known, pretrained=False, num_classes=CLASSES, drop_path_rate=0.0)
    model, logits = theirs, lambda said: said
    if name in ("ours", "experts"):
        classes = Classification(classes=tuple(map(str, range(CLASSES))))
        image = ImageSpec(channels=3, size=size, mean=(0.5,) * 3, std=(0.25,) * 3, task=classes)
        moe = MoESettings(router=NoisyTopK(k=2), experts=Mlp(number=8, hidden_ratio=2))
        settings = {"swin": Swin, "swin_v2": SwinV2}[kind](window=window)
        model = settings.build(image, moe if name == "experts" else None)
        logits = lambda said: said.prediction
        if name == "ours":
            model.load_state_dict(rename_swin_weights(theirs.state_dict()))
    drawn = torch.Generator().manual_seed(0)
    images = torch.rand(batch, 3, size, size, generator=drawn)
    labels = torch.randint(CLASSES, (batch,), generator=drawn)
    optimizer = torch.optim.AdamW(model.train().parameters(), fused=True)
    return Step(model, logits, optimizer, images, labels, dtype).run


def race(kind: str, batch: int, rounds: int, threads: int | None) -> None:
    """Print images per second of our dense Swin, and ratios of times."""
    for precision in ("float32", "bfloat16"):
        words = ["--kind", kind, "--batch", str(batch), "--precision", precision]
        words += ["--threads", str(threads)] if threads else []
        command = [sys.executable, "-m", "benchmarks.swin", *words, "--one"]
        seconds = processes_take_turns({name: [*command, name] for name in CONTESTANTS}, rounds)
        own = median(seconds["ours"])
        print(f"{kind}, {precision}: {batch / own:.1f} images/s, {1e3 * own:.0f} ms a step")
        for one, other, to_reach in (
            ("ours", "timm", f", to reach {TARGET}"),
            ("ours", "timm with our settings", ""),
            ("experts", "ours", ""),
        ):
            found = Ratio.of(seconds[one], seconds[other])
            print(
                f"  {one} over {other}: {found.median:.2f} ({found.low:.2f} to {found.high:.2f}; "
                f"minima {found.minimum:.2f}{to_reach})",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=LEAST)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--threads", type=int, help="default: all cores")
    parser.add_argument("--kind", choices=SIZES, default="swin")
    parser.add_argument("--one", choices=CONTESTANTS, help=argparse.SUPPRESS)
    parser.add_argument("--precision", default="float32", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.one:
        race(options.kind, options.batch, options.rounds, options.threads)
        return
    if options.one != "timm":
        tune_runtime()
    if options.threads:
        torch.set_num_threads(options.threads)
    serve(contestant(options.one, options.kind, options.batch, getattr(torch, options.precision)))


if __name__ == "__main__":
    main()
