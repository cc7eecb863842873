"""A trace is read layer by layer: no more of it is in memory than one layer of the items asked for.

N items asked for, T tokens of one, S the most experts that a token chose, E experts.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from moecore.core.files import UserError, file_checksum
from moecore.core.safetensors_files import check_header_size
from moecore.lens.traces import (
    CARD,
    TraceCard,
    check_beside,
    check_layer_values,
    check_tokens_in_vocabulary,
)

AGAIN = "record the trace again"


class LayerRouting(NamedTuple):
    """What one MoE layer did: fields (N, T, E), as in a RoutingRecord."""

    chosen: Tensor  # bool
    probs: Tensor
    combine: Tensor


class Trace:
    """A trace in a folder: ``layer(0)`` is the routing of its first MoE layer, ``beside("tokens")``
    the tokens (positions, labels), ``items`` their number and ``card`` what ``trace.json`` says.
    """

    def __init__(self, folder: str | Path) -> None:
        """Raise UserError, one line, for what is no trace, of another format, or damaged."""
        self.folder = Path(folder)
        self.card = read_trace_card(self.folder / CARD)
        for chunk in self.card.chunks:
            path = self.folder / chunk.file
            with open_tensors(path):
                if chunk.sha256 is not None and file_checksum(path) != chunk.sha256:
                    raise UserError(f"{path}: damaged, its content is not what {CARD} says")

    @property
    def items(self) -> int:
        """Number of items."""
        return sum(chunk.items for chunk in self.card.chunks)

    @property
    def shape(self) -> tuple[int, list[tuple[int, int]]]:
        """Number of items, and of each layer tokens and experts."""
        return self.items, [(layer.tokens, layer.experts) for layer in self.card.layers]

    def layer(self, number: int, items: np.ndarray | None = None) -> LayerRouting:
        """Return the routing of a layer, from 0, of the items at these places (N,), or of all."""
        known = self.card.layers[number]
        names = [f"{number}.{field}" for field in ("experts", "weights", "probs")]
        parts = []
        for path, (experts, weights, probs) in self._read_parts(names, items):
            size = (known.tokens, known.experts)
            fits = experts.shape == weights.shape and experts.shape[:2] == probs.shape[:2]
            other = tuple(probs.shape[1:]) != size or (experts >= known.experts).any()
            if other or not fits:
                problem = f"{', '.join(names)}: found other shapes, or other experts"
                raise UserError(f"{path}: {problem}; allowed: of (tokens, experts) {size}")
            if experts.is_floating_point():
                raise UserError(f"{path}: {names[0]}: found {experts.dtype}; allowed: integers")
            check_layer_values(probs, weights, f"{path}: {number}")
            routing = decode_layer_routing(experts, weights.float(), probs.float())
            if routing.chosen.sum() != (experts >= 0).sum():
                problem = f"{names[0]}: found an expert twice for one token"
                raise UserError(f"{path}: {problem}; allowed: once, and -1 for none")
            parts.append(routing)
        return LayerRouting(*map(torch.cat, zip(*parts, strict=True)))

    def beside(self, name: str, items: np.ndarray | None = None) -> Tensor | None:
        """Return ``tokens``, ``positions`` or ``labels`` of the items, int64, or ``pictures``,
        uint8; None without any.
        """
        with open_tensors(self.folder / self.card.chunks[0].file) as file:
            if name not in file.keys():
                return None
        parts = []
        for path, (part,) in self._read_parts([name], items):
            check_beside(name, part, len(part), self.card.layers, str(path))
            parts.append(part if name == "pictures" else part.long())
        values = torch.cat(parts)
        if name == "tokens":
            check_tokens_in_vocabulary(values, len(self.card.vocabulary), str(self.folder))
        return values

    def _read_parts(
        self, names: list[str], items: np.ndarray | None
    ) -> Iterator[tuple[Path, list[Tensor]]]:
        """Yield each file that has any of the items, and their tensors of these names."""
        items = np.arange(self.items) if items is None else items
        first = 0
        for chunk in self.card.chunks:
            places = items[(items >= first) & (items < first + chunk.items)] - first
            first += chunk.items
            if not len(places):
                continue
            path = self.folder / chunk.file
            with open_tensors(path) as file:
                if lacking := sorted({*names} - {*file.keys()}):
                    raise UserError(f"{path}: found no {lacking[0]}; {AGAIN}")
                tensors = [file.get_tensor(name) for name in names]
            if {len(tensor) for tensor in tensors} != {chunk.items}:
                problem = f"{names[0]}: found {len(tensors[0])} items"
                raise UserError(f"{path}: {problem}; allowed: {chunk.items}, as {CARD} says")
            yield path, [tensor[places] for tensor in tensors]


@contextmanager
def open_tensors(path: Path) -> Iterator[Any]:
    """Open a file of safetensors inside the ``with``; UserError for what is none, or cut off."""
    try:
        check_header_size(path)
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: missing, damaged or cut off ({error}); {AGAIN}") from error


def read_trace_card(path: Path) -> TraceCard:
    """Return what ``trace.json`` says. Raises UserError where it is none, or of another format."""
    try:
        return TraceCard.model_validate_json(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; a trace is a folder with {CARD}") from None
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "JSON"
        said = first["msg"].replace("Input should be", "allowed:")
        problem = f"{key}: found {str(first['input'])[:40]}; {said}"
        if first["type"] == "value_error":
            problem = f"{key}: {said.removeprefix('Value error, ')}"
        raise UserError(f"{path}: {' '.join(problem.split())}") from None


def decode_layer_routing(experts: Tensor, weights: Tensor, probs: Tensor) -> LayerRouting:
    """Return what ``encode_experts_and_weights`` was given.

    experts and weights: (N, T, S), probs: (N, T, E).
    """
    number = probs.shape[-1]
    place = experts.long().where(experts >= 0, number)  # a column more takes what is no expert
    rows = (*probs.shape[:-1], number + 1)
    chosen = torch.zeros(rows, dtype=torch.bool).scatter(-1, place, True)
    combine = torch.zeros(rows).scatter(-1, place, weights)
    return LayerRouting(chosen[..., :number], probs, combine[..., :number])
