"""The routing of a model becomes a trace: of ours in its folder, or of what a Python file names."""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from moecore.core.files import UserError
from moecore.core.outside_packages import last_traceback_line
from moecore.data.prepared import Prepared, evenly_spaced_indices
from moecore.data.text.words import read_vocabulary
from moecore.lens.traces import write_trace
from moecore.measure.exploring.expert_overlay_data import SIDE
from moecore.nn.backbones.base_model import Model
from moecore.nn.predict import eval_mode, image_batches, round_batch_to_groups
from moecore.nn.router_hooks import routing_collector
from moecore.nn.routing_traces import finest_layout
from moecore.training.artifacts import load_model

BATCH = 64  # items a forward pass
IMAGES = 4  # axes of a batch of images; volumes have more
Batch = tuple[Any, Mapping[str, Tensor]]  # what a model is called with, and what is known of it


def record_trained_model(folder: Path, data: Path, out: Path, items: int | None = None) -> int:
    """Write the trace ``out`` of our model in ``folder`` and the test items of the prepared folder
    ``data``, so many at most, evenly spread; return their number.
    """
    model = load_model(folder)
    words = read_vocabulary(folder, model.image.outputs) if model.image.task.long else []
    batches = prepared_batches(model, Prepared.open(data), items)
    return record_batches(out, str(folder), model, batches, vocabulary=words, layouts=model.layouts)


def prepared_batches(model: Model, data: Prepared, items: int | None) -> Iterator[Batch]:
    """Yield images, or blocks of words, with their labels and tokens; words' labels are kinds."""
    task, truth = model.image.task, model.image.truth
    where = evenly_spaced_indices(len(data.test.labels), items)
    labels = torch.as_tensor(data.test.labels[where])
    first = 0
    for inputs in image_batches(data.test.images[where], round_batch_to_groups(model, BATCH)):
        beside: dict[str, Tensor] = {}
        if task.long:
            beside["tokens"] = inputs[:, model.image.channels - 1]
        if task.long and truth:
            beside["labels"] = inputs[:, -1] - 1
        if task.needs_classes("one_class") is None:
            beside["labels"] = labels[first : first + len(inputs)]
        if inputs.ndim == IMAGES and model.moe is not None:
            grid = finest_layout(model.layouts).grid
            beside["pictures"] = shrink_to_pictures(inputs[:, : model.image.channels], grid)
        yield inputs, beside
        first += len(inputs)


def shrink_to_pictures(pixels: Tensor, grid: Sequence[int]) -> Tensor:
    """Return images in [0, 1], (N, C, H, W), as bytes, gray or coloured, with sides of SIDE at most
    that are multiples of a ``grid`` of patches (rows, columns).
    """
    pixels = pixels[:, :3] if pixels.shape[1] >= 3 else pixels[:, :1]
    pairs = zip(pixels.shape[2:], grid, strict=True)
    size = [max(1, min(side, SIDE) // patches) * patches for side, patches in pairs]
    if size != list(pixels.shape[2:]):
        pixels = interpolate(pixels, size, mode="area")
    return (pixels.clamp(0, 1) * 255).round().to(torch.uint8)


def record_python_file(path: Path, out: Path) -> int:
    """Write the trace ``out`` of what a Python file names; return the number of items.

    ``model``: a module, as for ``trace``, and its ``adapters`` if it needs any.  ``batches``: an
    iterable of what it is called with, a tensor or a mapping of arguments, or of pairs of that and
    a mapping of tokens, positions, labels and pictures; input_ids are tokens.  ``vocabulary``: the
    word of each token's number.  ``layouts``: see ``write_trace``.  ``name``: of the model.
    """
    given = load_python_globals(path)
    model, batches = given.get("model"), given.get("batches")
    if not isinstance(model, nn.Module) or not isinstance(batches, Iterable):
        problem = f"found {type(model).__name__} model, {type(batches).__name__} batches"
        raise UserError(f"{path}: {problem}; allowed: a torch module, an iterable")
    name = given.get("name", type(model).__name__)
    more = {key: given[key] for key in ("adapters", "vocabulary", "layouts") if key in given}
    return record_batches(out, name, model, iterate_batches(batches, path), file=path, **more)


def iterate_batches(batches: Iterable[Any], path: Path) -> Iterator[Batch]:
    """Yield the batches of a file as pairs. Raises UserError for what is none, and its errors."""
    with errors_in_file(path):
        for batch in batches:
            pair = batch if isinstance(batch, tuple) else (batch, {})
            if len(pair) != 2 or not isinstance(pair[1], Mapping):
                kinds = ", ".join(type(one).__name__ for one in pair)
                allowed = "what the model is called with, or a pair of that and a mapping of labels"
                raise UserError(f"{path}: batches: found a tuple of {kinds}; allowed: {allowed}")
            yield pair


@contextmanager
def errors_in_file(path: Path | None) -> Iterator[None]:
    """Raise UserError, a line with its place in the file or beside it, for any error in the block.

    path: a file of the user's; None: errors are ours, and stay as they are.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if path is None:
            raise
        raise UserError(f"{path}: {last_traceback_line(error, path.parent)}") from error


def record_batches(
    out: Path,
    name: str,
    model: nn.Module,
    batches: Iterable[Batch],
    adapters: Any = None,
    vocabulary: Any = (),
    layouts: Any = (),
    file: Path | None = None,
) -> int:
    """Write the trace ``out`` of a model in evaluation mode; return the number of items.

    file: that defines the model, see ``errors_in_file``.
    """
    items = 0
    with write_trace(out, name, vocabulary, layouts) as trace, eval_mode(model), torch.no_grad():
        for inputs, beside in batches:
            with routing_collector(model, adapters) as records, errors_in_file(file):
                if isinstance(inputs, Mapping):
                    beside = {**tokens_of_arguments(inputs), **beside}
                    model(**inputs)
                else:
                    model(inputs)
            trace.add(records, **beside)
            items += len(records[0].probs)
    return items


def tokens_of_arguments(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tokens among the arguments of a model of transformers; UserError for padding."""
    mask = inputs.get("attention_mask")
    if mask is not None and not mask.all():
        mend = "cut texts to parts of one length, without padding"
        raise UserError(f"attention_mask: found 0; allowed: 1; {mend}")
    if "input_ids" not in inputs or "decoder_input_ids" in inputs:  # whose layers are mixed
        return {}
    return {"tokens": inputs["input_ids"]}


def load_python_globals(path: Path) -> dict[str, Any]:
    """Return the names that a Python file defines; what lies beside it may be imported there."""
    names: dict[str, Any] = {"__name__": path.stem, "__file__": str(path)}
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        problem = f"{path}: {error.strerror}"
        raise UserError(f"{problem}; allowed: a model's folder, a Python file") from None
    except UnicodeError as error:
        raise UserError(f"{path}: {error}; allowed: a Python file") from None
    sys.path.append(str(path.parent.resolve()))
    with errors_in_file(path):
        exec(compile(text, str(path), "exec"), names)
    return names
