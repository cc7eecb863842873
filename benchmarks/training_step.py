"""Race of a whole training step: ours, the dense ViT, and the same model on stock PyTorch.

    python -m benchmarks.training_step [--rounds 8] [--size default vit_tiny vit_s] [--device cuda]

"Stock" is what one writes first: fused attention (SDPA), a convolution for the patches, a loop over
boolean masks for the experts, AdamW as it comes, fp32, no settings of the machine. The allocator
cannot be set back, so each contestant is a process of its own that waits for its turn; they take
turns, and ratios are those of one round. On a GPU batches are sixteen times as large, and ours is
there with its blocks compiled, too.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import conv2d, gelu, scaled_dot_product_attention

from benchmarks.layers import wait
from benchmarks.timing import LEAST, Ratio, processes_take_turns, serve
from moecore.core.config import Config
from moecore.core.routing_records import (
    Batch,
    Guidance,
    ModelOutput,
    ObjectiveInputs,
    RoutingContext,
)
from moecore.data.loader import LoadedSplit
from moecore.nn.backbones.base_model import BackboneModel, ImageSpec
from moecore.nn.backbones.vit import Vit
from moecore.nn.experts.mlp import Mlp as MlpExperts
from moecore.nn.layers import block, moe, patch_embed
from moecore.nn.routers.noisy_top_k import NoisyTopK
from moecore.study.params_reader import read_stage_params
from moecore.tasks.classification import Classification
from moecore.training.job import Objective, TrainingJob
from moecore.training.loop import train_step
from moecore.training.method import Method
from moecore.training.regularizers.importance import Importance
from moecore.training.regularizers.load import Load
from moecore.training.runtime import KERNELS_ENV, Compile, CompiledBlocks, tune_runtime
from moecore.training.settings import Training, build_optimizer
from moecore.training.step_graph import WARM_UP, GraphedStepRunner, StepInputs, StepOutput


class Size(NamedTuple):
    """A model, its images and its batch; ``last_2`` blocks hold the experts, 2 per token."""

    model: Vit
    channels: int
    side: int  # pixels
    classes: int
    batch: int
    hidden_ratio: float  # hidden width of an expert / width
    experts: int = 8

    @property
    def image(self) -> ImageSpec:
        """The description of the images."""
        return ImageSpec(
            channels=self.channels,
            size=self.side,
            task=Classification(classes=tuple(map(str, range(self.classes)))),
            mean=(0.5,) * self.channels,
            std=(0.3,) * self.channels,
        )

    @property
    def vmoe(self) -> Method:
        """The V-MoE that other contestants are compared with."""
        experts = MlpExperts(number=self.experts, hidden_ratio=self.hidden_ratio)
        losses = (Importance(), Load())
        return Method(router=NoisyTopK(k=2), experts=experts, regularizers=losses)


class Defaults(Config):
    """The sections of params.yaml that the size ``default`` has."""

    model: Vit
    pretrain: Training


def sizes() -> dict[str, Size]:
    """Return name → size; ``default`` has model and batch of params.yaml, 24 × 24 grey pixels."""
    defaults = read_stage_params(Defaults)
    return {
        "default": Size(defaults.model, 1, 24, 10, defaults.pretrain.batch, 1.0),
        "vit_tiny": Size(Vit(patch=4, width=192, depth=12, heads=3), 3, 32, 10, 64, 4.0),
        "vit_s": Size(Vit(patch=16, width=384, depth=12, heads=6), 3, 224, 100, 8, 4.0),
        "dry": Size(Vit(patch=4, width=16, depth=4, heads=2), 1, 8, 10, 2, 1.0),  # no race
    }


# name → precision
CONTESTANTS = {
    "ours float32": torch.float32,
    "ours bfloat16": torch.bfloat16,
    "dense bfloat16": torch.bfloat16,
    "stock": torch.float32,
}
COMPILED = "ours bfloat16, compiled"  # only on a GPU
# A training's step by ``GraphedStepRunner``: eager, replayed, and with experts in Triton.
EAGER, REPLAYED, TRITON = "eager", "graph", "Triton"
REPLAYS = (EAGER, REPLAYED, TRITON, f"{REPLAYED}, {TRITON}")
MORE_EXPERTS = ", E "  # before their number, in the name of a contestant in bf16
TARGETS = {"ours float32": 0.55, "ours bfloat16": 0.40}  # time / time of the stock step
LARGER = 16  # batch on a GPU / batch on a CPU
PROGRESS = 0.5  # completed share of the training


class Bench(NamedTuple):
    """The model, optimizer, loss and batch of a training step."""

    model: BackboneModel
    optimizer: torch.optim.Optimizer
    objective: Objective
    dtype: torch.dtype
    batch: Batch
    guidance: Guidance | None = None
    blocks: CompiledBlocks | None = None
    updates_routers: bool = True

    def step(self) -> None:
        """Compute forward, loss, backward and update, and wait for the device."""
        self.queued()
        wait(self.device)

    @property
    def device(self) -> str:
        return self.batch.images.device.type

    def queued(self) -> None:
        """Compute a step as ``step`` does, without waiting for the device."""
        with self.blocks.using_compiled_blocks() if self.blocks else nullcontext():
            self._update()

    def output(self) -> ModelOutput:
        """Return the model's output for the batch."""
        with torch.autocast(self.device, dtype=self.dtype, enabled=self.dtype != torch.float32):
            return self.model(self.batch.images, None, PROGRESS)

    def _update(self) -> None:
        output = self.output()
        step = ObjectiveInputs(self.batch, output, self.model, self.guidance, PROGRESS)
        loss = self.objective.total(self.objective.terms(step))
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        if self.updates_routers:
            self.model.end_step(output, PROGRESS)


def bench(
    size: Size,
    method: Method,
    dtype: torch.dtype,
    *,
    stock: bool = False,
    views: int = 1,
    device: str = "cpu",
    compiled: bool = False,
    updates_routers: bool = True,
) -> Bench:
    """Build a method's step on random images: ``views`` for each of the batch's labels."""
    torch.manual_seed(0)
    model = size.model.build(size.image, method.moe).to(device)
    if stock:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    else:
        optimizer = build_optimizer(model, Training(epochs=1, batch=size.batch, learning_rate=1e-3))
    count = size.batch * views
    images = torch.rand(count, size.channels, size.side, size.side).to(device)
    affines = torch.eye(3).expand(count, 3, 3).to(device)
    labels = torch.randint(0, size.classes, (size.batch,)).repeat(views).to(device)
    objective = Objective(method.regularizers)
    blocks = CompiledBlocks([model], "required", 10**6) if compiled else None
    batch = Batch(images, labels, affines, views)
    guidance = None
    return Bench(model, optimizer, objective, dtype, batch, guidance, blocks, updates_routers)


def masked_experts(
    self: moe.MoEFeedForward, tokens: Tensor, context: RoutingContext = RoutingContext()
) -> tuple:
    """Compute the MoE layer by a loop over experts, with boolean masks of their tokens."""
    _, record = self.router(tokens)
    experts = self.experts
    outputs = torch.zeros_like(tokens)
    for expert in range(len(experts.up)):
        chosen = record.chosen[..., expert]
        hidden = gelu(tokens[chosen] @ experts.up[expert] + experts.up_bias[expert])
        outputs[chosen] += record.combine[..., expert][chosen].unsqueeze(-1) * (
            hidden @ experts.down[expert] + experts.down_bias[expert]
        )
    return outputs, (record,)


def go_stock() -> None:
    """Replace our attention, MoE layer and patch embedding by PyTorch's plain operations.

    It cannot be undone, so call it only in a separate process.
    """
    block.softmax_attention = lambda query, key, value, causal=False: scaled_dot_product_attention(
        query, key, value, is_causal=causal
    )
    moe.MoEFeedForward.forward = masked_experts
    patch_embed.PatchEmbed.forward = lambda self, images: (
        conv2d(images, self.proj.weight, self.proj.bias, stride=self.patch)
        .flatten(2)
        .transpose(1, 2)
    )


def sized(name: str, device: str) -> Size:
    """Return the size ``name``, with ``LARGER`` times its batch on a GPU."""
    size = sizes()[name]
    return size._replace(batch=size.batch * LARGER) if device == "cuda" else size


def graph_step(size: Size, policy: Compile, device: str) -> Callable[[], None]:
    """Return V-MoE's step in bf16 with training's graph runner, after warm-up and capture."""
    made = bench(size, size.vmoe, torch.bfloat16, device=device)
    data = LoadedSplit(made.batch.images, made.batch.labels)
    job = TrainingJob(made.model, data, data, made.objective, None, 1)
    settings = Training(epochs=1, batch=size.batch, learning_rate=1e-3)

    def run_step(inputs: StepInputs) -> StepOutput:
        batch, rate, progress, _ = inputs
        optimizer, dtype = made.optimizer, made.dtype
        return train_step(job, settings, optimizer, batch, rate, dtype, progress)

    graph = GraphedStepRunner(job, made.optimizer, run_step, policy)

    def step() -> None:
        graph.take(StepInputs(made.batch, 1e-3, PROGRESS, 0))
        wait(device)

    for _ in range(WARM_UP + 3):  # eager, captured, compared
        step()
    return step


def contestant(name: str, size: str, device: str) -> Callable[[], None]:
    """Configure this process as a contestant, and return its step."""
    stock = name == "stock"
    words = name.split(", ")
    if TRITON in words:
        os.environ[KERNELS_ENV] = "triton"
    if stock:
        go_stock()
    else:
        tune_runtime(device)
    own = sized(size, device)
    if name in REPLAYS:
        is_replayed = REPLAYED in words and device == "cuda"
        return graph_step(own, "required" if is_replayed else "off", device)
    if MORE_EXPERTS in name:
        own = own._replace(experts=int(name.rpartition(MORE_EXPERTS)[2]))
    return bench(
        own,
        Method() if name.startswith("dense") else own.vmoe,
        CONTESTANTS.get(name, torch.bfloat16),
        stock=stock,
        device=device,
        compiled=name == COMPILED,
    ).step


def with_experts(number: int) -> str:
    """Return the name of our contestant in bf16 with this number of experts."""
    return f"ours bfloat16{MORE_EXPERTS}{number}"


def race(
    size: str, rounds: int, device: str = "cpu", more_experts: Sequence[int] = ()
) -> dict[str, list[float]]:
    """Race all contestants; return contestant → seconds of a step, per round."""
    names = [*CONTESTANTS, *map(with_experts, more_experts)]
    if device == "cuda":
        names.append(COMPILED)
    return race_steps(names, size, rounds, device)


def race_steps(
    names: Sequence[str],
    size: str,
    rounds: int,
    device: str,
    failures: dict[str, str] | None = None,
) -> dict[str, list[float]]:
    """Race ``names``; return contestant → seconds. failures: see ``processes_take_turns``."""
    words = ["--size", size, "--device", device, "--one"]
    command = [sys.executable, "-m", "benchmarks.training_step", *words]
    commands = {name: [*command, name] for name in names}
    return processes_take_turns(commands, rounds, device == "cuda", failures)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=LEAST)
    parser.add_argument("--size", nargs="+", choices=tuple(sizes()), default=["default"])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        serve(contestant(options.one, options.size[0], options.device))
        return
    for size in options.size:
        seconds = race(size, options.rounds, options.device)
        for name, found in seconds.items():
            ratio = Ratio.of(found, seconds["stock"])
            rate = sized(size, options.device).batch / median(found)
            print(
                f"{size}, {name}: {rate:,.0f} images/s; step / stock {ratio.median:.2f} (minima "
                f"{ratio.minimum:.2f}, quartiles {ratio.low:.2f} to {ratio.high:.2f})"
            )


if __name__ == "__main__":
    main()
