"""Traces: folders with ``trace.json`` and files of safetensors, in which any program can leave what
the routers of any model did with a stream of items: texts or images.

B items of a file, T tokens of each, E experts, S the most experts that a token chose. A file has
for each MoE layer, by its number from 0:

``0.experts``  integers (B, T, S): those chosen before capacity; −1 where a token chose fewer
``0.weights``  (B, T, S): of their outputs; 0 where an expert had no room
``0.probs``    (B, T, E): the router's probabilities, without noise

and, where they are known, ``tokens`` and ``positions``, integers (B, T), ``labels``, integers (B,)
or (B, T) from 0, below 0 where one is not known, and ``pictures``, bytes (B, C, H, W), gray or red,
green and blue, small. Layers may differ in E and T, items may not: a text is cut into parts of one
length, without padding. ``trace.json`` is a ``TraceCard``.

Its ``format`` is 2; 1 had no ``special``, ``grid`` and ``pictures``. The number rises when a
program for the number before cannot read a trace; moecore reads all up to its own.

A trace is read layer by layer: no more than one layer of the N items asked for is in memory. It is
written file by file, as its items come: no more than the items of one file are in memory.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import torch
from pydantic import Field, ValidationError, model_validator
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn.functional import pad

from moecore.core.config import Config
from moecore.core.files import UserError, file_checksum, whole_folder, write_json
from moecore.core.routing_records import RoutingRecord, TokenLayout
from moecore.core.safetensors_files import check_header_size, write_tensors
from moecore.nn.router_hooks import check_record

FORMAT = 2
CARD = "trace.json"
BESIDE = ("tokens", "positions", "labels", "pictures")
LARGEST = 256  # pixels along a side of a picture


class LayerShape(Config):
    """One MoE layer."""

    experts: int = Field(ge=1)
    tokens: int = Field(ge=1)  # of an item
    k: int = Field(ge=0)  # experts that a token chose, at most
    special: int = Field(0, ge=0)  # tokens in front that are no patches, or no words
    grid: tuple[int, ...] = ()  # of the others, the last axis the fastest; (): in a row

    @model_validator(mode="after")
    def _fits(self) -> Self:
        check_layout(self.tokens, self.special, self.grid)
        return self

    def layout(self, size: Sequence[int] = ()) -> TokenLayout:
        """Return where the tokens lie, of pictures with so many pixels along each axis."""
        grid = self.grid or (self.tokens - self.special,)
        return TokenLayout(self.special, grid, tuple(size))


def check_layout(tokens: int, special: int, grid: Sequence[int]) -> None:
    """Raise ValueError unless special tokens and a grid, if there is one, are all tokens."""
    if special >= tokens or (grid and special + prod(grid) != tokens):
        problem = f"found {special} special tokens and a grid {tuple(grid)}"
        raise ValueError(f"{problem}; allowed: together the {tokens} tokens of the layer")


class ChunkFile(Config):
    """One file, with some of the items."""

    file: str = Field(pattern=r"^[\w.-]+$")
    items: int = Field(ge=1)
    sha256: str | None = None  # None: its bytes are not verified


class TraceCard(Config):
    """``trace.json``."""

    format: Literal[1, 2]
    model: str
    layers: tuple[LayerShape, ...] = Field(min_length=1)
    chunks: tuple[ChunkFile, ...] = Field(min_length=1)
    vocabulary: tuple[str, ...] = ()  # the word of each token's number


def check_tokens_in_vocabulary(tokens: Tensor, words: int, where: str) -> None:
    """Raise UserError where a token has no word in a vocabulary of so many; 0: there is none."""
    wrong = tokens[(tokens < 0) | (tokens >= words)]
    if words and wrong.numel():
        allowed = f"0 to {words - 1}, the words of the vocabulary: is it of another tokenizer?"
        raise UserError(f"{where}: tokens: found {int(wrong[0])}; allowed: {allowed}")


def check_layer_values(probs: Tensor, weights: Tensor, where: str) -> None:
    """Raise UserError for probabilities that are below 0, or no numbers, and for such weights."""
    for name, values, wrong in (
        ("probs", probs, ~probs.isfinite() | (probs < 0)),
        ("weights", weights, ~weights.isfinite()),
    ):
        if wrong.any():
            allowed = "finite numbers" + ", not below 0" * (name == "probs")
            raise UserError(f"{where}.{name}: found {float(values[wrong][0])}; allowed: {allowed}")


def check_beside(
    name: str, values: Any, items: int, layers: Sequence[LayerShape], where: str
) -> None:
    """Raise UserError unless these are integers (items, T), T the tokens of any layer; labels may
    be (items,), too, and pictures are what ``check_pictures`` says.
    """
    if name not in BESIDE:
        raise UserError(f"{where}: found {name}; allowed: {', '.join(BESIDE)}")
    if not isinstance(values, Tensor):
        raise UserError(f"{where}: {name}: found {type(values).__name__}; allowed: a tensor")
    if name == "pictures":
        check_pictures(values, items, layers, where)
        return
    if values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
        raise UserError(f"{where}: {name}: found {values.dtype}; allowed: integers")
    shapes: list[tuple[int, ...]] = [
        (items, number) for number in dict.fromkeys(layer.tokens for layer in layers)
    ]
    if name == "labels":
        shapes.append((items,))
    if tuple(values.shape) not in shapes:
        problem = f"found {name} of shape {tuple(values.shape)}"
        raise UserError(f"{where}: {problem}; allowed: {' or '.join(map(str, shapes))}")


def check_pictures(values: Tensor, items: int, layers: Sequence[LayerShape], where: str) -> None:
    """Raise UserError unless these are bytes (items, 1 or 3, H, W), small, of whole patches."""
    size = values.shape[2:]
    fits = values.ndim == 4 and len(values) == items and values.shape[1] in (1, 3)
    if not fits or values.dtype != torch.uint8 or max(size) > LARGEST:
        problem = f"found pictures of shape {tuple(values.shape)}, {values.dtype}"
        allowed = f"({items}, 1 or 3, height, width), torch.uint8, sides of {LARGEST} at most"
        raise UserError(f"{where}: {problem}; allowed: {allowed}")
    for layer in layers:
        if len(layer.grid) != 2 or any(side % n for side, n in zip(size, layer.grid, strict=True)):
            problem = f"found pictures of {tuple(size)} pixels and a grid {layer.grid} of patches"
            raise UserError(f"{where}: {problem}; allowed: grids of two axes that divide the sides")


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


PROBABILITIES = 2**24  # of a file: 64 MiB; one batch more than they allow


@contextmanager
def write_trace(
    folder: str | Path,
    model: str,
    vocabulary: Sequence[str] = (),
    layouts: Sequence[Sequence[Any]] = (),
) -> Iterator["TraceWriter"]:
    """Write a trace into ``folder`` inside the ``with``, which appears whole at its end.

    model: its name.  vocabulary: the word of each token's number.  layouts: of each MoE layer, or
    once for all, how many special tokens stand in front, and the grid of the others, such as
    ``(1, (14, 14))`` of images.  An older trace is replaced; raises UserError for a folder that
    holds anything else.
    """
    folder = Path(folder)
    if not isinstance(model, str):
        raise UserError(f"name: found {type(model).__name__}; allowed: a text, the model's name")
    check_vocabulary(vocabulary)
    if folder.exists() and not (folder / CARD).is_file():
        raise UserError(f"{folder}: holds no trace; allowed: a new folder, or an older trace")
    with whole_folder(folder) as temporary:
        writer = TraceWriter(temporary, len(vocabulary), layouts)
        yield writer
        writer.write_chunk()
        if not writer.chunks:
            raise UserError(f"{folder}: nothing was added; allowed: one item and more")
        card = TraceCard(
            format=FORMAT,
            model=model,
            layers=writer.layers,
            chunks=writer.chunks,
            vocabulary=vocabulary,
        )
        write_json(temporary / CARD, card.model_dump(mode="json"))


def check_vocabulary(vocabulary: Any) -> None:
    """Raise UserError unless it is a list, or a tuple, of words."""
    others = [vocabulary]
    if isinstance(vocabulary, list | tuple):
        others = [word for word in vocabulary if not isinstance(word, str)]
    if others:
        problem = f"found {type(others[0]).__name__} {str(others[0])[:40]}"
        raise UserError(f"vocabulary: {problem}; allowed: a list of words, as texts")


class TraceWriter:
    """Takes the records of batches: ``add(records, tokens=…, labels=…)``."""

    def __init__(self, folder: Path, words: int = 0, layouts: Sequence[Sequence[Any]] = ()) -> None:
        """``words``: of the vocabulary; 0: there is none.  layouts: see ``write_trace``."""
        self.folder = folder
        self.words = words
        self.layouts = layouts
        self.layers: list[LayerShape] = []
        self.chunks: list[ChunkFile] = []
        self._kept: list[dict[str, Tensor]] = []
        self._probabilities = 0

    def add(self, records: Sequence[RoutingRecord], **beside: Tensor) -> None:
        """Add the records of one forward pass, one of each MoE layer, with fields (B, T, E).

        beside: ``tokens`` and ``positions``, integers (B, T), ``labels``, (B,) or (B, T) from 0,
        below it unknown, and ``pictures``, uint8 (B, 1 or 3, H, W), where layouts are known.
        Raises UserError where they do not fit each other or what came before.
        """
        layers = self._check_batch(beside, records)
        tensors = {name: value.cpu() for name, value in beside.items()}
        for number, record in enumerate(records):
            experts, weights = encode_experts_and_weights(record)
            probs = record.probs.detach()
            check_layer_values(probs, weights, f"trace: {number}")
            parts = {"experts": experts, "weights": weights, "probs": probs}
            tensors |= {f"{number}.{name}": part.cpu() for name, part in parts.items()}
            k = max(experts.shape[-1], layers[number].k)
            layers[number] = layers[number].model_copy(update={"k": k})
            self._probabilities += probs.numel()
        self.layers = layers
        self._kept.append(tensors)
        if self._probabilities >= PROBABILITIES:
            self.write_chunk()

    def write_chunk(self) -> None:
        """Write what is kept in memory, if anything is, as one file."""
        if not self._kept:
            return
        tensors = {name: join_batches(name, self._kept) for name in self._kept[0]}
        path = self.folder / f"{len(self.chunks):05d}.safetensors"
        write_tensors(path, tensors)
        items = len(tensors["0.probs"])
        self.chunks.append(ChunkFile(file=path.name, items=items, sha256=file_checksum(path)))
        self._kept, self._probabilities = [], 0

    def _check_batch(
        self, beside: Mapping[str, Any], records: Sequence[RoutingRecord]
    ) -> list[LayerShape]:
        """Return the layers. Raises UserError for others, or other names, than before, and for
        shapes of other items.
        """
        for number, record in enumerate(records):
            check_record(record, f"trace: {number}")
        sizes = [tuple(record.probs.shape[1:]) for record in records]
        before = [(layer.tokens, layer.experts) for layer in self.layers] or sizes
        if sizes != before or not sizes or any(len(size) != 2 for size in sizes):
            allowed = f"{before}, as before; cut texts to parts of one length"
            raise UserError(f"trace: found layers of (tokens, experts) {sizes}; allowed: {allowed}")
        if self._kept and {*beside} != {*self._kept[0]} & {*BESIDE}:
            raise UserError(f"trace: found {sorted(beside)}; allowed: in all batches the same")
        items = len(records[0].probs)
        if others := {len(record.probs) for record in records} - {items}:
            problem = f"found layers of {items} and {others.pop()} items; allowed: of all the same"
            raise UserError(f"trace: {problem}; is a router called twice in a pass?")
        layers = list(self.layers) or arrange_layers(sizes, self.layouts)
        for name, value in beside.items():
            check_beside(name, value, items, layers, "trace")
        if "tokens" in beside:
            check_tokens_in_vocabulary(beside["tokens"], self.words, "trace")
        return layers


def arrange_layers(
    sizes: Sequence[tuple[int, ...]], layouts: Sequence[Sequence[Any]]
) -> list[LayerShape]:
    """Return layers of (tokens, experts) with these layouts, as ``write_trace`` has them.

    Raises UserError where their numbers differ, or tokens do not lie as one says.
    """
    each = list(layouts) * len(sizes) if len(layouts) == 1 else list(layouts)
    each = each or [(0, ())] * len(sizes)
    if len(each) != len(sizes):
        problem = f"found {len(each)}; allowed: one for all, or one of each of {len(sizes)} layers"
        raise UserError(f"layouts: {problem}")
    layers = []
    for (tokens, experts), layout in zip(sizes, each, strict=True):
        try:
            special, grid = int(layout[0]), tuple(map(int, layout[1]))
            check_layout(tokens, special, grid)
        except (TypeError, IndexError):
            allowed = "pairs of special tokens and the grid of the others, as (1, (14, 14))"
            raise UserError(f"layouts: found {layout}; allowed: {allowed}") from None
        except ValueError as error:
            raise UserError(f"layouts: {error}") from None
        layers.append(LayerShape(tokens=tokens, experts=experts, k=0, special=special, grid=grid))
    return layers


def join_batches(name: str, batches: Sequence[Mapping[str, Tensor]]) -> Tensor:
    """Return the tensors of this name as one, those of choices padded to the widest."""
    tensors = [batch[name] for batch in batches]
    if not name.endswith((".experts", ".weights")):
        return torch.cat(tensors)
    widest = max(tensor.shape[-1] for tensor in tensors)
    none = -1 if name.endswith(".experts") else 0
    return torch.cat([pad(each, (0, widest - each.shape[-1]), value=none) for each in tensors])


def encode_experts_and_weights(record: RoutingRecord) -> tuple[Tensor, Tensor]:
    """Return the experts chosen, int16 (B, T, S), most weight first, then −1, and their weights.

    Raises UserError where an expert has a weight that was not chosen.
    """
    chosen, combine = record.chosen, record.combine.detach()
    if ((combine != 0) & ~chosen).any():
        raise UserError("trace: found a weight of an expert that was not chosen; allowed: 0")
    ranked, experts = combine.where(chosen, -torch.inf).topk(int(chosen.sum(dim=-1).max()))
    none = ranked == -torch.inf
    return experts.masked_fill(none, -1).short(), ranked.masked_fill(none, 0)
