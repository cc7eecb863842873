"""Where one way of computing MLP experts overtakes another on CPU, by rows per expert.

    python -m benchmarks.crossover [--rounds 8] [--only few many] [--threads 2]

few: many experts with few rows each: one batched product for a group of experts against one
product for each (``cpu_expert_groups.py``).  many: few experts with many rows: all steps of an
expert at once (``ExpertLoop``) against two calls of grouped_linear, which take grouped_mm from
1,024 rows per expert on. Forward and backward; weights in fp32; rows per expert vary as chance
makes them. A ratio below 1 speaks for the first; its smaller figure is that of the two shortest
turns.
"""

import argparse
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import gelu

from benchmarks import layers
from benchmarks.layers import Size
from benchmarks.peers import torch_dtype
from benchmarks.timing import LEAST, Ratio, take_turns
from moecore.nn.dispatch import SparsePlan
from moecore.nn.experts.mlp import Mlp
from moecore.nn.kernels import cpu_expert_loop
from moecore.nn.kernels.grouped import grouped_linear, grouped_mlp
from moecore.training.runtime import tune_runtime

Experts = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
FEW = (0.5, 1, 2, 8, 16, 32, 48, 64, 96)  # rows per expert
MANY = (256, 1024, 2048, 4096)
NEVER = 1 << 30


def two_calls(
    rows: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor, offsets: Tensor
) -> Tensor:
    """Compute each of the two layers for all experts before the next one."""
    hidden = gelu(grouped_linear(rows, up, up_bias, offsets))
    return grouped_linear(hidden, down, down_bias, offsets)


def step(way: Experts, size: Size, dtype: torch.dtype, grouped: bool = True) -> Callable[[], None]:
    """Return a call that computes the gradients of rows, weights and biases of the experts.

    Without ``grouped`` each expert is computed separately.
    """
    generator = torch.Generator().manual_seed(0)
    tokens = layers.tokens_of(size)
    chosen = torch.randint(0, size.experts, (*tokens.shape[:2], 1), generator=generator)
    plan = SparsePlan.build(chosen, torch.ones(chosen.shape), None, size.experts)
    rows = plan.dispatch(tokens).values.to(dtype).requires_grad_()
    towards = torch.randn(rows.shape, generator=generator).to(dtype)
    experts = Mlp(number=size.experts, hidden_ratio=size.hidden / size.width).build(size.width)
    leaves = [rows, *experts.parameters()]

    def run() -> None:
        usual = cpu_expert_loop.MIN_EXPERTS_TO_GROUP
        if not grouped:
            cpu_expert_loop.MIN_EXPERTS_TO_GROUP = NEVER
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype != torch.float32):
            outputs = way(
                rows, experts.up, experts.up_bias, experts.down, experts.down_bias, plan.offsets
            )
        torch.autograd.grad(outputs, leaves, towards)
        cpu_expert_loop.MIN_EXPERTS_TO_GROUP = usual

    return run


def few(experts: int, width: int, hidden: int, precision: str, rounds: int) -> None:
    """Print groups of experts against separate experts."""
    dtype = torch_dtype(precision)
    for share in FEW:
        size = Size(1, round(share * experts), width, hidden, experts, 1)
        runs = {
            "groups": step(grouped_mlp, size, dtype),
            "one by one": step(grouped_mlp, size, dtype, grouped=False),
        }
        shown(size, precision, take_turns(runs, rounds, warm=3))


def many(experts: int, width: int, hidden: int, precision: str, rounds: int) -> None:
    """Print experts computed in one call against one call per layer."""
    dtype = torch_dtype(precision)
    for share in MANY:
        size = Size(1, share * experts, width, hidden, experts, 1)
        runs = {
            "at once": step(grouped_mlp, size, dtype),
            "two calls": step(two_calls, size, dtype),
        }
        shown(size, precision, take_turns(runs, rounds, warm=3))


def shown(size: Size, precision: str, turns: dict[str, list[float]]) -> None:
    """Print a line with the first contestant's time divided by the second's."""
    (name, first), (other, second) = turns.items()
    ratio = Ratio.of(first, second)
    print(
        f"{size.shown()}, {size.tokens / size.experts:g} rows per expert, {precision}: {name} / "
        f"{other} {ratio.median:.2f} (minima {ratio.minimum:.2f}), {1e3 * min(first):.1f} ms",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=LEAST)
    parser.add_argument("--only", nargs="+", choices=("few", "many"), default=["few", "many"])
    parser.add_argument("--threads", type=int, help="default: all cores")
    options = parser.parse_args()
    runtime = tune_runtime()
    if options.threads:
        torch.set_num_threads(options.threads)
    print(f"{runtime.device_name}, {torch.get_num_threads()} threads")
    for precision in ("float32", "bfloat16"):
        if "few" in options.only:
            few(400, 784, 64, precision, options.rounds)
            few(128, 384, 1536, precision, options.rounds)
        if "many" in options.only:
            many(8, 64, 64, precision, options.rounds)
            many(8, 384, 1536, precision, options.rounds)


if __name__ == "__main__":
    main()
