"""A trained model as one file that runs without moecore: a program of torch.export, or ONNX.

Every expert is kept and computes every token, so a file holds for batches of any size; what routing
saves in time is lost. B images, T tokens, E experts.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from moecore.core.files import UserError, whole_file
from moecore.core.torch_internals import compile_error_class, metadata_assertion_operator
from moecore.nn.backbones.base_model import Model
from moecore.nn.layers.exportable_moe import exportable_moe_layers
from moecore.nn.predict import coupled_image_count
from moecore.training.artifacts import load_model
from moecore.training.guide import GuidedModel

Run = Callable[[Tensor], Iterable[Tensor]]
Format = Literal["onnx", "torch"]
FIELDS = ("logits", "probs", "load", "chosen", "combine")  # of a record, those of use
NEEDED = {"onnx": ("onnx", "onnxscript"), "torch": ()}  # packages that are not moecore's
TRACED = 2  # inputs of the batch that is traced
COMPARED = (1, 5)  # inputs of the batches that are compared
TOLERANCE = 1e-5  # relative and absolute


class TensorsOnly(nn.Module):
    """A model that returns a tuple of tensors: the prediction, then its records where wanted."""

    def __init__(self, model: Model, records: bool) -> None:
        super().__init__()
        self.model = model
        self.records = records

    def forward(self, inputs: Tensor) -> tuple[Tensor, ...]:
        output = self.model(inputs)
        routing = output.routing if self.records else ()
        return output.prediction, *(getattr(one, name) for one in routing for name in FIELDS)

    def output_names(self) -> list[str]:
        """Return ``prediction``, then ``moe_1_logits`` and so on, each (B, T, E)."""
        layers = range(1, len(self.model.layouts) + 1) if self.records else ()
        return ["prediction", *(f"moe_{layer}_{name}" for layer in layers for name in FIELDS)]


@torch.no_grad()
def export_model(
    folder: Path, to: Format, out: Path, records: bool = False, packages: Sequence[str] = ()
) -> str:
    """Write the model of ``folder`` to the file ``out``; returns what was written, in words.

    records: also give each MoE layer's routing record.  packages: see ``load_model``.  Raises
    UserError for models that cannot be exported, and where the file's numbers are not the model's.
    """
    if lacking := [name for name in NEEDED[to] if find_spec(name) is None]:
        raise UserError(f"--to {to}: needs {', '.join(lacking)}; pip install 'moecore[export]'")
    model = load_model(folder, packages)
    refuse_unexportable(folder, model)
    wrapped = TensorsOnly(model, records).eval()
    wrapped(draw_inputs(model, TRACED))  # a hash router draws what it keeps at its first call
    with warnings.catch_warnings(), _errors_in_words(folder, to), whole_file(out) as path:
        warnings.simplefilter("ignore", FutureWarning)  # of torch about torch
        program = trace_model(wrapped)
        run = _write_torch(program, path) if to == "torch" else _write_onnx(program, path, wrapped)
        compared = compare_outputs(wrapped, run)
    outputs = ", ".join(wrapped.output_names())
    return f"{out}: {to}, {outputs} of a batch of any size; {compared}"


def refuse_unexportable(folder: Path, model: Model) -> None:
    """Raise UserError where a prediction needs more than the input itself."""
    why = None
    wants = frozenset() if model.moe is None else model.moe.router.wants
    if isinstance(model, GuidedModel):
        why = "asks a teacher about every input"
    elif "truth" in wants:
        why = "is told the truth, which new data do not have"
    elif (group := coupled_image_count(model)) > 1:
        why = f"lets {group} inputs share experts' places (eval_capacity_factor)"
    if why is not None and model.moe is not None:
        problem = f"cannot be exported: the router {model.moe.router.kind} {why}"
        raise UserError(f"{folder}: {problem}; allowed: routers that look at one input alone")


def draw_inputs(model: Model, number: int) -> Tensor:
    """Return inputs of noise for a model, (number, C, *pixels) in [0, 1], or words of a text."""
    image = model.image
    drawn = torch.Generator().manual_seed(number)
    if image.task.long:
        shape = (number, image.stored_channels, *image.shape)
        return torch.randint(image.outputs, shape, generator=drawn)
    return torch.rand(number, image.channels, *image.shape, generator=drawn)


def trace_model(wrapped: TensorsOnly) -> ExportedProgram:
    """Return the program of a model, for a batch of any size, without what no output needs."""
    with exportable_moe_layers(wrapped):
        program = torch.export.export(
            wrapped,
            (draw_inputs(wrapped.model, TRACED),),
            dynamic_shapes=({0: torch.export.Dim("batch")},),
            strict=True,  # in the other way ``len`` of a tensor would fix the batch's size
        ).run_decompositions({})
    graph = program.graph_module.graph
    for node in list(graph.nodes):
        if node.target is metadata_assertion_operator():  # it would keep the rows' order alive
            graph.erase_node(node)
    graph.eliminate_dead_code()
    program.graph_module.recompile()
    return program


def _write_torch(program: ExportedProgram, path: Path) -> Run:
    with open(path, "wb") as file:
        torch.export.save(program, file)
    with open(path, "rb") as file:
        return torch.export.load(file).module()


def _write_onnx(program: ExportedProgram, path: Path, wrapped: TensorsOnly) -> Run | None:
    torch.onnx.export(
        program,
        f=path,
        input_names=["inputs"],
        output_names=wrapped.output_names(),
        dynamic_shapes=({0: "batch"},),
        external_data=False,
        verbose=False,
    )
    if find_spec("onnxruntime") is None:
        return None
    from onnxruntime import InferenceSession  # pyrefly: ignore[missing-import]

    session = InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda inputs: map(torch.from_numpy, session.run(None, {"inputs": inputs.numpy()}))


def compare_outputs(wrapped: TensorsOnly, run: Run | None) -> str:
    """Return how far the outputs of a file are from a model's; UserError beyond ``TOLERANCE``.

    run: computes what the file says of inputs; None where nothing here can.
    """
    if run is None:
        return "not compared with the model: onnxruntime is not installed"
    largest = 0.0
    for number in COMPARED:
        inputs = draw_inputs(wrapped.model, number)
        for name, ours, theirs in zip(
            wrapped.output_names(), wrapped(inputs), run(inputs), strict=True
        ):
            apart = (ours.double() - theirs.double()).abs() / ours.double().abs().clamp_min(1)
            largest = max(largest, float(apart.max()))
            if not largest <= TOLERANCE:
                problem = f"{name} of the file and of the model are {float(apart.max()):.2g} apart"
                raise UserError(f"export: {problem}; nothing is written; allowed: {TOLERANCE:g}")
    return f"at most {largest:.1g} from the model's"


@contextmanager
def _errors_in_words(folder: Path, to: Format) -> Iterator[None]:
    """Say in a line which operation torch cannot export."""
    try:
        yield
    except (compile_error_class(), torch.onnx.OnnxExporterError) as error:
        while isinstance(error.__cause__, Exception):  # the first of them names the operation
            error = error.__cause__
        why = str(error).strip().split("\n")[0]
        raise UserError(f"{folder}: cannot be exported to {to}: {why}") from error
