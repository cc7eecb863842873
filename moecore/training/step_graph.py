"""A training step as one CUDA graph, which a replay launches without the host's work.

The first steps run eagerly, and the last of them is watched for what a graph would not repeat. The
next one is captured; the one after it is taken twice, by a replay and eagerly, which must agree.
From then on batch and rate are copied into fixed tensors; noise comes from the default generator,
as seeded for the step. Attacks, sums for the log and batches of other shapes run eagerly.
"""

import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moecore.core.files import UserError
from moecore.core.ranks import has_process_group
from moecore.core.routing_records import Batch, ModelOutput
from moecore.data.loader import TextStreams
from moecore.training.job import BATCH_LOCK, TrainingJob
from moecore.training.regularizers.group_sparsity import GroupSparsity
from moecore.training.runtime import GRAPH_ENV, Compile

WARM_UP = 3  # eager steps before a capture; the second is the first with compiled blocks
# Allowed differences between a replay and the eager step. Adam makes full steps of gradients that
# are only rounding, so the order of sums matters; another batch or noise exceeds both bounds.
MAX_UPDATE_ERROR = 0.05  # relative, of the norm
MAX_TERM_ERROR = 0.01  # of a term of the loss, relative if it is above 1
HOST_WAIT_WARNING = "called a synchronizing CUDA operation"  # torch's warning

StepOutput = tuple[dict[str, Tensor], Tensor, ModelOutput]  # of ``train_step``
Step = Callable[[], StepOutput]


class StepInputs(NamedTuple):
    """The inputs of a step that differ between steps."""

    batch: Batch
    rate: float | Tensor  # learning rate
    progress: float  # share of the training that is done
    noise: int  # seed of the default generators


class CudaStepCapturer:
    """Captures steps as CUDA graphs; tests replace this class to run without a GPU."""

    rate_dtype = torch.float32  # as fused optimizers read it

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()

    def run_eagerly(self, step: Step) -> StepOutput:
        current = torch.cuda.current_stream()
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            output = step()
        current.wait_stream(self.stream)
        return output

    def run_and_find_graph_obstacle(self, step: Step) -> tuple[StepOutput, str]:
        """Run a step eagerly; return its output, and why a graph cannot repeat it, or ""."""
        state = torch.get_rng_state()
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            output = self.run_eagerly(step)
        torch.cuda.set_sync_debug_mode("default")
        waits = [line for line in caught if HOST_WAIT_WARNING in str(line.message)]
        if waits:
            return output, f"the host waits for it at {waits[0].filename}:{waits[0].lineno}"
        if torch.equal(state, torch.get_rng_state()):
            return output, ""
        return output, "the host draws random numbers"

    def describe_memory_shortage(self) -> str:
        """Return why a graph and an eager step for comparison may exceed GPU memory, or ""."""
        unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        free, needed = torch.cuda.mem_get_info()[0] + unused, 2 * torch.cuda.max_memory_allocated()
        if free >= needed:
            return ""
        return f"{free / 1e9:.1f} of {needed / 1e9:.1f} GB are free"

    def capture(self, step: Step, optimizer: torch.optim.Optimizer) -> Step:
        """Capture a step, which does not run; return a function that replays it."""
        for group in optimizer.param_groups:
            group["capturable"] = True  # fused optimizers only check it
        graph = torch.cuda.CUDAGraph()  # it registers the default generator
        try:
            with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
                output = step()
        except RuntimeError as error:
            # Allocator and generator may stay in the capture, so this process must end.
            text = f"{GRAPH_ENV}: a capture failed: {str(error).strip().splitlines()[0]}"
            raise UserError(f"{text}; allowed: false, with which the training resumes") from error

        def replay() -> StepOutput:
            graph.replay()
            return output

        return replay


class GraphedStepRunner:
    """Runs the steps of a training: eagerly, or by replays of a captured step."""

    def __init__(
        self,
        job: TrainingJob,
        optimizer: torch.optim.Optimizer,
        run_step: Callable[[StepInputs], StepOutput],  # runs a step eagerly
        policy: Compile,  # tried: if a step cannot be captured, print a line and go on eagerly
    ) -> None:
        self.job = job
        self.optimizer = optimizer
        self.run_step = run_step
        self.is_required = policy == "required"
        self.graphs = CudaStepCapturer() if policy != "off" else None
        self.replay: Step | None = None
        self.active_parts: list[bool] | None = None
        self.count = 0  # steps with these active parts
        self.bounds = progress_where_parts_end(job)
        if self.graphs is not None and (obstacle := find_graph_obstacle(job)):
            self._give_up(obstacle)

    def take(self, inputs: StepInputs) -> StepOutput:
        """Update the model; return detached terms, summed scores and the model's output."""
        torch.manual_seed(inputs.noise)
        graphs = self.graphs
        if graphs is None:
            return self.run_step(inputs)
        active_parts = [inputs.progress < bound for bound in self.bounds]
        if active_parts != self.active_parts:  # other kernels from now on: capture again
            self.active_parts, self.count, self.replay = active_parts, 0, None
        if self.replay is None:
            self.count += 1
            if self.count == WARM_UP:
                return self._run_watched(graphs, inputs)
            if self.count > WARM_UP:
                self._capture(graphs, inputs)
        elif signature(inputs.batch) == signature(self.static.batch):
            if self.is_compared:
                return self._replay(inputs)
            return self._compare_with_eager(graphs, inputs)
        return graphs.run_eagerly(lambda: self.run_step(inputs))

    def _give_up(self, reason: str) -> None:
        """Go on eagerly from now on, and print why; UserError if a graph is required."""
        text = f"{GRAPH_ENV}: a step cannot be captured: {reason}"
        if self.is_required:
            raise UserError(f"{text}; allowed: false, or auto: without")
        print(f"{text}; training goes on without", file=sys.stderr)
        self.graphs = self.replay = None

    def _run_watched(self, graphs: CudaStepCapturer, inputs: StepInputs) -> StepOutput:
        with BATCH_LOCK:
            output, reason = graphs.run_and_find_graph_obstacle(lambda: self.run_step(inputs))
        if reason:
            self._give_up(reason)
        return output

    def _capture(self, graphs: CudaStepCapturer, inputs: StepInputs) -> None:
        if reason := graphs.describe_memory_shortage():
            self._give_up(reason)
            return
        values: list[Any] = [
            value.clone() if isinstance(value, Tensor) else value for value in inputs.batch
        ]
        self.rate = inputs.batch.images.new_tensor(inputs.rate, dtype=graphs.rate_dtype)
        self.is_compared = False
        self.static = inputs._replace(batch=Batch(*values), rate=self.rate)
        self.buffers = list(self.job.model.buffers())  # read by the graph, even if replaced later
        self.optimizer.zero_grad(set_to_none=True)
        with BATCH_LOCK:
            step = lambda: detach_step_output(self.run_step(self.static))
            self.replay = graphs.capture(step, self.optimizer)

    def _replay(self, inputs: StepInputs) -> StepOutput:
        assert self.replay is not None
        for target, value in zip(self.static.batch, inputs.batch, strict=True):
            if isinstance(target, Tensor) and isinstance(value, Tensor):
                target.copy_(value)
        self.rate.fill_(inputs.rate)
        return self.replay()

    def _compare_with_eager(self, graphs: CudaStepCapturer, inputs: StepInputs) -> StepOutput:
        """Replay a step, undo it, and run it eagerly; give up replays if the results differ."""
        learned = list(self.job.learners.state_dict().values())
        moments = [value for row in self.optimizer.state.values() for value in row.values()]
        before = [value.clone() for value in (*learned, *moments)]
        terms = {name: term.clone() for name, term in self._replay(inputs)[0].items()}
        replayed = [value.clone() for value in learned]
        for value, earlier in zip((*learned, *moments), before, strict=True):
            value.copy_(earlier)
        torch.manual_seed(inputs.noise)
        output = graphs.run_eagerly(lambda: self.run_step(inputs))
        self.is_compared = True
        update = difference_norm(learned, before[: len(learned)]).clamp_min(torch.finfo().tiny)
        errors = {"the update": difference_norm(learned, replayed) / update / MAX_UPDATE_ERROR}
        for name, term in output[0].items():
            errors[name] = (terms[name] - term).abs() / term.abs().clamp_min(1) / MAX_TERM_ERROR
        if wrong := [name for name, error in errors.items() if not error <= 1]:
            text = f"by {float(errors[wrong[0]]):.2g} times what is allowed"
            self._give_up(f"its first replay differs in {wrong[0]} {text}")
        return output


def progress_where_parts_end(job: TrainingJob) -> list[float]:
    """Return each part's ``until``, the share of training after which it computes differently."""
    modules = list(job.model.modules())
    parts: list[Any] = [*job.objective.regularizers, *job.objective.text, *modules]
    parts += [getattr(module, "config", None) for module in modules]
    return [part.until for part in parts if hasattr(part, "until")]


def find_graph_obstacle(job: TrainingJob) -> str:
    """Return a reason, known before a step runs, why none can be captured; "" if there is none."""
    if has_process_group():
        return "several ranks share the training"
    if isinstance(job.train, TextStreams):
        return "a language model puts its memory into another tensor in each step"
    for part in (*job.objective.regularizers, *job.objective.text, *job.model.modules()):
        if not type(part).__module__.startswith(("moecore.", "torch.")):
            return f"{type(part).__name__}, not of moecore, may compute otherwise in each step"
        if "outputs" in getattr(part, "wants", ()):
            return "the host draws in each step which layers compete"
        if isinstance(part, GroupSparsity) and part.filter == "gaussian":
            return "the sigma of group_sparsity follows the training's progress"
    return ""


def signature(batch: Batch) -> list[Any]:
    """Return the shape, dtype and device of each tensor of a batch, and its other values."""
    return [
        (value.shape, value.dtype, value.device) if isinstance(value, Tensor) else value
        for value in batch
    ]


def detach_step_output(output: StepOutput) -> StepOutput:
    """Return a step's output without autograd graph, heads and target, which the log ignores."""
    terms, score, result = output
    both = result.routing, result.text_routing
    first, second = (tuple(row.map_tensors(Tensor.detach) for row in records) for records in both)
    return terms, score, ModelOutput(result.prediction.detach(), first, text_routing=second)


def difference_norm(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> Tensor:
    """Return the norm of the difference of two lists of tensors, in fp64."""
    norms = [(a.double() - b.double()).norm() for a, b in zip(ours, theirs, strict=True)]
    return torch.stack(norms).norm()
