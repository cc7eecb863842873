"""Time the tilings of the kernels in Triton on this card, and write the quickest to a file.

    python -m benchmarks.triton_tune [.state/triton.json]

Layers of ViT-S with 8 experts, forward and backward, in bf16 and in fp32. The kernels read it,
or what $MOECORE_TRITON_TILINGS names.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from unittest.mock import patch

import torch

from benchmarks import layers
from benchmarks.layers import Size, step
from benchmarks.peers import torch_dtype
from benchmarks.race import CUDA, VIT_S, build_on
from benchmarks.timing import take_turns
from moecore.core.files import read_json, write_json

KINDS = ("product", "weights")


def time_tilings(
    size: Size, precision: str, rounds: int
) -> Iterator[tuple[str, list[int], float, bool]]:
    """Yield kind with bytes per entry, tiling, ms per step, and whether it is the quickest."""
    from moecore.nn.kernels import triton_experts

    dtype = torch_dtype(precision)
    default = triton_experts.TILINGS[dtype.itemsize][0]
    layer = build_on(CUDA, layers.ours, size)
    call = layers.with_kernels("triton", step(layer, size, dtype, device=CUDA), CUDA)
    for kind in KINDS:
        tilings = {str(list(tiling)): tiling for tiling in triton_experts.TILINGS[dtype.itemsize]}
        runs = {}
        for name, tiling in tilings.items():

            def run(kind=kind, tiling=tiling) -> None:
                choose = lambda _, other, __: tiling if other == kind else default
                with patch.object(triton_experts, "read_tiling", choose):
                    call()

            runs[name] = run
        turns = {name: median(times) for name, times in take_turns(runs, rounds).items()}
        best = min(turns, key=turns.__getitem__)
        for name, seconds in turns.items():
            yield f"{kind} {dtype.itemsize}", list(tilings[name]), 1e3 * seconds, name == best


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, nargs="?", default=Path(".state/triton.json"))
    path = parser.parse_args().file
    if not torch.cuda.is_available():
        parser.error("found no GPU; allowed: a machine with one")
    card = torch.cuda.get_device_name()
    table = read_json(path) if path.exists() else {}
    for precision in ("bfloat16", "float32"):
        for kind, tiling, ms, is_best in time_tilings(VIT_S._replace(images=336), precision, 8):
            print(f"{kind} {tiling}: {ms:.3f} ms", flush=True)
            if is_best:
                table.setdefault(card, {})[kind] = tiling
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, table)


if __name__ == "__main__":
    main()
