"""All races: the MoE layer against dense MLPs, limits and peers; the training step; what
regularizers, routers and their updates cost. Writes one JSON.

    python -m benchmarks.race [--quick] [--only layer peers step regularizers
        routers hook waits] [--device cuda]
    python -m benchmarks.table benchmarks/race.json

On a GPU steps have 16 times the batch and are raced compiled too, and "waits" counts where a step's
host waits for the device; benchmarks/gpu.py races layers and peers there. What is written there is
benchmarks/race_cuda.json.
Contestants take turns in one process (training steps: one process each), 8 rounds or more; a figure
is the median of the rounds' ratios, with its quartiles, and the ratio of the shortest turns. Run it
with nothing else on the machine.
--quick takes 3 rounds and leaves out what is slow; its figures do not count.
"""

import argparse
import gc
import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from rich.console import Console
from torch import nn

from benchmarks import layers, routers, training_step
from benchmarks.layers import Size, step, wait
from benchmarks.limit import Peaks, describe_machine, limit, peaks, versions, weight_traffic
from benchmarks.peers import PEERS, Peer, Unfit, leave_group, torch_dtype
from benchmarks.timing import LEAST, Ratio, Run, take_turns
from moecore.core.routing_records import Guidance
from moecore.training.regularizers.group_sparsity import GroupSparsity
from moecore.training.regularizers.pairwise_consistency import PairwiseConsistency
from moecore.training.regularizers.router_kl import RouterKl
from moecore.training.runtime import tune_runtime

VIT_S = Size(images=32, tokens=197, width=384, hidden=1536, experts=8, k=2)
MANY = VIT_S._replace(experts=128, k=1)
HUNDREDS = Size(images=1, tokens=200, width=784, hidden=64, experts=400, k=1)
DENSE = ((VIT_S, "float32", 1.10), (VIT_S, "bfloat16", 1.10), (MANY, "bfloat16", 1.9))
TARGETS = {  # ours / peer, by number of experts where it depends on it
    "transformers grouped_mm": 0.85,
    "transformers eager": {8: 0.85, 128: 0.05, 400: 0.02},
    "st-moe-pytorch": 0.65,
    "mixture-of-experts": 0.75,
    "DeepSpeed": 0.82,
    "soft-moe-pytorch": None,
}
CUDA = "cuda"
RACES = {
    "cpu": ("layer", "peers", "step", "regularizers", "routers", "hook"),
    CUDA: ("step", "routers", "hook", "waits"),
}
MODELS = ("default", "vit_tiny", "vit_s")
REGULARIZER = 1.02
ROUTER = 1.05
HOOK = 0.01


class StepTargets(NamedTuple):
    """Ratios that a training step should reach."""

    stock: Mapping[str, float]  # to the step on stock torch, by contestant
    limit: float  # to the limit of the machine


STEP_TARGETS = {
    "cpu": StepTargets(training_step.TARGETS, 2.5),
    CUDA: StepTargets(dict.fromkeys(training_step.TARGETS, 0.5), 2.0),
}


def row(
    race: str,
    what: str,
    precision: str,
    seconds: list[float],
    against: list[float],
    target: float | None,
    note: str = "",
) -> dict:
    """Return a figure as it is stored in the JSON; times are in ms."""
    ratio = Ratio.of(seconds, against)
    times = {
        "ms": 1e3 * median(seconds),
        "against_ms": 1e3 * median(against),
        "rounds": len(seconds),
    }
    return {
        "race": race,
        "what": what,
        "precision": precision,
        **ratio._asdict(),
        **times,
        "target": target,
        "note": note,
    }


def skipped(race: str, what: str, precision: str, reason: str) -> dict:
    return {"race": race, "what": what, "precision": precision, "skipped": reason}


def count_host_waits(run: Run) -> int:
    """Return how often the host waits for the GPU during ``run``."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in caught)


def wait_rows(names: tuple[str, ...]) -> Iterator[dict]:
    """Yield the number of host waits per training step, for each method."""
    for name in names:
        size = training_step.sized(name, CUDA)
        methods = {kind: each.method(size) for kind, each in routers.CONTESTANTS.items()}
        for kind, method in ({"V-MoE": size.vmoe} | methods).items():
            made = training_step.bench(size, method, torch.bfloat16, device=CUDA)
            for _ in range(3):  # the first steps load libraries
                made.step()
            reason = f"{count_host_waits(made.queued)} waits of the host"
            yield skipped("waits in a step", f"{kind}, {name}", "bfloat16", reason)


def layer_rows(rounds: int, found: Peaks) -> Iterator[dict]:
    """Yield our layer against the dense MLP of equal active FLOPs.

    With hundreds of experts it is limited by memory, and raced against the weights' traffic.
    """
    for size, precision, target in DENSE:
        runs = {
            build.__name__: step(build(size), size, torch_dtype(precision))
            for build in (layers.ours, layers.dense)
        }
        turns = take_turns(runs, rounds)
        what = f"ViT-S, {size.shown()}"
        yield row("layer / dense MLP", what, precision, turns["ours"], turns["dense"], target)
    note = (
        "limit: fp32 weights read twice and their gradients written once, at the measured bandwidth"
    )
    for precision in ("float32", "bfloat16"):
        layer = layers.ours(HUNDREDS)
        run = step(layer, HUNDREDS, torch_dtype(precision))
        ours = take_turns({"ours": run}, 4 * rounds)["ours"]
        least = weight_traffic(list(layer.parameters())) / found.bandwidth
        limits = [least] * len(ours)
        what = HUNDREDS.shown()
        yield row("layer / weight traffic", what, precision, ours, limits, 2.5, note)


def peer_rows(rounds: int, quick: bool, most: float) -> Iterator[dict]:
    """Yield our layer against every peer at 8, 128 and 400 experts; missing peers are skipped."""
    for peer in PEERS:
        for size in (VIT_S, MANY, HUNDREDS):
            gc.collect()
            yield from _peer_rows(peer, size, rounds, quick, most)
    leave_group()


def _peer_rows(peer: Peer, size: Size, rounds: int, quick: bool, most: float) -> Iterator[dict]:
    race = f"layer / {peer.name}"
    precision = "bfloat16"
    if peer.missing:
        why = f"{peer.module} is not installed (pip install -c constraints.txt -e '.[bench]')"
        yield skipped(race, size.shown(), precision, why)
    elif quick and size.experts > 8:
        yield skipped(race, size.shown(), precision, "left out by --quick")
    else:
        target = TARGETS[peer.name]
        if isinstance(target, dict):
            target = target[size.experts]
        yield peer_row(peer, size, rounds, target, most)


def build_on(device: str, build: Callable[[Size], nn.Module], size: Size) -> nn.Module:
    """Build a layer with weights drawn on the device: on a CPU 1,024 experts take seconds."""
    with torch.device(device):
        return build(size)


def peer_row(
    peer: Peer,
    size: Size,
    rounds: int,
    target: float | None,
    most: float = float("inf"),
    device: str = "cpu",
) -> dict:
    """Return the race of our layer against one peer; after ``most`` seconds it ends early."""
    try:
        theirs = build_on(device, peer.build, size)
    except Unfit:
        # the peers with a capacity choose exactly 2: ours does too
        size = size._replace(k=2)
        theirs = build_on(device, peer.build, size)
    parameters = torch.bfloat16 if peer.parameters else torch.float32
    runs = {
        name: step(layer, size, torch.bfloat16, parameters, device)
        for name, layer in (("ours", build_on(device, peer.ours, size)), ("peer", theirs))
    }
    seconds = take_turns(runs, rounds, most=most)
    times = seconds["ours"], seconds["peer"]
    return row(f"layer / {peer.name}", size.shown(), "bfloat16", *times, target, peer.note)


def step_rows(
    rounds: int,
    found: Peaks,
    names: tuple[str, ...],
    device: str = "cpu",
    targets: StepTargets | None = None,
    more_experts: Mapping[str, tuple[int, ...]] | None = None,
) -> Iterator[dict]:
    """Yield our training step against stock torch, the dense ViT and the machine's limit.

    more_experts: size → additional numbers of experts to race against the dense ViT.
    """
    targets = targets or STEP_TARGETS[device]
    for name in names:
        numbers = (more_experts or {}).get(name, ())
        seconds = training_step.race(name, rounds, device, numbers)
        size = training_step.sized(name, device)
        if ours := seconds.get(training_step.COMPILED):
            what = f"{name}, compiled, {size.batch / median(ours):,.0f} images/s"
            yield row("step / stock torch", what, "bfloat16", ours, seconds["stock"], 0.5)
        for contestant, target in targets.stock.items():
            precision = contestant.split()[1]
            ours = seconds[contestant]
            yield row("step / stock torch", name, precision, ours, seconds["stock"], target)
            dtype = torch_dtype(precision)
            run = training_step.bench(size, size.vmoe, dtype, device=device).step
            run()
            limits = [limit(run, found)] * rounds
            yield row("step / limit", name, precision, ours, limits, targets.limit)
        dense = seconds["dense bfloat16"]
        note = "2 of the blocks hold experts, 2 per token"
        race = "step / dense ViT"
        yield row(race, name, "bfloat16", seconds["ours bfloat16"], dense, None, note)
        for number in numbers:
            ours = seconds[training_step.with_experts(number)]
            yield row(race, f"{name}, E {number}", "bfloat16", ours, dense, None, note)


def regularizer_rows(rounds: int, name: str = "vit_tiny") -> Iterator[dict]:
    """Yield V-MoE's step with each regularizer against the step without it.

    Both steps have the regularizer's inputs, such as a second view or the teacher's routing.
    """
    size = training_step.sizes()[name]
    for regularizer, views, note in (
        (GroupSparsity(), 1, ""),
        (PairwiseConsistency(), 2, "both steps have two views"),
        (RouterKl(), 1, "both steps have the teacher's routing; its forward is not timed"),
    ):
        runs = {
            word: _regularized(size, views, extra)
            for word, extra in (("with", (regularizer,)), ("without", ()))
        }
        turns = take_turns(runs, 2 * rounds)
        what = f"{regularizer.kind}, {name}"
        race = "step with / without regularizer"
        yield row(race, what, "bfloat16", turns["with"], turns["without"], REGULARIZER, note)


def _regularized(size: training_step.Size, views: int, regularizers: tuple) -> Run:
    method = size.vmoe
    method = method.model_copy(update={"regularizers": (*method.regularizers, *regularizers)})
    made = training_step.bench(size, method, torch.bfloat16, views=views)
    with torch.no_grad():
        output = made.model(made.batch.images)
    probs = tuple(
        torch.softmax(torch.randn_like(record.probs), dim=-1) for record in output.routing
    )
    return made._replace(guidance=Guidance(output.prediction, probs)).step


def router_rows(rounds: int, names: tuple[str, ...], device: str = "cpu") -> Iterator[dict]:
    """Yield the step of each contestant against V-MoE's, with the ratio of their FLOPs."""
    for name in names:
        size = training_step.sized(name, device)
        against = training_step.bench(size, size.vmoe, torch.bfloat16, device=device).step
        flops = routers.step_flops(size, size.vmoe)
        for kind, contestant in routers.CONTESTANTS.items():
            method = contestant.method(size)
            own = training_step.bench(size, method, torch.bfloat16, device=device).step
            turns = take_turns({"own": own, "vmoe": against}, rounds)
            what = f"{kind}, {name}, FLOPs × {routers.step_flops(size, method) / flops:.2f}"
            times = turns["own"], turns["vmoe"]
            yield row("step / V-MoE's", what, "bfloat16", *times, ROUTER, contestant.note)


def hook_rows(rounds: int, names: tuple[str, ...], device: str = "cpu") -> Iterator[dict]:
    """Yield the time of the routers' update divided by the time of a step without it.

    It is timed alone, as the difference of two steps is smaller than their scatter.
    """
    for name in names:
        size = training_step.sized(name, device)
        for kind in routers.UPDATED:
            made = training_step.bench(
                size,
                routers.CONTESTANTS[kind].method(size),
                torch.bfloat16,
                device=device,
                updates_routers=False,
            )
            update = partial(made.model.end_step, made.output(), training_step.PROGRESS)
            hook = partial(_run_and_wait, update, device)
            turns = take_turns({"step": made.step, "hook": hook}, 4 * rounds)
            what = f"{kind}, {name}"
            yield row("update / step", what, "bfloat16", turns["hook"], turns["step"], HOOK)


def _run_and_wait(run: Run, device: str) -> None:
    run()
    wait(device)


def arguments() -> argparse.Namespace:
    """Parse and check the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", nargs="+", choices=sorted({*RACES["cpu"], *RACES[CUDA]}))
    rounds = f"rounds of each race (default 12; at least {LEAST})"
    parser.add_argument("--rounds", type=int, default=12, help=rounds)
    most = "of one race with a peer at most; the slowest take many seconds a turn (default 240)"
    parser.add_argument("--seconds", type=float, default=240, help=most)
    models = "of the races of the training step, routers and their updates"
    parser.add_argument("--models", nargs="+", default=list(MODELS), help=models)
    parser.add_argument("--device", choices=("cpu", CUDA), default="cpu")
    parser.add_argument(
        "--json", type=Path, help="default: benchmarks/race.json, or race_cuda.json"
    )
    options = parser.parse_args()
    if options.device == CUDA and not torch.cuda.is_available():
        parser.error("--device cuda: there is no GPU here; allowed: cpu")
    options.only = options.only or RACES[options.device]
    if unfit := set(options.only) - {*RACES[options.device]}:
        parser.error(f"--only {min(unfit)}: not on {options.device}")
    if options.json is None:
        options.json = Path(
            "benchmarks", "race.json" if options.device == "cpu" else "race_cuda.json"
        )
    if options.rounds < LEAST:
        parser.error(f"--rounds is {options.rounds}; a figure needs at least {LEAST}")
    return options


def figures(options: argparse.Namespace, found: Peaks) -> Iterator[dict]:
    """Yield the figures of the races in ``--only``, in its order."""
    rounds = 3 if options.quick else options.rounds
    models = MODELS[:2] if options.quick else tuple(options.models)
    device = options.device
    races = {
        "layer": lambda: layer_rows(rounds, found),
        "peers": lambda: peer_rows(rounds, options.quick, options.seconds),
        "step": lambda: step_rows(rounds, found, models, device),
        "regularizers": lambda: regularizer_rows(rounds),
        "routers": lambda: router_rows(rounds, models, device),
        "hook": lambda: hook_rows(rounds, models, device),
        "waits": lambda: wait_rows(models),
    }
    for name in options.only:
        yield from races[name]()


def write_figures(figures: Iterable[dict], head: dict, path: Path) -> list[dict]:
    """Print figures and write the JSON after each, so that a stopped race keeps its figures."""
    console = Console(stderr=True)
    rows: list[dict] = []

    def write(finished: bool) -> None:
        result = head | {"finished": finished, "rows": rows}
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

    write(finished=False)
    for figure in figures:
        rows.append(figure)
        what = f"{figure['race']}: {', '.join(filter(None, (figure['what'], figure['precision'])))}"
        console.print(f"{what}: {summary(figure)}", highlight=False, soft_wrap=True)
        write(finished=False)
    write(finished=True)
    return rows


def summary(figure: dict) -> str:
    """Return a row's result as text."""
    if "skipped" in figure:
        return figure["skipped"]
    if "value" in figure:
        return f"{figure['value']:.3g} {figure['unit']}"
    return f"{figure['median']:.3f} [{figure['low']:.3f}, {figure['high']:.3f}]"


def main() -> None:
    options = arguments()
    runtime = tune_runtime(options.device)
    found = peaks(options.device)
    machine = describe_machine(runtime) | {"peak_flops": found.flops, "bandwidth": found.bandwidth}
    head = {"machine": machine, "versions": versions(), "quick": options.quick}
    write_figures(figures(options, found), head, options.json)


if __name__ == "__main__":
    main()
