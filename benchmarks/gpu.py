"""The parts of benchmarks/gpu_quarter_hour.sh, each a process with a time limit; one JSON each.

    python -m benchmarks.gpu PART [--json FILE] [--rounds 8] [--seconds 240] [--dry-run]
    python -m benchmarks.table --gpu FOLDER

A row is a ratio of turns, as in benchmarks/race.py, or a value with a unit. What is not measured
has a row that says why. The JSON is written after every row, and ``finished`` is true at its end,
so a part that is stopped keeps its rows.
--dry-run takes tiny sizes on the CPU, to test this code; its figures say nothing.
"""

import argparse
import gc
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
import yaml
from torch import Tensor, nn

from benchmarks import layers, race, training_step
from benchmarks.layers import Size, prediction, step, tokens_of
from benchmarks.limit import Peaks, describe_machine, limit, peaks, versions
from benchmarks.peers import GPU_PEERS, Peer, torch_dtype
from benchmarks.race import CUDA, MANY, VIT_S, build_on, peer_row, row, skipped
from benchmarks.timing import LEAST, Run, take_turns
from benchmarks.triton_tune import time_tilings
from moecore.core.files import available_cores, read_json, write_json
from moecore.core.source_layout import ROOT
from moecore.nn.layers.moe import MoEFeedForward
from moecore.pipeline import dvc_yaml
from moecore.pipeline.parallel import JOB_RATES_FILE
from moecore.run.history_file import read_lines
from moecore.study.stages import LAST_STAGES
from moecore.training.meter import live_training_tensors, measuring_peak_memory
from moecore.training.method import Method
from moecore.training.runtime import tune_runtime

GB = 1e9
PLACES = 197  # tokens of an image of ViT-S
DRY = Size(images=2, tokens=12, width=16, hidden=32, experts=8, k=2)
BOUNDS = {"float32": 1e-5, "bfloat16": 0.02}  # of relative errors
JOBS_STAGES = ("prepare", "teacher_router", "pretrain")
COMMAND = (sys.executable, "-c", "from moecore.pipeline.cli import app; app()")


class RacedLayer(NamedTuple):
    """A layer's size and precision, and its target ratios to the dense MLP and the limit."""

    size: Size
    precision: str
    dense: float | None = None
    limit: float | None = None


class Scale(NamedTuple):
    """The device, and sizes and numbers of all contestants."""

    device: str
    rounds: int
    seconds: float  # time limit of a pipeline
    equal: tuple[Size, ...]  # layers that are compared with the reference
    raced: tuple[RacedLayer, ...]
    models: tuple[str, ...]  # whose training steps are raced
    jobs: tuple[int, ...]  # trainings at a time, the most important first
    updates: int  # of each of these trainings
    backend: str  # of torch.compile

    @property
    def is_dry(self) -> bool:
        return self.device != CUDA


def card_scale(rounds: int, seconds: float) -> Scale:
    """Return the sizes on a GPU: E 8, 128 and 1,024; ViT-S, the default size and ViT-Tiny."""
    large = VIT_S._replace(images=336)  # 66,192 tokens
    thousand = MANY._replace(experts=1024)
    small = Size(images=4, tokens=PLACES, width=64, hidden=64, experts=1024, k=1)
    return Scale(
        device=CUDA,
        rounds=rounds,
        seconds=seconds,
        equal=(
            VIT_S._replace(images=8),
            MANY._replace(images=8),
            small,  # more experts than grouped_mm takes, many of them without rows
            small._replace(width=100, hidden=36, experts=8, k=2),  # no multiples of 16 bytes
        ),
        raced=(
            RacedLayer(large, "bfloat16", 1.30),
            RacedLayer(MANY._replace(images=large.images), "bfloat16", 1.6, 1.5),
            RacedLayer(large, "float32", 1.30),
            RacedLayer(thousand._replace(images=large.images), "bfloat16"),
        ),
        models=("vit_s", "default", "vit_tiny"),
        jobs=(1, 8, 16, 4, 2),
        updates=400,
        backend="inductor",
    )


def dry_scale(seconds: float) -> Scale:
    """Return the smallest sizes of everything, on the CPU."""
    return Scale(
        device="cpu",
        rounds=2,
        seconds=seconds,
        equal=(DRY, DRY._replace(experts=32, k=1)),
        raced=(
            RacedLayer(DRY, "float32", 1.30),
            RacedLayer(DRY._replace(experts=128, k=1), "bfloat16", 1.6, 1.5),
        ),
        models=("dry",),
        jobs=(1, 2),
        updates=2,
        backend="eager",
    )


def value_row(
    race: str,
    what: str,
    precision: str,
    value: float,
    unit: str,
    target: float | None = None,
    *,
    at_least: bool = False,
    note: str = "",
    **more: Any,
) -> dict:
    """One figure that is no ratio of turns; ``more``: fields of the JSON alone."""
    figure = {"race": race, "what": what, "precision": precision, "value": value, "unit": unit}
    return figure | {"target": target, "at_least": at_least, "note": note} | more


def machine_rows(scale: Scale, measured: Peaks) -> Iterator[dict]:
    """What the machine is, and its measured peaks."""
    title = "machine"
    yield value_row(title, "CPU cores", "", available_cores(), "")
    for precision, flops in measured.flops.items():
        yield value_row(title, "products", precision, flops / 1e12, "TFLOP/s")
    yield value_row(title, "bandwidth", "float32", measured.bandwidth / 1e12, "TB/s")
    if scale.is_dry:
        yield skipped(title, "card", "", "dry run")
        return
    card = torch.cuda.get_device_properties(0)
    yield value_row(title, f"memory of {card.name}", "", card.total_memory / GB, "GB")
    capability = card.major + card.minor / 10
    yield value_row(title, f"capability, CUDA {torch.version.cuda}", "", capability, "")
    yield value_row(title, "multiprocessors", "", card.multi_processor_count, "")


class SlowReference(nn.Module):
    """A copy of a layer in fp64, computed by a loop over boolean masks."""

    def __init__(self, layer: MoEFeedForward) -> None:
        super().__init__()
        self.layer = deepcopy(layer).double()

    def forward(self, tokens: Tensor) -> tuple:
        return training_step.masked_experts(self.layer, tokens)


class OutputsAlone(nn.Module):
    """A layer that returns its output tokens without routing records."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, tokens: Tensor) -> Tensor:
        return prediction(self.layer(tokens))


def capture_cuda_graphs(layer: nn.Module, tokens: Tensor, in_bf16: bool) -> Callable:
    """Capture the layer's forward and backward as two CUDA graphs."""
    with torch.autocast(CUDA, dtype=torch.bfloat16, enabled=in_bf16, cache_enabled=False):
        return torch.cuda.make_graphed_callables(OutputsAlone(layer), (tokens,))


def outputs_and_gradients(
    call: Callable, layer: nn.Module, tokens: Tensor, towards: Tensor, in_bf16: bool
) -> dict[str, Tensor]:
    """Return the output of ``call``, and the gradients of tokens and parameters, by name."""
    leaves = {"tokens": tokens, **dict(layer.named_parameters())}
    device = tokens.device.type
    with torch.autocast(device, dtype=torch.bfloat16, enabled=in_bf16, cache_enabled=False):
        outputs = prediction(call(tokens))
    gradients = torch.autograd.grad(outputs, list(leaves.values()), towards.to(outputs.dtype))
    return {"output": outputs.detach(), **dict(zip(leaves, gradients, strict=True))}


def equality_rows(scale: Scale) -> Iterator[dict]:
    """Yield the largest relative error ‖ours − reference‖ / ‖reference‖ per path and size."""
    paths: dict[str, Callable] = {
        "eager": as_it_is,
        "CUDA graph": capture_cuda_graphs,
        "compiled": lambda layer, *_: torch.compile(layer, backend=scale.backend),
    }
    for path, build in paths.items():
        for size in scale.equal:
            for precision in BOUNDS:
                if build is capture_cuda_graphs and scale.is_dry:
                    yield skipped(f"error of {path}", size.shown(), precision, "needs a card")
                    continue
                yield error_row(path, build, size, precision, scale)


def error_row(path: str, build: Callable, size: Size, precision: str, scale: Scale) -> dict:
    """Return the largest relative error of output and gradients as a row."""
    torch.compiler.reset()
    errors = relative_errors(build, size, precision, scale.device)
    worst = max(errors, key=errors.__getitem__)
    note = "largest of output and gradients, against a loop over masks in fp64"
    more = {"note": note, "errors": errors}
    what = size.shown()
    return value_row(
        f"error of {path}", what, precision, errors[worst], "", BOUNDS[precision], **more
    )


def relative_errors(build: Callable, size: Size, precision: str, device: str) -> dict[str, float]:
    """Return the relative errors of the output and of each gradient, by name."""
    torch.manual_seed(0)
    in_bf16 = precision == "bfloat16"
    layer = layers.ours(size).to(device).eval()  # without noise
    tokens = tokens_of(size).to(device).requires_grad_()
    towards = tokens_of(size, seed=1).to(device)
    values = outputs_and_gradients(build(layer, tokens, in_bf16), layer, tokens, towards, in_bf16)
    reference = SlowReference(layer)
    double = tokens.detach().double().requires_grad_()
    exact = outputs_and_gradients(reference, reference.layer, double, towards.double(), False)
    return {
        name: float((value.double() - exact[name]).norm() / exact[name].norm())
        for name, value in values.items()
    }


def layer_rows(scale: Scale, measured: Peaks) -> Iterator[dict]:
    """Yield our layer against the dense MLP of equal active FLOPs and the limit, also compiled."""
    device = scale.device
    for word in ("", ", compiled"):
        for size, precision, target, limit_target in scale.raced:
            torch.compiler.reset()
            runs: dict[str, Run] = {}
            for build in (layers.ours, layers.dense):
                layer = build_on(device, build, size)
                call = torch.compile(layer, backend=scale.backend) if word else layer
                runs[build.__name__] = step(call, size, torch_dtype(precision), device=device)
            turns = take_turns(runs, scale.rounds)
            ours = turns["ours"]
            what = f"{size.shown()}{word}"
            yield row("layer / dense MLP", what, precision, ours, turns["dense"], target)
            if not word:
                limits = [limit(runs["ours"], measured)] * len(ours)
                yield row("layer / limit", what, precision, ours, limits, limit_target)
            release(runs)


def triton_rows(scale: Scale) -> Iterator[dict]:
    """The layer with experts in Triton: times, errors, times of compiled layers, then tilings."""
    title = "layer with Triton / dense MLP"
    lacking = "needs a card" if scale.is_dry else ""
    if find_spec("triton") is None:
        lacking = "missing: triton is not installed"
    if lacking:
        yield skipped(title, scale.raced[0].size.shown(), "", lacking)
        return
    for word in ("", ", compiled"):
        for size, precision, target, _ in scale.raced:
            torch.compiler.reset()
            runs: dict[str, Run] = {}
            kinds = (("triton", layers.ours), ("torch", layers.ours), ("dense", layers.dense))
            for name, build in kinds:
                layer = build_on(scale.device, build, size)
                call = torch.compile(layer, backend=scale.backend) if word else layer
                dtype = torch_dtype(precision)
                run = step(call, size, dtype, device=scale.device)
                kernels = "torch" if name == "dense" else name
                runs[name] = layers.with_kernels(kernels, run, scale.device)
            turns = take_turns(runs, scale.rounds)
            what = f"{size.shown()}{word}"
            ours = turns["triton"]
            yield row(title, what, precision, ours, turns["dense"], target)
            yield row("layer with Triton / without", what, precision, ours, turns["torch"], 1.0)
            release(runs)
        if not word:
            for size in (scale.equal[0], scale.equal[-1]):
                for path, build in (
                    ("Triton", as_it_is),
                    ("Triton, CUDA graph", capture_cuda_graphs),
                ):
                    for precision in BOUNDS:
                        with layers.kernels_context("triton", scale.device):
                            figure = error_row(path, build, size, precision, scale)
                        yield figure
    yield from tiling_rows(scale)


def as_it_is(layer: nn.Module, *_: Any) -> nn.Module:
    """Return the layer unchanged, with the signature of ``capture_cuda_graphs``."""
    return layer


def tiling_rows(scale: Scale) -> Iterator[dict]:
    """Yield the time of a layer with each tiling; a note marks the fastest."""
    size = scale.raced[0].size
    for precision in ("bfloat16", "float32"):
        for kind, tiling, ms, is_best in time_tilings(size, precision, scale.rounds):
            what = f"{kind}: {tiling}, {size.shown()}"
            note = "the quickest" if is_best else ""
            yield value_row("Triton's tiling", what, precision, ms, "ms", note=note)


def release(runs: dict[str, Run]) -> None:
    """Free the contestants' memory."""
    runs.clear()
    gc.collect()
    torch.cuda.empty_cache()


def peer_rows(scale: Scale) -> Iterator[dict]:
    """Yield our layer against each peer; peers that are not installed are skipped."""
    sizes = dict.fromkeys(layer.size for layer in scale.raced if layer.precision == "bfloat16")
    for peer in GPU_PEERS:
        for size in sizes:
            if peer.missing:
                reason = f"missing: {peer.module} is not installed"
                yield skipped(f"layer / {peer.name}", size.shown(), "bfloat16", reason)
            else:
                yield tried_peer_row(peer, size, scale)
            release({})


def tried_peer_row(peer: Peer, size: Size, scale: Scale) -> dict:
    """Return the race against a peer, or the error of its code, which is a result, too."""
    try:
        return peer_row(peer, size, scale.rounds, 1.0, device=scale.device)
    except Exception as error:
        message = f"{type(error).__name__}: {str(error).strip()[:200]}".replace("\n", " ")
        return skipped(f"layer / {peer.name}", size.shown(), "bfloat16", f"failed: {message}")


def step_rows(scale: Scale, measured: Peaks) -> Iterator[dict]:
    """Training steps against stock torch, the limit and the dense ViT; more experts."""
    targets = race.STEP_TARGETS[CUDA]
    more = {"default": (128, 1024), "dry": (128,)}
    for figure in race.step_rows(scale.rounds, measured, scale.models, scale.device, targets, more):
        yield figure
        if figure["race"] == "step / dense ViT" and figure["what"] in ("default", "dry"):
            yield value_row("step", figure["what"], "bfloat16", figure["ms"], "ms", 4.0)


def graph_rows(scale: Scale, measured: Peaks) -> Iterator[dict]:
    """Yield ms of a training's step, and ratios to eager and limit, per graph and kernels."""
    names = training_step.REPLAYS
    lacking = "needs a card" if scale.is_dry else ""
    if not lacking and find_spec("triton") is None:
        lacking = "missing: triton is not installed"
    skips = {name: lacking for name in names if lacking and training_step.TRITON in name}
    for model in scale.models:
        size = training_step.sized(model, scale.device)
        made = training_step.bench(size, size.vmoe, torch.bfloat16, device=scale.device)
        made.step()
        least = limit(made.step, measured)
        del made
        release({})
        failures: dict[str, str] = {}
        racing = [name for name in names if name not in skips]
        seconds = training_step.race_steps(racing, model, scale.rounds, scale.device, failures)
        eager = seconds.get(training_step.EAGER)
        for name in names:
            what, turns = f"{model}, {name}", seconds.get(name)
            if turns is None or eager is None:
                reason = skips.get(name) or failures.get(name) or "the eager step failed"
                yield skipped("training step", what, "bfloat16", reason)
                continue
            if name != training_step.EAGER:
                yield row("training step / eager", what, "bfloat16", turns, eager, None)
            limits = [least] * len(turns)
            yield row("training step / limit", what, "bfloat16", turns, limits, 2.0)
            target = 4.0 if model in ("default", "dry") else None
            yield value_row("training step", what, "bfloat16", 1e3 * median(turns), "ms", target)


def memory_rows(scale: Scale) -> Iterator[dict]:
    """Yield the peak memory (GB) of the tensors of each layer and training step."""
    for size, precision, *_ in scale.raced:
        for build in (layers.ours, layers.dense):
            layer = build_on(scale.device, build, size)
            run = step(layer, size, torch_dtype(precision), device=scale.device)
            size_bytes = peak_bytes(run, scale.device, layer.parameters())
            what = f"{build.__name__}, {size.shown()}"
            yield value_row("memory of a layer", what, precision, size_bytes / GB, "GB")
            del layer, run
            release({})
    for name in scale.models:
        size = training_step.sized(name, scale.device)
        for word, method in (("V-MoE", size.vmoe), ("dense", Method())):
            for precision in BOUNDS:
                dtype = torch_dtype(precision)
                made = training_step.bench(size, method, dtype, device=scale.device)
                made.step()  # the optimizer then has its state
                tensors = live_training_tensors([made.model], made.optimizer, made.batch)
                size_bytes = peak_bytes(made.step, scale.device, tensors)
                what = f"{word}, {name}, {size.batch} images"
                yield value_row("memory of a step", what, precision, size_bytes / GB, "GB")
                del made, tensors
                release({})


def peak_bytes(run: Run, device: str, tensors: Iterable[Tensor]) -> int:
    """Return the peak bytes during ``run``; tensors: those that exist before it."""
    with measuring_peak_memory(tensors, torch.device(device)) as peak:
        run()
    return peak.size


def begin_study(folder: Path, params: Mapping[str, Any], stages: Mapping[str, Any]) -> None:
    """Write a DVC project without git, which reads this repository's raw data."""
    (folder / ".dvc").mkdir(exist_ok=True)
    (folder / ".dvc/config").write_text(dvc_yaml.CONFIG + dvc_yaml.WITHOUT_GIT, encoding="utf-8")
    (folder / "params.yaml").write_text(yaml.safe_dump(dict(params)), encoding="utf-8")
    for name, text in dvc_yaml.study_dvc_yaml_texts(stages, params["run"]).items():
        (folder / name).write_text(text, encoding="utf-8")
    if JOB_RATES_FILE.exists():
        (folder / JOB_RATES_FILE).parent.mkdir(exist_ok=True)
        shutil.copy(JOB_RATES_FILE, folder / JOB_RATES_FILE)
    data = folder / "data"
    if (ROOT / "data").exists() and not data.exists():
        data.symlink_to((ROOT / "data").resolve())


def small_data() -> dict[str, Any]:
    """scikit-learn's digits, as large as Fashion-MNIST's images."""
    return {"pretrain": {"kind": "digits", "size": 24}}


def small_study(scale: Scale, seeds: Sequence[int]) -> dict[str, Any]:
    """The default V-MoE on scikit-learn's digits, for a few updates."""
    params = yaml.safe_load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    training = params["pretrain"] | {"epochs": 1, "updates": scale.updates}
    run = {"methods": ["vmoe"], "seeds": list(seeds), "phases": ["pretrain"]}
    return {
        "run": run | {"measurements": [], "thorough": []},
        "data": small_data(),
        "methods": {"vmoe": params["methods"]["vmoe"]},
        "pretrain": training,
        **{name: params[name] for name in ("model", "teacher_router")},
    }


class Pipeline(NamedTuple):
    """The outcome of a ``moecore run``."""

    status: int | None  # None: stopped
    seconds: float
    done: int  # stages
    used: float  # peak GB of the GPU, of all processes
    last_lines: str


def run_pipeline(folder: Path, scale: Scale, arguments: Sequence[str], seconds: float) -> Pipeline:
    """Run the stages of a study for at most ``seconds``."""
    begun = time.perf_counter()
    used = 0.0
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    if scale.is_dry:
        variables["MOECORE_DEVICE"] = "cpu"
    log = folder / "run.log"
    with open(log, "w", encoding="utf-8") as output:
        pipes: Any = {"stdout": output, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(
            [*COMMAND, "run", *arguments], cwd=folder, env=variables, **pipes
        )
        try:
            while process.poll() is None and time.perf_counter() - begun < seconds:
                if not scale.is_dry:
                    free, total = torch.cuda.mem_get_info()
                    used = max(used, (total - free) / GB)
                time.sleep(0.2)
        finally:
            status = process.poll()
            process.terminate()
            process.wait()
    lines = log.read_text(encoding="utf-8").splitlines()
    done = sum("] done in " in line for line in lines)
    return Pipeline(status, time.perf_counter() - begun, done, used, "\n".join(lines[-15:]))


def jobs_rows(scale: Scale) -> Iterator[dict]:
    """Yield the throughput of several simultaneous trainings, divided by that of one."""
    usual = dvc_yaml.build_stage_entries(JOBS_STAGES)
    stages = {name: entry for name, entry in usual.items() if name not in LAST_STAGES}
    title = "trainings at a time"
    rates: dict[int, float] = {}
    first_seed = 0
    with TemporaryDirectory() as name:
        folder = Path(name)
        for jobs in scale.jobs:
            seeds = range(first_seed, first_seed + jobs)
            first_seed += jobs
            begin_study(folder, small_study(scale, seeds), stages)
            ran = run_pipeline(folder, scale, ["--jobs", str(jobs)], scale.seconds)
            what = f"{jobs} jobs, default size, {scale.updates} updates each"
            if ran.status != 0:
                yield skipped(title, what, "", describe_failure(ran)) | {"failed": True}
                if not rates:  # nothing to compare others with
                    return
                continue
            rates[jobs] = jobs / training_seconds(folder, seeds)
            if not scale.is_dry:
                write_job_rates(rates)
            note = (
                "throughput over that of one, from the first training's start to the last one's end"
            )
            target = 5.0 if jobs == 8 else None
            more = {"trainings_per_second": rates[jobs], "run_seconds": ran.seconds}
            more |= {"card_gb": ran.used, "note": note, "at_least": True}
            times = rates[jobs] / rates[scale.jobs[0]]
            yield value_row(title, what, "", times, "×", target, **more)


def write_job_rates(rates: Mapping[int, float]) -> None:
    """Write the relative throughputs to the file by which `moecore run` chooses its jobs."""
    table = read_json(JOB_RATES_FILE) if JOB_RATES_FILE.exists() else {}
    first = next(iter(rates.values()))
    times = {str(jobs): round(rate / first, 2) for jobs, rate in sorted(rates.items())}
    JOB_RATES_FILE.parent.mkdir(parents=True, exist_ok=True)
    write_json(JOB_RATES_FILE, table | {torch.cuda.get_device_name(): times})


def training_seconds(folder: Path, seeds: Iterable[int]) -> float:
    """Return the seconds from the start of the first training to the end of the last."""
    histories = [read_lines(folder / f"artifacts/history/pretrain/vmoe/{seed}") for seed in seeds]
    begun = min(lines[0]["t"] for lines in histories)
    return max(lines[-1]["t"] for lines in histories) - begun


def repro_rows(scale: Scale) -> Iterator[dict]:
    """Yield the wall time of all stages of params.yaml, which `make repro` runs after set-up."""
    params = yaml.safe_load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    stages = dvc_yaml.build_stage_entries()
    what = "params.yaml"
    if scale.is_dry:  # prepared data alone
        params["run"] = {"methods": [], "seeds": [], "phases": [], "measurements": []}
        params = {"run": params["run"] | {"thorough": []}, "data": small_data()}
        stages = {name: stages[name] for name in ("code", "prepare")}
        what = "digits"
    jobs = os.environ.get("JOBS")  # as in the Makefile
    arguments = ["--jobs", jobs] if jobs else []
    what = f"{what}, {jobs or 'default'} jobs"
    with TemporaryDirectory() as name:
        begin_study(Path(name), params, stages)
        ran = run_pipeline(Path(name), scale, arguments, scale.seconds)
    count = dvc_yaml.count_expanded_stages(stages, params["run"])
    if ran.status != 0:
        reason = f"{describe_failure(ran)}; {ran.done} of {count} stages are done"
        yield skipped("make repro", what, "", reason) | {"failed": ran.status is not None}
        return
    more = {"stages": ran.done, "card_gb": ran.used}
    yield value_row("make repro", what, "", ran.seconds / 60, "min", 4.0, **more)


def describe_failure(ran: Pipeline) -> str:
    """Return a line on why a pipeline did not finish; print its last lines if it failed."""
    if ran.status is None:
        return f"stopped after {ran.seconds:.0f} s"
    print(ran.last_lines, file=sys.stderr)
    return f"failed with status {ran.status}: {ran.last_lines.splitlines()[-1]}"


PARTS: dict[str, Callable[[Scale, Peaks], Iterator[dict]]] = {
    "environment": machine_rows,
    "equality": lambda scale, _: equality_rows(scale),
    "layers": layer_rows,
    "triton": lambda scale, _: triton_rows(scale),
    "graph": graph_rows,
    "peers": lambda scale, _: peer_rows(scale),
    "steps": step_rows,
    "jobs": lambda scale, _: jobs_rows(scale),
    "memory": lambda scale, _: memory_rows(scale),
    "repro": lambda scale, _: repro_rows(scale),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--json", type=Path, help="default: PART.json")
    parser.add_argument("--rounds", type=int, default=LEAST, help="of each race (default 8)")
    limit_of_run = "that one run of all stages may take (default 240)"
    parser.add_argument("--seconds", type=float, default=240, help=limit_of_run)
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU")
    options = parser.parse_args()
    if not options.dry_run and not torch.cuda.is_available():
        parser.error("found no GPU; allowed: --dry-run")
    # so that folders are removed and stages end
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if options.dry_run:
        scale = dry_scale(options.seconds)
        runtime = tune_runtime(scale.device)
        measured = peaks(scale.device, side=64, length=1024)
    else:
        scale = card_scale(options.rounds, options.seconds)
        runtime = tune_runtime(scale.device)
        measured = peaks(scale.device)
    machine = describe_machine(runtime) | {
        "peak_flops": measured.flops,
        "bandwidth": measured.bandwidth,
    }
    head = {"machine": machine, "versions": versions(), "dry_run": options.dry_run}
    path = options.json or Path(f"{options.part}.json")
    rows = race.write_figures(PARTS[options.part](scale, measured), head, path)
    sys.exit(any(row.get("failed") for row in rows))


if __name__ == "__main__":
    main()
