"""How fast a step is: transformer blocks that are compiled in training, and a trace of some steps.

Neither decides what a model learns. So both are asked for by the environment, as the device is, and
not by params.yaml: they belong to no stage's settings, and nothing runs again because of them.
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from moecore.core.files import UserError
from moecore.core.ranks import current_ranks
from moecore.core.torch_internals import allow_recompilations, compile_error_class
from moecore.nn.layers.block import Block
from moecore.nn.layers.moe import MoEFeedForward

COMPILE = "MOECORE_COMPILE"
TRACE = "MOECORE_TRACE"  # names the folder of the trace
LONG = 1000  # steps that win back a minute of compiling, by estimate
BEFORE = 4  # steps before the first that is traced: they load, compile and reserve memory
TRACED = 4  # steps

Compile = Literal["off", "tried", "required"]


def compile_policy(device: str) -> Compile:
    """Return whether blocks are compiled: $MOECORE_COMPILE, one of auto (the default), true, false.

    auto tries it on CUDA, in trainings of at least ``LONG`` steps: compiling takes up to a minute.
    On CPU it is off there: on one core it would take longer than it saves, and bits would differ.
    Raises UserError for another word.
    """
    asked = os.environ.get(COMPILE) or "auto"
    if asked not in ("auto", "true", "false"):
        raise UserError(f"{COMPILE}: found {asked!r}; allowed: auto, true, false")
    if asked == "auto":
        return "tried" if device.startswith("cuda") else "off"
    return "required" if asked == "true" else "off"


class CompiledBlocks:
    """The blocks of a model, compiled one by one while a step is computed and at no other time.

    The first step is not compiled: in it parts draw what they keep (hash.py). Shapes are static,
    and random numbers torch's own, so a step draws the same ones as without. Blocks whose experts
    lie on several ranks stay as they are: what is sent depends on the tokens.

    A block that cannot be compiled ends the training where that is ``required``; where it is
    ``tried`` one line tells so, and the training goes on without.
    """

    def __init__(
        self,
        models: Iterable[nn.Module | None],
        compile: Compile,
        steps: int,
        backend: Callable | str | None = None,
    ) -> None:
        """``models``: what a step computes with; ``backend``: in the place of inductor."""
        self.strict = compile == "required"
        self.begun = False
        self.blocks: list[Block] = []
        self.ready: list[Callable] = []
        if compile == "off" or (compile == "tried" and steps < LONG):
            return
        # "inductor", whose generators otherwise draw other numbers than torch
        how: dict[str, Any] = {"options": {"fallback_random": True}}
        if backend is not None:
            how = {"backend": backend}
        every = [module for model in models if model is not None for module in model.modules()]
        self.blocks = [
            module for module in every if isinstance(module, Block) and is_unsharded(module)
        ]
        # they share one code, which is compiled for each kind of block: a Swin has over 8
        allow_recompilations(2 * len(self.blocks))
        for block in self.blocks:
            compiled = torch.compile(block.forward, fullgraph=True, dynamic=False, **how)
            self.ready.append(self._with_fallback(compiled, block.forward))

    @contextmanager
    def inside(self) -> Iterator[None]:
        """While a step is computed; the first time nothing is compiled."""
        blocks = self.blocks if self.begun else []
        self.begun = True
        for block, forward in zip(blocks, self.ready, strict=False):
            block.forward = forward
        try:
            yield
        finally:
            for block in blocks:
                del block.forward

    def _with_fallback(self, compiled: Callable, plain: Callable) -> Callable:
        refused = compile_error_class()

        def forward(*inputs: Any) -> Any:
            if not self.blocks:
                return plain(*inputs)
            try:
                return compiled(*inputs)
            except refused as error:
                why = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
                told = f"{COMPILE}: a block cannot be compiled: {why}"
                if self.strict:
                    raise UserError(f"{told}; allowed: false, or auto: without") from error
            print(f"{told}; training goes on without", file=sys.stderr)
            self.blocks = []
            return plain(*inputs)

        return forward


def is_unsharded(block: Block) -> bool:
    """Return whether all that the block computes with is on this rank."""
    return not isinstance(block.mlp, MoEFeedForward) or block.mlp.sharded_experts is None


def trace_file(title: str) -> Path | None:
    """Return where the first rank writes the trace of a training: below $MOECORE_TRACE."""
    folder = os.environ.get(TRACE)
    if not folder or not current_ranks().first:
        return None
    return Path(folder) / f"{title.replace(' ', '_')}.json.gz"


def iterate_traced_steps(steps: range, path: Path | None, device: str) -> Iterator[int]:
    """The steps, one by one; where there is a ``path``, a few of them are traced into it.

    A Chrome trace, gzipped, of what the host and the device do while the caller computes these
    steps; for https://ui.perfetto.dev or chrome://tracing.
    """
    if path is None or not steps:
        yield from steps
        return
    begin = max(steps.start, min(steps.start + BEFORE, steps.stop - TRACED))
    end = min(begin + TRACED, steps.stop)
    activities = [ProfilerActivity.CPU]
    if device.startswith("cuda"):
        activities.append(ProfilerActivity.CUDA)
    yield from range(steps.start, begin)
    with profile(activities=activities, record_shapes=True) as profiler:
        for step in range(begin, end):
            with record_function(f"step {step}"):
                yield step
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(path))
    print(f"{path}: a trace of steps {begin} to {end - 1}", file=sys.stderr)
    yield from range(end, steps.stop)
