"""Race of one MoE layer (forward and backward) against a dense MLP of equal active FLOPs: the
shortest of the races.

    python -m benchmarks.moe_layer [--rounds 12]

ViT-S: width 384, hidden 1536, 6304 tokens; 8 experts with 2 per token in fp32 and bf16, 128 experts
with 1 per token in bf16. The contestants take turns in one process. To reach on CPU: 1.10 in fp32,
1.20 in bf16, 1.9 with 128 experts.
"""

import argparse

from benchmarks.machine import peaks
from benchmarks.race import layer_rows
from benchmarks.timing import LEAST
from moecore.training.runtime import tune


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=12,
        help=f"rounds in which each contestant runs once (default 12; at least {LEAST})",
    )
    options = parser.parse_args()
    if options.rounds < LEAST:
        parser.error(f"--rounds is {options.rounds}; a median needs at least {LEAST}")
    runtime = tune()
    print(f"{runtime.device_name}, {runtime.threads} threads")
    for row in layer_rows(options.rounds, peaks()):
        times = f"{row['ms']:.1f} ms against {row['against_ms']:.1f} ms"
        print(
            f"{row['race']}, {row['what']}, {row['precision']}: {row['median']:.2f} (minima "
            f"{row['minimum']:.2f}, to reach {row['target']:g}); {times}"
        )


if __name__ == "__main__":
    main()
