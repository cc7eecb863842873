"""The routing of a model becomes a trace: one of ours in its folder, or one that a file gives.

N items, C channels or blocks of text, M words of a block.
"""

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from moecore.core.files import UserError
from moecore.core.outside_packages import last_line
from moecore.data.files.decode import UnreadableImage, decode_image
from moecore.data.prepared import Prepared, evenly_spaced_indices
from moecore.data.text.words import UNKNOWN, block_windows, read_vocabulary
from moecore.lens.trace_writer import TraceWriter, write_trace
from moecore.nn.backbones.base_model import Model
from moecore.nn.predict import eval_mode, predict_in_batches, round_batch_to_groups
from moecore.nn.record_tracing import trace_routing
from moecore.predict.continuation import read_prompt
from moecore.predict.folder_predictions import list_files
from moecore.training.artifacts import load_model

BATCH = 64  # items a forward pass
GIVEN = "model and batches, and, if they are needed, adapters, vocabulary and name"


def record_trained_model(folder: Path, data: Path, out: Path, items: int | None = None) -> int:
    """Write the trace ``out`` of our model in ``folder``; return the number of items.

    data: a prepared folder, of which test items are read, evenly spread; a folder of pictures; or
    a file of text, for a model of text. items: so many at most.
    """
    model = load_model(folder)
    if model.moe is None:
        raise UserError(f"{folder}: found a dense model, which has no router; allowed: a mixture")
    spec = model.image
    vocabulary = read_vocabulary(folder, spec.outputs) if spec.task.long else []
    images, labels = read_items(model, folder, data, items)
    batch = round_batch_to_groups(model, BATCH)
    with write_trace(out, str(folder), vocabulary) as trace:
        for start in range(0, len(images), batch):
            part = images[start : start + batch]
            _, records = predict_in_batches(model, part, batch, prediction=False)
            few = None if labels is None else torch.from_numpy(labels[start : start + batch])
            tokens = torch.from_numpy(part[:, spec.channels - 1]) if vocabulary else None
            trace.add(records, tokens=tokens, labels=few)
    return len(images)


def read_items(
    model: Model, folder: Path, data: Path, items: int | None
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return what ``data`` holds as the model reads it, (N, C, *pixels) or (N, C, M), and the
    labels (N,) or, of words whose kinds are known, (N, M), from 0; None where there are none.
    """
    spec = model.image
    if (data / "card.json").is_file():
        test = Prepared.open(data).test
        where = evenly_spaced_indices(len(test.labels), items)
        images = np.asarray(test.images[where])
        if spec.task.long:
            kinds = images[:, -1].astype(np.int64) - 1
            return images, kinds if spec.truth else None
        one_class = spec.task.needs_classes("one_class") is None
        return images, np.asarray(test.labels[where], np.int64) if one_class else None
    if model.moe is not None and "truth" in model.moe.router.wants:
        raise UserError(f"{folder}: is routed by the truth, which {data} does not say")
    if spec.task.long:
        numbers = {word: n for n, word in enumerate(read_vocabulary(folder, spec.outputs))}
        words = [numbers.get(word, numbers[UNKNOWN]) for word in read_prompt(data, folder)]
        if len(words) <= spec.shape[0]:
            allowed = f"more than {spec.shape[0]}, those of a block"
            raise UserError(f"{data}: found {len(words)} words; allowed: {allowed}")
        images, _ = block_windows(np.array(words, np.int32), spec.shape[0], spec.channels - 1)
        return images[:items], None
    if len(spec.shape) != 2:
        raise UserError(f"{data}: holds no card.json; allowed: a prepared folder of volumes")
    files = list_files(data)[:items]
    try:
        return np.stack([decode_image(one, spec.shape[0], spec.channels) for one in files]), None
    except UnreadableImage as error:
        raise UserError(f"{data}: {error}") from error


def record_python_file(path: Path, out: Path) -> int:
    """Write the trace ``out`` of what a Python file names; return the number of items.

    ``model``: a module, as for ``trace_routing``, with ``adapters`` if it needs any. ``batches``:
    what it is called with, one after another: a tensor, or a mapping of arguments whose input_ids
    are the tokens; a pair of it and labels (B,). ``vocabulary``: the word of each token's number.
    """
    given = run_python_file(path)
    model, batches = given.get("model"), given.get("batches")
    if not isinstance(model, nn.Module) or not isinstance(batches, Iterable):
        problem = f"found {type(model).__name__} model and {type(batches).__name__} batches"
        raise UserError(f"{path}: {problem}; allowed: a torch module and an iterable: {GIVEN}")
    name = given.get("name", type(model).__name__)
    with write_trace(out, name, given.get("vocabulary", ())) as trace, eval_mode(model):
        return sum(
            _record_batch(trace, model, batch, given.get("adapters"), path) for batch in batches
        )


@torch.no_grad()
def _record_batch(
    trace: TraceWriter, model: nn.Module, batch: Any, adapters: Any, path: Path
) -> int:
    inputs, labels = batch if isinstance(batch, tuple) else (batch, None)
    tokens = None
    with trace_routing(model, adapters) as records:
        if isinstance(inputs, Mapping):
            mask = inputs.get("attention_mask")
            if mask is not None and not mask.all():
                mend = "cut texts to parts of one length"
                raise UserError(f"{path}: batches: found padding in attention_mask; {mend}")
            # an encoder's words are no decoder's
            tokens = None if "decoder_input_ids" in inputs else inputs.get("input_ids")
            model(**inputs)
        else:
            model(inputs)
    trace.add(records, tokens=tokens, labels=labels)
    return len(records[0].probs)


def run_python_file(path: Path) -> dict[str, Any]:
    """Return the names that a Python file defines; what lies beside it may be imported there."""
    names: dict[str, Any] = {"__name__": path.stem, "__file__": str(path)}
    try:
        code = compile(path.read_text(encoding="utf-8"), str(path), "exec")
        sys.path.append(str(path.parent.resolve()))
        exec(code, names)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; allowed: a model's folder, or a file") from None
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{path}: {last_line(error)}") from error
    return names
