"""Record the trace of a trained model, or of a model that a user's Python file defines."""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from moecore.core.files import UserError
from moecore.core.source_layout import format_error_with_line
from moecore.data.prepared import Prepared, evenly_spaced_indices
from moecore.data.text.words import read_vocabulary
from moecore.lens.traces import TraceWriter, write_trace
from moecore.measure.routing_metrics.expert_profiles import THUMBNAIL_SIDE
from moecore.nn.backbones.base_model import Model
from moecore.nn.encoded_routing import finest_layout
from moecore.nn.predict import eval_mode, image_batches, round_batch_to_groups
from moecore.nn.routing_collection import routing_collector
from moecore.training.artifacts import load_model

BATCH = 64  # items per forward pass
IMAGE_BATCH_AXES = 4  # of a batch of images; volumes have more
Batch = tuple[Any, Mapping[str, Tensor]]  # inputs of a model, and item tensors of the trace


def record_trained_model(folder: Path, data: Path, out: Path, items: int | None = None) -> int:
    """Write the trace ``out`` of up to ``items`` test items, evenly spread; return their number."""
    model = load_model(folder)
    vocabulary = read_vocabulary(folder, model.image.outputs) if model.image.task.long else []
    batches = prepared_batches(model, Prepared.open(data), items)
    with write_trace(out, str(folder), vocabulary, model.layouts) as trace:
        return record_batches(trace, model, batches)


def prepared_batches(model: Model, data: Prepared, items: int | None) -> Iterator[Batch]:
    """Yield (inputs, item tensors) of up to ``items`` test items: tokens, labels and pictures."""
    task, truth = model.image.task, model.image.truth
    indices = evenly_spaced_indices(len(data.test.labels), items)
    labels = torch.as_tensor(data.test.labels[indices])
    first = 0
    for inputs in image_batches(data.test.images[indices], round_batch_to_groups(model, BATCH)):
        item_tensors: dict[str, Tensor] = {}
        if task.long:
            item_tensors["tokens"] = inputs[:, model.image.channels - 1]
        if task.long and truth:
            item_tensors["labels"] = inputs[:, -1] - 1
        if task.needs_classes("one_class") is None:
            item_tensors["labels"] = labels[first : first + len(inputs)]
        if inputs.ndim == IMAGE_BATCH_AXES and model.moe is not None:
            grid = finest_layout(model.layouts).grid
            item_tensors["pictures"] = shrink_to_pictures(inputs[:, : model.image.channels], grid)
        yield inputs, item_tensors
        first += len(inputs)


def shrink_to_pictures(pixels: Tensor, grid: Sequence[int]) -> Tensor:
    """Shrink images (N, C, H, W) in [0, 1] to uint8 pictures with 1 or 3 channels for the page."""
    # Sides become multiples of the ``grid`` of patches (rows, columns).
    pixels = pixels[:, :3] if pixels.shape[1] >= 3 else pixels[:, :1]
    pairs = zip(pixels.shape[2:], grid, strict=True)
    size = [max(1, min(side, THUMBNAIL_SIDE) // patches) * patches for side, patches in pairs]
    if size != list(pixels.shape[2:]):
        pixels = interpolate(pixels, size, mode="area")
    return (pixels.clamp(0, 1) * 255).round().to(torch.uint8)


def record_python_file(path: Path, out: Path) -> int:
    """Write the trace of the model that a Python file defines; return the number of items."""
    # The file defines ``model``, a module, and ``batches``, an iterable of inputs: a tensor, a
    # mapping of arguments, or a pair of inputs and a mapping of item tensors. ``input_ids`` are
    # tokens. Optional: ``adapters`` (see ``moecore.trace``), ``vocabulary`` and ``layouts``
    # (see ``write_trace``), and ``name``, of the model.
    names = run_python_file(path)
    model, batches = names.get("model"), names.get("batches")
    if not isinstance(model, nn.Module) or not isinstance(batches, Iterable):
        types = f"{type(model).__name__} model, {type(batches).__name__} batches"
        raise UserError.at(path, found=types, allowed="a torch module, an iterable")
    name = names.get("name", type(model).__name__)
    options = {key: names[key] for key in ("vocabulary", "layouts") if key in names}
    with write_trace(out, name, **options) as trace:
        read = iterate_checked_batches(batches, path)
        return record_batches(trace, model, read, names.get("adapters"), path)


def iterate_checked_batches(batches: Iterable[Any], path: Path) -> Iterator[Batch]:
    """Yield (inputs, item tensors) per batch that the file ``path`` defines; errors: UserError."""
    with converting_to_user_errors(path):
        for batch in batches:
            pair = batch if isinstance(batch, tuple) else (batch, {})
            if len(pair) != 2 or not isinstance(pair[1], Mapping):
                kinds = ", ".join(type(value).__name__ for value in pair)
                allowed = "what the model is called with, or a pair of that and a mapping of labels"
                raise UserError.at(f"{path}: batches", found=f"a tuple of {kinds}", allowed=allowed)
            yield pair


@contextmanager
def converting_to_user_errors(path: Path | None) -> Iterator[None]:
    """Turn errors in the ``with`` block into a UserError with ``path`` and line; None: do not."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if path is None:
            raise
        raise UserError(f"{path}: {format_error_with_line(error, path.parent)}") from error


def record_batches(
    trace: TraceWriter,
    model: nn.Module,
    batches: Iterable[Batch],
    adapters: Any = None,
    file: Path | None = None,
) -> int:
    """Run a model, add its routing to ``trace`` and return the item count; errors name ``file``."""
    items = 0
    with eval_mode(model), torch.no_grad():
        for inputs, item_tensors in batches:
            with routing_collector(model, adapters) as records, converting_to_user_errors(file):
                if isinstance(inputs, Mapping):
                    item_tensors = {**tokens_of_arguments(inputs), **item_tensors}
                    model(**inputs)
                else:
                    model(inputs)
            trace.add(records, **item_tensors)
            items += len(records[0].probs)
    return items


def tokens_of_arguments(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return {"tokens": input_ids} of a model's arguments, {} without; UserError if padded."""
    mask = inputs.get("attention_mask")
    if mask is not None and not mask.all():
        allowed = "1; cut texts to parts of one length, without padding"
        raise UserError.at("attention_mask", found=0, allowed=allowed)
    # Layers of an encoder and of a decoder have different tokens.
    if "input_ids" not in inputs or "decoder_input_ids" in inputs:
        return {}
    return {"tokens": inputs["input_ids"]}


def run_python_file(path: Path) -> dict[str, Any]:
    """Run a Python file and return its global names → values; it may import from its folder."""
    names: dict[str, Any] = {"__name__": path.stem, "__file__": str(path)}
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        allowed = "a model's folder, a Python file"
        raise UserError(f"{path}: {error.strerror}; allowed: {allowed}") from None
    except UnicodeError as error:
        raise UserError(f"{path}: {error}; allowed: a Python file") from None
    sys.path.append(str(path.parent.resolve()))
    with converting_to_user_errors(path):
        exec(compile(text, str(path), "exec"), names)
    return names
