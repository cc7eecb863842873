"""A trace is written file by file, as its items come: no more of them is in memory than one has.

B items, T tokens of one, E experts, S the most experts that a token chose.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from moecore.core.files import UserError, file_checksum, whole_folder, write_json
from moecore.core.routing_records import RoutingRecord
from moecore.core.safetensors_files import write_tensors
from moecore.lens.traces import (
    BESIDE,
    CARD,
    FORMAT,
    ChunkFile,
    LayerShape,
    TraceCard,
    check_beside,
    check_layer_values,
    check_layout,
    check_tokens_in_vocabulary,
)
from moecore.nn.router_hooks import check_record

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
