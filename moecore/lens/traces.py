"""Read and write traces: folders with the routing of many texts or images.

A trace has ``trace.json``, a ``TraceCard``, and safetensors files. Of B items per file, T tokens
per item, E experts and S, the largest number of experts that a token chose, a file has for each MoE
layer, numbered from 0:

``0.experts``  integers (B, T, S): chosen experts, before capacity; −1 where a token chose fewer
``0.weights``  (B, T, S): weights of their outputs; 0 for an expert over capacity
``0.probs``    (B, T, E): probabilities of the router, without noise

and optional item tensors: ``tokens`` and ``positions``, integers (B, T), ``labels``, integers (B,)
or (B, T), negative where unknown, and ``pictures``, bytes (B, 1 or 3, H, W). E and T may differ
between layers, not between items: texts are cut into parts of equal length, without padding.

``format`` is 2; format 1 had no ``special``, ``grid`` and ``pictures``. It rises when older
programs cannot read a new trace; moecore reads all formats up to its own.

Reading keeps one layer of the requested items in memory, writing keeps the items of one file.
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

from moecore.core import config, safetensors_files
from moecore.core.files import UserError, atomic_folder, file_checksum, write_json
from moecore.core.routing_records import RoutingRecord, TokenLayout
from moecore.nn.routing_collection import check_record

FORMAT_VERSION = 2
CARD_FILE = "trace.json"
ITEM_TENSORS = ("tokens", "positions", "labels", "pictures")
MAX_SIDE = 256  # pixels of a picture
PROBABILITY_SUM_TOLERANCE = 0.02  # of probabilities in bfloat16
Layouts = Sequence[Sequence[Any]]  # of MoE layers: see ``write_trace``
REMEDY = "record the trace again"
PROBABILITIES_PER_FILE = 2**24  # in memory after which a file is written, 64 MiB


class LayerShape(config.Config):
    """Sizes of one MoE layer, as stored in ``trace.json``."""

    experts: int = Field(ge=1)
    tokens: int = Field(ge=1)  # per item
    k: int = Field(ge=0)  # largest number of experts that a token chose
    special: int = Field(0, ge=0)  # leading tokens that are neither patches nor words
    grid: tuple[int, ...] = ()  # of the other tokens, last axis fastest; (): one row

    @model_validator(mode="after")
    def _check_special_and_grid(self) -> Self:
        check_token_layout(self.tokens, self.special, self.grid)
        return self

    def layout(self, size: Sequence[int] = ()) -> TokenLayout:
        """Return the tokens' layout; size: (height, width) of pictures in pixels, () without."""
        return TokenLayout(self.special, self.grid or (self.tokens - self.special,), tuple(size))


def check_token_layout(tokens: int, special: int, grid: Sequence[int]) -> None:
    if special >= tokens or (grid and special + prod(grid) != tokens):
        wrong = f"{special} special tokens and a grid {tuple(grid)}"
        raise ValueError(f"found {wrong}; allowed: together the {tokens} tokens of the layer")


class ChunkFile(config.Config):
    """One safetensors file of a trace, with some of the items."""

    file: str = Field(pattern=r"^[\w.-]+$")
    items: int = Field(ge=1)
    sha256: str | None = None  # None: not verified


class TraceCard(config.Config):
    """Content of ``trace.json``."""

    format: Literal[1, 2]
    model: str
    layers: tuple[LayerShape, ...] = Field(min_length=1)
    chunks: tuple[ChunkFile, ...] = Field(min_length=1)
    vocabulary: tuple[str, ...] = ()  # the word of each token's number


def check_tokens_in_vocabulary(tokens: Tensor, size: int, place: str) -> None:
    """Raise UserError at ``place`` for tokens ≥ ``size`` (of the vocabulary; 0: none)."""
    wrong = tokens[(tokens < 0) | (tokens >= size)]
    if size and wrong.numel():
        allowed = f"0 to {size - 1}, the words of the vocabulary: is it of another tokenizer?"
        raise UserError.at(f"{place}: tokens", found=int(wrong[0]), allowed=allowed)


def check_probs_and_weights(probs: Tensor, weights: Tensor, place: str) -> None:
    for name, values, lowest in (("probs", probs, 0), ("weights", weights, -torch.inf)):
        if not values.is_floating_point():
            raise UserError.at(f"{place}.{name}", found=values.dtype, allowed="floating point")
        if (wrong := ~values.isfinite() | (values < lowest)).any():
            allowed = f"finite numbers, not below {lowest}"
            raise UserError.at(f"{place}.{name}", found=float(values[wrong][0]), allowed=allowed)
    sums = probs.float().sum(-1)
    if (wrong := (sums - 1).abs() > PROBABILITY_SUM_TOLERANCE).any():
        raise UserError.at(f"{place}.probs", found=f"sum {float(sums[wrong][0]):.4g}", allowed=1)


def check_item_tensor(
    name: str, values: Any, items: int, layers: Sequence[LayerShape], place: str
) -> None:
    if name not in ITEM_TENSORS:
        raise UserError.at(place, found=name, allowed=", ".join(ITEM_TENSORS))
    if not isinstance(values, Tensor):
        raise UserError.at(f"{place}: {name}", found=type(values).__name__, allowed="a tensor")
    if name == "pictures":
        check_pictures(values, items, layers, place)
        return
    if values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
        raise UserError.at(f"{place}: {name}", found=values.dtype, allowed="integers")
    numbers = dict.fromkeys(layer.tokens for layer in layers)
    shapes: list[tuple[int, ...]] = [(items, number) for number in numbers]
    if name == "labels":
        shapes.append((items,))
    if tuple(values.shape) not in shapes:
        shape = f"{name} of shape {tuple(values.shape)}"
        raise UserError.at(place, found=shape, allowed=" or ".join(map(str, shapes)))


def check_pictures(values: Tensor, items: int, layers: Sequence[LayerShape], place: str) -> None:
    """Raise UserError unless pictures are uint8 (items, 1 or 3, H, W), divisible by grids."""
    size = values.shape[2:]
    fits = values.ndim == 4 and len(values) == items and values.shape[1] in (1, 3)
    if not fits or values.dtype != torch.uint8 or max(size) > MAX_SIDE:
        shape = f"pictures of shape {tuple(values.shape)}, {values.dtype}"
        allowed = f"({items}, 1 or 3, height, width), torch.uint8, sides of {MAX_SIDE} at most"
        raise UserError.at(place, found=shape, allowed=allowed)
    for layer in layers:
        if len(layer.grid) != 2 or any(side % n for side, n in zip(size, layer.grid, strict=True)):
            shape = f"pictures of {tuple(size)} pixels and a grid {layer.grid} of patches"
            allowed = "grids of two axes that divide the sides"
            raise UserError.at(place, found=shape, allowed=allowed)


class LayerRouting(NamedTuple):
    """Routing of one MoE layer for N items: three fields of a RoutingRecord.

    Attributes:
        chosen: bool (N, T, E), before capacity.
        probs: (N, T, E), without noise.
        combine: (N, T, E), weights of the experts' outputs.
    """

    chosen: Tensor
    probs: Tensor
    combine: Tensor


class Trace:
    """A trace that is read from a folder.

    Attributes:
        folder: the folder.
        card: the content of ``trace.json``: layers, files and vocabulary.
    """

    def __init__(self, folder: str | Path) -> None:
        """Open the trace and check its files.

        Raises:
            UserError: the folder holds no trace, one of another format, or a damaged one.
        """
        self.folder = Path(folder)
        self.card = read_trace_card(self.folder / CARD_FILE)
        names = [chunk.file for chunk in self.card.chunks]
        if len({*names}) < len(names):
            place = f"{self.folder / CARD_FILE}: chunks"
            raise UserError.at(place, found=names, allowed="each once")
        for chunk in self.card.chunks:
            path = self.folder / chunk.file
            with opening_tensor_file(path):
                if chunk.sha256 is not None and file_checksum(path) != chunk.sha256:
                    raise UserError(f"{path}: damaged, its checksum is not the one in {CARD_FILE}")

    @property
    def items(self) -> int:
        """Number of items."""
        return sum(chunk.items for chunk in self.card.chunks)

    @property
    def shape(self) -> tuple[int, list[tuple[int, int]]]:
        """Number of items, and (tokens, experts) of each layer."""
        return self.items, [(layer.tokens, layer.experts) for layer in self.card.layers]

    def layer(self, number: int, items: np.ndarray | None = None) -> LayerRouting:
        """Return the routing of an MoE layer.

        Args:
            number: of the layer, from 0.
            items: indices (N,) of items in ascending order; None: all items.

        Raises:
            UserError: tensors of the layer are missing, or do not fit ``trace.json``.
        """
        shape = self.card.layers[number]
        names = [f"{number}.{field}" for field in ("experts", "weights", "probs")]
        parts = []
        for path, (experts, weights, probs) in self._read_tensors_per_file(names, items):
            place = f"{path}: {names[0]}"
            size = (shape.tokens, shape.experts)
            fits = experts.shape == weights.shape and experts.shape[:2] == probs.shape[:2]
            if experts.is_floating_point() or experts.dtype == torch.bool:
                raise UserError.at(place, found=experts.dtype, allowed="integers")
            differs = tuple(probs.shape[1:]) != size or not experts.shape[-1] <= shape.k <= size[1]
            if differs or not fits or (experts >= shape.experts).any() or experts.amax() < 0:
                text = "other shapes, or other experts, or none"
                allowed = f"(tokens, experts) {size}, of them {shape.k} at most per token"
                raise UserError.at(f"{path}: {', '.join(names)}", found=text, allowed=allowed)
            if (experts < -1).any() or weights[experts < 0].any():
                text = "an expert below -1, or a weight of the expert -1"
                raise UserError.at(place, found=text, allowed="-1 with weight 0")
            check_probs_and_weights(probs, weights, f"{path}: {number}")
            routing = decode_layer_routing(experts, weights.float(), probs.float())
            if routing.chosen.sum() != (experts >= 0).sum():
                text = "an expert twice for one token"
                raise UserError.at(place, found=text, allowed="each once, and -1 for none")
            parts.append(routing)
        return LayerRouting(*map(torch.cat, zip(*parts, strict=True)))

    def item_tensor(self, name: str, items: np.ndarray | None = None) -> Tensor | None:
        """Return an item tensor; None if the trace has none of this name.

        Args:
            name: ``tokens``, ``positions``, ``labels`` (int64) or ``pictures`` (uint8).
            items: indices (N,) of items in ascending order; None: all items.

        Raises:
            UserError: the tensor has a wrong type, shape or range.
        """
        with opening_tensor_file(self.folder / self.card.chunks[0].file) as file:
            if name not in file.keys():
                return None
        parts = []
        for path, (part,) in self._read_tensors_per_file([name], items):
            check_item_tensor(name, part, len(part), self.card.layers, str(path))
            parts.append(part if name == "pictures" else part.long())
        values = torch.cat(parts)
        if name == "tokens":
            check_tokens_in_vocabulary(values, len(self.card.vocabulary), str(self.folder))
        return values

    def _read_tensors_per_file(
        self, names: list[str], items: np.ndarray | None
    ) -> Iterator[tuple[Path, list[Tensor]]]:
        """Yield (path, items' tensors ``names``) per file that has any of ``items``; None: all."""
        items = np.arange(self.items) if items is None else items
        first = 0
        for chunk in self.card.chunks:
            places = items[(items >= first) & (items < first + chunk.items)] - first
            first += chunk.items
            if not len(places):
                continue
            path = self.folder / chunk.file
            with opening_tensor_file(path) as file:
                if missing := sorted({*names} - {*file.keys()}):
                    raise UserError(f"{path}: found no {missing[0]}; {REMEDY}")
                tensors = [file.get_tensor(name) for name in names]
            if {len(tensor) for tensor in tensors} != {chunk.items}:
                items_found = f"{len(tensors[0])} items"
                allowed = f"{chunk.items}, as in {CARD_FILE}"
                raise UserError.at(f"{path}: {names[0]}", found=items_found, allowed=allowed)
            yield path, [tensor[places] for tensor in tensors]


@contextmanager
def opening_tensor_file(path: Path) -> Iterator[Any]:
    try:
        safetensors_files.check_header_size(path)
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: missing, damaged or cut off ({error}); {REMEDY}") from error


def read_trace_card(path: Path) -> TraceCard:
    try:
        return TraceCard.model_validate_json(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; a trace is a folder with {CARD_FILE}") from None
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "JSON"
        message = first["msg"].replace("Input should be", "allowed:")
        if first["type"] == "value_error":
            text = f"{key}: {message.removeprefix('Value error, ')}"
        else:
            text = f"{key}: found {str(first['input'])[:40]}; {message}"
        raise UserError(f"{path}: {' '.join(text.split())}") from None


def decode_layer_routing(experts: Tensor, weights: Tensor, probs: Tensor) -> LayerRouting:
    """Convert a file's expert ids and weights (N, T, S) to dense routing (N, T, E)."""
    number = probs.shape[-1]
    # Empty slots, −1, are written into one additional column, which is cut off.
    columns = experts.long().where(experts >= 0, number)
    shape = (*probs.shape[:-1], number + 1)
    chosen = torch.zeros(shape, dtype=torch.bool).scatter(-1, columns, True)
    combine = torch.zeros(shape).scatter(-1, columns, weights)
    return LayerRouting(chosen[..., :number], probs, combine[..., :number])


@contextmanager
def write_trace(
    folder: str | Path, model: str, vocabulary: Sequence[str] = (), layouts: Layouts = ()
) -> Iterator["TraceWriter"]:
    """Yield a writer of a trace; the folder appears, complete, at the end of the ``with``.

    Args:
        folder: the folder to write. An older trace in it is replaced.
        model: name of the model.
        vocabulary: the word of each token number.
        layouts: of each MoE layer, or one for all: the number of leading special tokens and the
            grid of the other tokens, such as ``(1, (14, 14))`` for images.

    Raises:
        UserError: the folder holds something else than a trace, or no item was added.
    """
    folder = Path(folder)
    if not isinstance(model, str):
        raise UserError.at("name", found=type(model).__name__, allowed="a text, the model's name")
    wrong: list[Any] = [vocabulary]
    if isinstance(vocabulary, list | tuple):
        wrong = [word for word in vocabulary if not isinstance(word, str)]
    if wrong:
        value = f"{type(wrong[0]).__name__} {str(wrong[0])[:40]}"
        raise UserError.at("vocabulary", found=value, allowed="a list of words, as texts")
    if folder.exists() and not (folder / CARD_FILE).is_file():
        raise UserError(f"{folder}: holds no trace; allowed: a new folder, or an older trace")
    with atomic_folder(folder) as temporary:
        writer = TraceWriter(temporary, len(vocabulary), layouts)
        yield writer
        writer.write_chunk()
        if not writer.chunks:
            raise UserError(f"{folder}: nothing was added; allowed: one item and more")
        layers, chunks = writer.layers, writer.chunks
        card = TraceCard(
            format=FORMAT_VERSION, model=model, layers=layers, chunks=chunks, vocabulary=vocabulary
        )
        write_json(temporary / CARD_FILE, card.model_dump(mode="json"))


class TraceWriter:
    """Writer of a trace, yielded by ``write_trace``: ``add(records, tokens=…, labels=…)``."""

    def __init__(self, folder: Path, vocabulary_size: int = 0, layouts: Layouts = ()) -> None:
        """Write to ``folder``; ``vocabulary_size`` is 0 without words (see ``write_trace``)."""
        self.folder = folder
        self.vocabulary_size = vocabulary_size
        self.layouts = layouts
        self.layers: list[LayerShape] = []
        self.chunks: list[ChunkFile] = []
        self._batches: list[dict[str, Tensor]] = []
        self._probabilities = 0

    def add(self, records: Sequence[RoutingRecord], **item_tensors: Tensor) -> None:
        """Add the records of one forward pass.

        Args:
            records: one per MoE layer, with fields (B, T, E).
            item_tensors: ``tokens`` and ``positions``, integers (B, T), ``labels``, integers (B,)
                or (B, T), negative where unknown, and, with layouts, ``pictures``, uint8
                (B, 1 or 3, H, W).

        Raises:
            UserError: the tensors do not fit each other or earlier batches.
        """
        layers = self._check_batch(item_tensors, records)
        tensors = {name: value.cpu() for name, value in item_tensors.items()}
        for number, record in enumerate(records):
            experts, weights = encode_experts_and_weights(record)
            probs = record.probs.detach()
            check_probs_and_weights(probs, weights, f"trace: {number}")
            parts = {"experts": experts, "weights": weights, "probs": probs}
            tensors |= {f"{number}.{name}": part.cpu() for name, part in parts.items()}
            k = max(experts.shape[-1], layers[number].k)
            layers[number] = layers[number].model_copy(update={"k": k})
            self._probabilities += probs.numel()
        self.layers = layers
        self._batches.append(tensors)
        if self._probabilities >= PROBABILITIES_PER_FILE:
            self.write_chunk()

    def write_chunk(self) -> None:
        """Write the batches in memory, if any, as one file."""
        if not self._batches:
            return
        tensors = {}
        for name in self._batches[0]:
            parts = [batch[name] for batch in self._batches]
            if name.endswith((".experts", ".weights")):
                widest = max(part.shape[-1] for part in parts)
                filler = -1 if name.endswith(".experts") else 0
                parts = [pad(part, (0, widest - part.shape[-1]), value=filler) for part in parts]
            tensors[name] = torch.cat(parts)
        path = self.folder / f"{len(self.chunks):05d}.safetensors"
        safetensors_files.write_tensors(path, tensors)
        items = len(tensors["0.probs"])
        self.chunks.append(ChunkFile(file=path.name, items=items, sha256=file_checksum(path)))
        self._batches = []
        self._probabilities = 0

    def _check_batch(
        self, item_tensors: Mapping[str, Any], records: Sequence[RoutingRecord]
    ) -> list[LayerShape]:
        """Return the layers' shapes; UserError if tensors do not fit each other or earlier ones."""
        for number, record in enumerate(records):
            check_record(record, f"trace: {number}")
        sizes = [tuple(record.probs.shape[1:]) for record in records]
        before = [(layer.tokens, layer.experts) for layer in self.layers] or sizes
        if sizes != before or not sizes or any(len(size) != 2 for size in sizes):
            allowed = f"{before}, as before; cut texts to parts of one length"
            raise UserError(f"trace: found layers of (tokens, experts) {sizes}; allowed: {allowed}")
        if self._batches and {*item_tensors} != {*self._batches[0]} & {*ITEM_TENSORS}:
            allowed = "in all batches the same"
            raise UserError.at("trace", found=sorted(item_tensors), allowed=allowed)
        items = len(records[0].probs)
        if different := {len(record.probs) for record in records} - {items}:
            numbers = f"{items} and {different.pop()} items"
            allowed = "the same number in all; is a router called twice in a pass?"
            raise UserError(f"trace: found layers of {numbers}; allowed: {allowed}")
        layers = list(self.layers) or build_layer_shapes(sizes, self.layouts)
        for name, value in item_tensors.items():
            check_item_tensor(name, value, items, layers, "trace")
        if "tokens" in item_tensors:
            check_tokens_in_vocabulary(item_tensors["tokens"], self.vocabulary_size, "trace")
        return layers


def build_layer_shapes(sizes: Sequence[tuple[int, ...]], layouts: Layouts) -> list[LayerShape]:
    """Build a LayerShape per layer; sizes: (tokens, experts); layouts: as in ``write_trace``."""
    layouts = list(layouts) or [(0, ())]
    if len(layouts) == 1:
        layouts = layouts * len(sizes)
    if len(layouts) != len(sizes):
        allowed = f"one for all, or one of each of {len(sizes)} layers"
        raise UserError.at("layouts", found=len(layouts), allowed=allowed)
    layers = []
    for (tokens, experts), layout in zip(sizes, layouts, strict=True):
        try:
            special = int(layout[0])
            grid = tuple(map(int, layout[1]))
            check_token_layout(tokens, special, grid)
        except (TypeError, IndexError):
            allowed = "pairs of special tokens and the grid of the others, such as (1, (14, 14))"
            raise UserError.at("layouts", found=layout, allowed=allowed) from None
        except ValueError as error:
            raise UserError(f"layouts: {error}") from None
        layers.append(LayerShape(tokens=tokens, experts=experts, k=0, special=special, grid=grid))
    return layers


def encode_experts_and_weights(record: RoutingRecord) -> tuple[Tensor, Tensor]:
    """Return experts by falling weight, int16 (B, T, S), −1 if fewer than S chosen; and weights."""
    chosen = record.chosen
    combine = record.combine.detach()
    if ((combine != 0) & ~chosen).any():
        raise UserError.at("trace", found="a weight of an expert that was not chosen", allowed=0)
    ranked, experts = combine.where(chosen, -torch.inf).topk(int(chosen.sum(dim=-1).max()))
    none = ranked == -torch.inf
    return experts.masked_fill(none, -1).short(), ranked.masked_fill(none, 0)
