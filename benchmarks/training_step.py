"""Images per second of a training step: ours against the same model on stock PyTorch.

    python -m benchmarks.training_step [--rounds 8]

The model, batch and optimiser are those of params.yaml (method vmoe). "Stock" is what one writes first: fused attention
(SDPA), a convolution for the patches, a loop over boolean masks for the experts, AdamW as it comes, fp32, no settings of the
machine. The allocator cannot be set back, so each turn is a process of its own; the two take turns, and ratios are pairwise.
"""

import argparse
import subprocess
import sys
import time
from statistics import median

import torch
from torch.nn.functional import conv2d, gelu, scaled_dot_product_attention

from moecore.backbones import Backbone
from moecore.backbones.image import ImageSpec
from moecore.config import Config
from moecore.layers import attention, moe, patch_embed
from moecore.params import read
from moecore.records import Batch, Step
from moecore.training.method import Method
from moecore.training.objective import Objective
from moecore.training.optimizer import build_optimizer
from moecore.training.runtime import tune
from moecore.training.settings import Training

IMAGE = ImageSpec(channels=1, size=28, classes=tuple("0123456789"), mean=(0.3,), std=(0.3,))
WARM, TIMED = 5, 20


class Params(Config):
    """What is taken from params.yaml."""

    model: Backbone
    pretrain: Training
    methods: dict[str, Method]


def masked_experts(self: moe.MoELayer, tokens: torch.Tensor) -> tuple:
    """The MoE layer as a loop over boolean masks, with ``w[e]``."""
    _, record = self.router(tokens)
    experts, outputs = self.experts, torch.zeros_like(tokens)
    for expert in range(len(experts.up)):
        chosen = record.chosen[..., expert]
        hidden = gelu(tokens[chosen] @ experts.up[expert] + experts.up_bias[expert])
        outputs[chosen] += record.combine[..., expert][chosen].unsqueeze(-1) * (hidden @ experts.down[expert] + experts.down_bias[expert])
    return outputs, (record,)


def go_stock() -> None:
    """Replace what is ours by what PyTorch offers first."""
    attention.attend = scaled_dot_product_attention
    moe.MoELayer.forward = masked_experts
    patch_embed.PatchEmbed.forward = lambda self, images: conv2d(images, self.proj.weight, self.proj.bias, stride=self.patch).flatten(2).transpose(1, 2)


def rate(stock: bool) -> float:
    """Images per second, the median over steps."""
    params, dtype = read(Params), torch.float32
    if stock:
        go_stock()
    else:
        dtype = tune().dtype(params.pretrain.precision)
    torch.manual_seed(0)
    method, settings = params.methods["vmoe"], params.pretrain
    model, objective = params.model.build(IMAGE, method.moe), Objective(method.regularizers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3) if stock else build_optimizer(model, settings)
    times = []
    for _ in range(WARM + TIMED):
        batch = Batch(torch.rand(settings.batch, 1, 28, 28), torch.randint(0, 10, (settings.batch,)), torch.empty(0))
        start = time.perf_counter()
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            output = model(batch.images)
        loss = objective.total(objective.terms(Step(batch, output, model)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        times.append(time.perf_counter() - start)
    return settings.batch / median(times[WARM:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--one", choices=("ours", "stock"))
    words = parser.parse_args()
    if words.one:
        print(rate(words.one == "stock"))
        return
    rates: dict[str, list[float]] = {"ours": [], "stock": []}
    for _ in range(words.rounds):
        for name, found in rates.items():
            done = subprocess.run([sys.executable, "-m", "benchmarks.training_step", "--one", name], capture_output=True, text=True, check=True)
            found.append(float(done.stdout))
    ratios = sorted(stock / ours for ours, stock in zip(rates["ours"], rates["stock"], strict=True))
    for name, found in rates.items():
        print(f"{name}: {median(found):,.0f} images/s (min {min(found):,.0f}, max {max(found):,.0f})")
    print(f"step time, ours / stock: {median(ratios):.2f} (min {ratios[0]:.2f}, max {ratios[-1]:.2f}; {words.rounds} rounds, {torch.get_num_threads()} threads)")


if __name__ == "__main__":
    main()
