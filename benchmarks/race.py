"""All races: the MoE layer against dense MLPs, limits and peers; the training step; what regularizers cost. Writes one JSON.

    python -m benchmarks.race [--quick] [--only layer peers step regularizers] [--json benchmarks/race.json]
    python -m benchmarks.table benchmarks/race.json

Contestants take turns in one process (training steps: one process each), 8 rounds or more; a figure is the median of the
rounds' ratios, with its quartiles, and the ratio of the shortest turns. Run it with nothing else on the machine.
--quick takes 3 rounds and leaves out what is slow; its figures do not count.
"""

import argparse
import gc
import json
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import torch
from rich.console import Console

from benchmarks import layers, training_step
from benchmarks.layers import Size, step
from benchmarks.limit import limit, weight_traffic
from benchmarks.machine import Peaks, described, peaks, versions
from benchmarks.peers import PEERS, Peer, Unfit, leave_group, torch_dtype
from benchmarks.timing import LEAST, Ratio, Run, take_turns
from moecore.records import Guidance
from moecore.regularizers.group_sparsity import GroupSparsity
from moecore.regularizers.pairwise_consistency import PairwiseConsistency
from moecore.regularizers.router_kl import RouterKl
from moecore.training.runtime import tune

VIT_S = Size(images=32, tokens=197, width=384, hidden=1536, experts=8, k=2)
MANY = VIT_S._replace(experts=128, k=1)
HUNDREDS = Size(images=1, tokens=200, width=784, hidden=64, experts=400, k=1)
DENSE = ((VIT_S, "float32", 1.10), (VIT_S, "bfloat16", 1.20), (MANY, "bfloat16", 1.9))
TARGETS = {  # ours / peer, by number of experts where it depends on it
    "transformers grouped_mm": 0.85,
    "transformers eager": {8: 0.85, 128: 0.05, 400: 0.02},
    "st-moe-pytorch": 0.65,
    "mixture-of-experts": 0.75,
    "DeepSpeed": 0.82,
    "soft-moe-pytorch": None,
}
REGULARIZER = 1.02
STEP_LIMIT = 2.5


def row(race: str, what: str, precision: str, seconds: list[float], against: list[float], target: float | None, note: str = "") -> dict:
    """One figure as it stands in the JSON."""
    ratio = Ratio.of(seconds, against)
    times = {"ms": 1e3 * median(seconds), "against_ms": 1e3 * median(against), "rounds": len(seconds)}
    return {"race": race, "what": what, "precision": precision, **ratio._asdict(), **times, "target": target, "note": note}


def skipped(race: str, what: str, precision: str, reason: str) -> dict:
    return {"race": race, "what": what, "precision": precision, "skipped": reason}


def layer_rows(rounds: int, found: Peaks) -> Iterator[dict]:
    """Ours against the dense MLP of equal active FLOPs, and against the traffic of the weights where that is what it waits for."""
    for size, precision, target in DENSE:
        runs = {build.__name__: step(build(size), size, torch_dtype(precision)) for build in (layers.ours, layers.dense)}
        seconds = take_turns(runs, rounds)
        yield row("layer / dense MLP", f"ViT-S, {size.shown()}", precision, seconds["ours"], seconds["dense"], target)
    for precision in ("float32", "bfloat16"):
        layer = layers.ours(HUNDREDS)
        seconds = take_turns({"ours": step(layer, HUNDREDS, torch_dtype(precision))}, 4 * rounds)["ours"]
        least = weight_traffic(list(layer.parameters())) / found.bandwidth
        note = "limit: fp32 weights read twice and their gradients written once, at the measured bandwidth"
        yield row("layer / weight traffic", HUNDREDS.shown(), precision, seconds, [least] * len(seconds), 3.0, note)


def peer_rows(rounds: int, quick: bool, most: float) -> Iterator[dict]:
    """Ours against every installed peer at 8, 128 and 400 experts."""
    for peer in PEERS:
        for size in (VIT_S, MANY, HUNDREDS):
            gc.collect()
            yield from _peer_rows(peer, size, rounds, quick, most)
    leave_group()


def _peer_rows(peer: Peer, size: Size, rounds: int, quick: bool, most: float) -> Iterator[dict]:
    race, precision = f"layer / {peer.name}", "bfloat16"
    if peer.missing:
        yield skipped(race, size.shown(), precision, f"{peer.module} is not installed (pip install -c constraints.txt -e '.[bench]')")
    elif quick and size.experts > 8:
        yield skipped(race, size.shown(), precision, "left out by --quick")
    else:
        yield _peer_row(peer, size, rounds, race, precision, most)


def _peer_row(peer: Peer, size: Size, rounds: int, race: str, precision: str, most: float) -> dict:
    target = TARGETS[peer.name]
    target = target[size.experts] if isinstance(target, dict) else target
    try:
        theirs = peer.build(size)
    except Unfit:  # the peers with seats choose exactly 2: ours does too
        size = size._replace(k=2)
        theirs = peer.build(size)
    dtype = torch_dtype(precision)
    runs = {"ours": step(peer.ours(size), size, dtype, *_parameters(peer)), "peer": step(theirs, size, dtype, *_parameters(peer))}
    seconds = take_turns(runs, rounds, most=most)
    return row(race, size.shown(), precision, seconds["ours"], seconds["peer"], target, peer.note)


def _parameters(peer: Peer) -> tuple[torch.dtype, ...]:
    return (torch.bfloat16,) if peer.parameters else ()


def step_rows(rounds: int, found: Peaks, names: tuple[str, ...]) -> Iterator[dict]:
    """The training step against the same model on stock torch, the dense ViT, and its own limit."""
    for name in names:
        seconds, size = training_step.race(name, rounds), training_step.sizes()[name]
        for contestant, target in training_step.TARGETS.items():
            precision = contestant.split()[1]
            yield row("step / stock torch", name, precision, seconds[contestant], seconds["stock"], target)
            run = training_step.bench(size, torch_dtype(precision)).step
            run()
            least = limit(run, found)
            yield row("step / limit", name, precision, seconds[contestant], [least] * rounds, STEP_LIMIT)
        yield row(
            "step / dense ViT",
            name,
            "bfloat16",
            seconds["ours bfloat16"],
            seconds["dense bfloat16"],
            None,
            "2 of the blocks hold experts, 2 per token",
        )


def regularizer_rows(rounds: int, name: str = "vit_tiny") -> Iterator[dict]:
    """What a regularizer adds to the step of a V-MoE that has what it needs: second view, teacher's routing."""
    size = training_step.sizes()[name]
    for regularizer, views, note in (
        (GroupSparsity(), 1, ""),
        (PairwiseConsistency(), 2, "both steps have two views"),
        (RouterKl(), 1, "both steps have the teacher's routing; its forward is not timed"),
    ):
        runs = {word: _regularized(size, views, extra) for word, extra in (("with", (regularizer,)), ("without", ()))}
        seconds = take_turns(runs, 2 * rounds)
        yield row(
            "step with / without regularizer", f"{regularizer.kind}, {name}", "bfloat16", seconds["with"], seconds["without"], REGULARIZER, note
        )


def _regularized(size: training_step.Size, views: int, regularizers: tuple) -> Run:
    made = training_step.bench(size, torch.bfloat16, views=views, regularizers=regularizers)
    with torch.no_grad():
        output = made.model(made.batch.images)
    probs = tuple(torch.softmax(torch.randn_like(record.probs), dim=-1) for record in output.routing)
    return made._replace(guidance=Guidance(output.prediction, probs)).step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", nargs="+", choices=("layer", "peers", "step", "regularizers"), default=["layer", "peers", "step", "regularizers"])
    parser.add_argument("--rounds", type=int, default=12, help=f"rounds of each race (default 12; at least {LEAST})")
    parser.add_argument("--seconds", type=float, default=240, help="of one race with a peer at most; the slowest take many seconds a turn (default 240)")
    parser.add_argument("--models", nargs="+", default=["default", "vit_tiny", "vit_s"], help="of the races of the training step")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/race.json"))
    options = parser.parse_args()
    if options.rounds < LEAST:
        parser.error(f"--rounds is {options.rounds}; a figure needs at least {LEAST}")
    rounds, runtime = 3 if options.quick else options.rounds, tune()
    found = peaks()
    machine = described(runtime) | {"peak_flops": found.flops, "bandwidth": found.bandwidth}
    races = {
        "layer": lambda: layer_rows(rounds, found),
        "peers": lambda: peer_rows(rounds, options.quick, options.seconds),
        "step": lambda: step_rows(rounds, found, ("default", "vit_tiny") if options.quick else tuple(options.models)),
        "regularizers": lambda: regularizer_rows(rounds),
    }
    console, rows = Console(stderr=True), []
    for name in options.only:
        for figure in races[name]():
            rows.append(figure)
            shown = figure.get("skipped") or f"{figure['median']:.3f} [{figure['low']:.3f}, {figure['high']:.3f}]"
            console.print(f"{figure['race']}: {figure['what']}, {figure['precision']}: {shown}", highlight=False)
            result = {"machine": machine, "versions": versions(), "quick": options.quick, "rows": rows}
            options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
