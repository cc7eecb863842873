"""Export a trained model to one file that runs without moecore: torch.export, or ONNX."""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from moecore.core.files import UserError, atomic_file
from moecore.core.torch_internals import METADATA_ASSERTION, compile_error_class
from moecore.nn.backbones.base_model import Model
from moecore.nn.kernels.grouped import tracing_for_export
from moecore.nn.predict import coupled_image_count
from moecore.training import artifacts, method

Run = Callable[[Tensor], Iterable[Tensor]]
Format = Literal["onnx", "torch"]
FIELDS = ("logits", "probs", "load", "chosen", "combine")  # exported fields of a record
EXPORT_PACKAGES = {"onnx": ("onnx", "onnxscript"), "torch": ()}  # format → additional packages
TRACED_BATCH = 2  # batch size of the traced inputs
COMPARED_BATCHES = (1, 5)  # batch sizes for the comparison
TOLERANCE = 1e-5  # relative and absolute


class TensorsOnly(nn.Module):
    """A model that returns a tuple of tensors: the prediction and, optionally, routing records."""

    def __init__(self, model: Model, records: bool) -> None:
        super().__init__()
        self.model = model
        self.records = records

    def forward(self, inputs: Tensor) -> tuple[Tensor, ...]:
        output = self.model(inputs)
        routing = output.routing if self.records else ()
        return output.prediction, *(getattr(record, name) for record in routing for name in FIELDS)

    def output_names(self) -> list[str]:
        """Return the outputs' names: ``prediction``, and ``moe_1_logits``, … per MoE layer."""
        layers = range(1, len(self.model.layouts) + 1) if self.records else ()
        return ["prediction", *(f"moe_{layer}_{name}" for layer in layers for name in FIELDS)]


@torch.no_grad()
def export_module(module: nn.Module, example: Tensor | tuple[Tensor, ...]) -> ExportedProgram:
    """Return torch.export's program of a module that contains MoE layers, for any batch size.

    Every expert computes every token: outputs are the module's, but routing saves no time.

    Args:
        module: a model of moecore, or any module with MoELayers, in evaluation mode.
        example: the inputs of a call, each (B, ...), B ≥ 2. The program takes any B, and any
            size of the second axis, such as tokens, unless the module fixes it.

    Raises:
        UserError: in training mode, and for what torch.export cannot trace, with any B.
    """
    if module.training:
        raise UserError.at("module", found="training mode", allowed="module.eval()")
    inputs = (example,) if isinstance(example, Tensor) else example
    module(*inputs)  # a hash router draws its table at the first call
    axes = {0: torch.export.Dim("batch"), 1: torch.export.Dim.AUTO}
    shapes = [{axis: axes[axis] for axis in range(min(value.ndim, 2))} for value in inputs]
    try:
        return trace_module(module, inputs, shapes)
    except compile_error_class() as error:
        raise UserError(f"export: cannot take any batch size: {_root_cause_text(error)}") from error


@torch.no_grad()
def export_model(
    folder: Path, to: Format, out: Path, records: bool = False, packages: Sequence[str] = ()
) -> str:
    """Write the model of ``folder`` to the file ``out``, and return a description of the file."""
    # records: add outputs with each MoE layer's routing record.
    if missing := [name for name in EXPORT_PACKAGES[to] if find_spec(name) is None]:
        raise UserError(f"--to {to}: needs {', '.join(missing)}; pip install 'moecore[export]'")
    model = artifacts.load_model(folder, packages)
    refuse_unexportable(folder, model)
    wrapped = TensorsOnly(model, records).eval()
    wrapped(draw_inputs(model, TRACED_BATCH))  # a hash router draws its table at the first call
    try:
        with warnings.catch_warnings(), atomic_file(out) as path:
            warnings.simplefilter("ignore", FutureWarning)  # of torch about torch
            write = _write_and_load_torch if to == "torch" else _write_and_load_onnx
            shapes = [{0: torch.export.Dim("batch")}]
            program = trace_module(wrapped, (draw_inputs(model, TRACED_BATCH),), shapes)
            compared = compare_outputs(wrapped, write(program, path, wrapped))
    except (compile_error_class(), torch.onnx.OnnxExporterError) as error:
        why = _root_cause_text(error)
        raise UserError(f"{folder}: cannot be exported to {to}: {why}") from error
    outputs = ", ".join(wrapped.output_names())
    return f"{out}: {to}, {outputs} of a batch of any size; {compared}"


def _root_cause_text(error: BaseException) -> str:
    """Return the first line of the innermost error, which names the operation."""
    while isinstance(error.__cause__, Exception):
        error = error.__cause__
    return str(error).strip().split("\n")[0]


def refuse_unexportable(folder: Path, model: Model, purpose: str = "exported") -> None:
    """Raise UserError if routing of an item needs a teacher, the truth or the rest of a batch."""
    why = None
    wants = frozenset() if model.moe is None else model.moe.router.wants
    if isinstance(model, method.TeacherRoutedModel):
        why = "needs a teacher's routing of every input"
    elif "truth" in wants:
        why = "needs the truth, which new data do not have"
    elif (group := coupled_image_count(model)) > 1:
        why = f"lets {group} inputs share experts' places (eval_capacity_factor)"
    if why is not None and model.moe is not None:
        problem = f"the router {model.moe.router.kind} {why}"
        allowed = "routers that look at one input alone"
        raise UserError(f"{folder}: cannot be {purpose}: {problem}; allowed: {allowed}")


def draw_inputs(model: Model, number: int) -> Tensor:
    """Return ``number`` random inputs (number, C, *shape): values in [0, 1], or word indices."""
    image = model.image
    generator = torch.Generator().manual_seed(number)
    if image.task.long:
        shape = (number, image.stored_channels, *image.shape)
        return torch.randint(image.outputs, shape, generator=generator)
    return torch.rand(number, image.channels, *image.shape, generator=generator)


def trace_module(
    module: nn.Module, inputs: tuple[Tensor, ...], shapes: Sequence[Mapping[int, Any]]
) -> ExportedProgram:
    """Trace a module, without unused operations; shapes: per input, axis → dynamic size."""
    with tracing_for_export():
        # strict: else ``len`` of a tensor would fix the batch size
        program = torch.export.export(module, inputs, dynamic_shapes=tuple(shapes), strict=True)
        program = program.run_decompositions({})
    graph = program.graph_module.graph
    for node in list(graph.nodes):
        if node.target is METADATA_ASSERTION:  # it would keep dead code alive
            graph.erase_node(node)
    graph.eliminate_dead_code()
    program.graph_module.recompile()
    return program


def _write_and_load_torch(program: ExportedProgram, path: Path, _: TensorsOnly) -> Run:
    with open(path, "wb") as file:
        torch.export.save(program, file)
    with open(path, "rb") as file:
        return torch.export.load(file).module()


def _write_and_load_onnx(program: ExportedProgram, path: Path, wrapped: TensorsOnly) -> Run | None:
    names = wrapped.output_names()
    options: Any = {"dynamic_shapes": ({0: "batch"},), "external_data": False, "verbose": False}
    torch.onnx.export(program, f=path, input_names=["inputs"], output_names=names, **options)
    if find_spec("onnxruntime") is None:
        return None
    from onnxruntime import InferenceSession  # pyrefly: ignore[missing-import]

    session = InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda inputs: map(torch.from_numpy, session.run(None, {"inputs": inputs.numpy()}))


def compare_outputs(wrapped: TensorsOnly, run: Run | None) -> str:
    """Describe how far the exported file is from the model; UserError above ``TOLERANCE``."""
    # run: runs the file; None without onnxruntime, which the description then says.
    if run is None:
        return "not compared with the model: onnxruntime is not installed"
    largest = 0.0
    names = wrapped.output_names()
    for inputs in [draw_inputs(wrapped.model, number) for number in COMPARED_BATCHES]:
        for name, ours, theirs in zip(names, wrapped(inputs), run(inputs), strict=True):
            difference = (ours.double() - theirs.double()).abs() / ours.double().abs().clamp_min(1)
            largest = max(largest, float(difference.max()))
            if not largest <= TOLERANCE:  # also NaN
                apart = f"{float(difference.max()):.2g} apart; nothing is written"
                what = f"{name} of the file and of the model are {apart}"
                raise UserError(f"export: {what}; allowed: {TOLERANCE:g}")
    return f"at most {largest:.1g} from the model's"
