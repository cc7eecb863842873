"""Run a model over data in batches in evaluation mode; build models on the meta device."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.overrides import TorchFunctionMode

from moecore.core.files import UserError
from moecore.core.routing_records import RoutingRecord
from moecore.nn.backbones.base_model import EncodeOptions, Model
from moecore.nn.backbones.language_model import LanguageTransformer
from moecore.tasks.next_token import NextToken


class ImageSequence(Protocol):
    """Images (N, C, *pixels), uint8 or in [0, 1]: an array, a tensor, or JPEG files."""

    @property
    def shape(self) -> Sequence[int]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, places: Any, /) -> Any: ...


BATCH = 256  # default images per forward pass
MAX_TOKENS_PER_BATCH = 2**13  # of blocks that are read together, including their earlier blocks
MAX_CPU_LOGITS = 2**19  # at a time, 2 MiB, which stay in the cache
MAX_GPU_LOGITS = 2**26
MIN_WORDS_PER_CHUNK = 64  # at a time: the head's weights are read once for all
MAX_STREAMS = 32  # that parts of one text are read in
MAX_VOXELS_PER_BATCH = 2**24  # maximum of a batch of volumes: 64 of 64³, 64 MiB in fp32


def predict_in_batches(
    model: nn.Module,
    images: ImageSequence,
    batch: int = BATCH,
    routing: bool = True,
    prediction: bool = True,
) -> tuple[Tensor, tuple[RoutingRecord, ...]]:
    """Return predictions and routing records of all images, in evaluation mode, in fp32.

    The result does not depend on ``batch``. The mode of every module and the global random state do
    not change.

    Args:
        model: the model.
        images: (N, C, H, W) or (N, C, D, H, W), uint8 (array, memory map or tensor) or floating
            point in [0, 1].
        batch: images per forward pass, rounded to complete groups if the model couples images.
        routing: false: return no records.
        prediction: false: return an empty prediction (of a text, logits are gigabytes).

    Returns:
        Logits (N, K), or (N, 1) in the target's unit, and per MoE layer a record of fields
        (N, T, E), on the CPU.

    Raises:
        UserError: if there are no images.
    """
    if len(images) == 0:
        raise UserError("prediction: there are no images; the split or the subset is empty")
    logits = []
    records = []
    batch = round_batch_to_groups(model, batch)
    with eval_mode(model), torch.no_grad(), torch.autocast(model_device(model).type, enabled=False):
        for pixels in image_batches(images, batch, model_device(model)):
            if prediction:
                output = model(pixels)
                logits.append(output.prediction.float().cpu())
                layer_records = output.routing
            else:
                assert isinstance(model, Model)
                layer_records = model.routing_of(pixels)
            layer_records = layer_records if routing else ()
            records.append(tuple(record.map_tensors(Tensor.cpu) for record in layer_records))
    return torch.cat(logits) if prediction else torch.empty(0), concat_records(records)


def score_last_blocks(model: Model, images: ImageSequence, labels: Tensor) -> Tensor:
    """Return each item's mean loss, nats per word of its last block of M words, (N,) fp64."""
    # images: (N, C, M) word ids, as a LanguageTransformer reads them. labels: (N, M), next words.
    return score_and_route_last_blocks(model, images, labels, routing=False)[0]


def score_and_route_last_blocks(
    model: Model, images: ImageSequence, labels: Tensor, routing: bool = True
) -> tuple[Tensor, tuple[RoutingRecord, ...]]:
    """Return ``score_last_blocks`` (N,), and a CPU routing record (N, T, E) per MoE layer."""
    assert isinstance(model, LanguageTransformer)
    size = max(1, MAX_TOKENS_PER_BATCH // math.prod(images.shape[1:]))
    scores = []
    records = []
    with eval_mode(model), torch.no_grad(), torch.autocast(model_device(model).type, enabled=False):
        batches = image_batches(images, size, model_device(model))
        for word_ids, next_words in zip(batches, labels.split(size), strict=True):
            tokens, layers, _ = model.encode(word_ids)
            targets = next_words.long().to(word_ids.device)
            nats = _compute_word_nats(model, tokens.flatten(0, 1), targets.flatten())
            scores.append(nats.view(targets.shape).mean(dim=1).cpu())
            if routing:
                records.append(tuple(layer.map_tensors(Tensor.cpu) for layer in layers))
    return torch.cat(scores), concat_records(records)


@torch.no_grad()
def text_perplexity(
    model: LanguageTransformer, tokens: Tensor, streams: int, full_blocks: bool = True
) -> float:
    """Return a text's perplexity, in evaluation mode, read as ``streams`` independent parts."""
    # tokens: (1, n) words, or (2, n) words and true kinds. The text is cut into ``streams`` streams
    # of equal length, which are read block by block from an empty cache. ``full_blocks``: drop a
    # last incomplete block, as papers do. A few streams are cut into parts, which are read in
    # parallel, each after the blocks that its predictions depend on.
    block = model.image.shape[0]
    number_of_words = tokens.shape[1]
    length = number_of_words // streams
    if length <= (block if full_blocks else 1):
        limit = number_of_words // (block + 1)
        raise UserError.at(
            "perplexity",
            found=f"{streams} streams of a text of {number_of_words:,} words",
            allowed=f"1 to {limit} streams of a block of {block}",
        )
    predicted = (length - 1) // block * block if full_blocks else length - 1  # words
    number = math.ceil(predicted / block)
    text = tokens[:, : streams * length].view(-1, streams, length).long().to(model_device(model))
    fill = (0, number * block - predicted)
    rows, (right, *_) = (
        pad(text[:, :, start : start + predicted], fill, value=-1).view(-1, streams, number, block)
        for start in (0, 1)
    )
    parts = max(1, min(number, MAX_STREAMS // streams)) if coupled_image_count(model) == 1 else 1
    size = math.ceil(number / parts)
    lead = model.reach if parts > 1 else 0
    states = model.initial_states(streams * parts, text.device)
    total = 0.0
    count = 0
    with eval_mode(model):
        for place in range(-lead, size):
            index = torch.arange(parts, device=text.device) * size + place
            exists = ((index >= 0) & (index < number))[:, None]
            index = index.clamp(0, number - 1)
            word_ids, *kinds = rows[:, :, index].where(exists, -1).flatten(1, 2)
            start = max(0, -place)
            (final, _, _), states = model.read(word_ids, states, EncodeOptions(), start, *kinds)
            labels = right[:, index].where(exists, -1).flatten(0, 1)
            if place >= 0:
                nats = _compute_word_nats(model, final[labels >= 0], labels[labels >= 0])
                total += float(nats.sum())
                count += len(nats)
    return math.exp(total / count)


def _compute_word_nats(model: LanguageTransformer, tokens: Tensor, labels: Tensor) -> Tensor:
    """Return −log p (nats, fp64) of each next word ``labels`` (n,), from normed tokens (n, d)."""
    task = model.image.task
    assert isinstance(task, NextToken)
    # few logits at a time stay in the cache: five times as fast
    rows = logits_chunk_size(task.outputs, tokens.device)
    parts = zip(tokens.split(rows), labels.split(rows), strict=True)
    return torch.cat([task.token_loss(model.predict(few), right) for few, right in parts])


def logits_chunk_size(outputs: int, device: torch.device) -> int:
    """Return for how many tokens to compute logits at once, given ``outputs`` logits per token."""
    logits = MAX_CPU_LOGITS if device.type == "cpu" else MAX_GPU_LOGITS
    return max(MIN_WORDS_PER_CHUNK, logits // outputs)


def build_last_block_reader(
    model: LanguageTransformer, images: Tensor, labels: Tensor
) -> Callable[[int], Tensor]:
    """Read text blocks but the last; return f: n → mean nats per word of n passes over it, (n,)."""
    # images: (1, C, M); all blocks but the last are read once, here. labels: (1, M), next words.
    word_ids, kinds = model.split_words_and_kinds(images)
    states = model.read_earlier(word_ids, kinds)

    @torch.no_grad()
    def read(times: int) -> Tensor:
        last, last_kinds = (values[:, -1].expand(times, -1) for values in (word_ids, kinds))
        (tokens, _, _), _ = model.read(last, states.expand(-1, times, -1, -1), kinds=last_kinds)
        targets = labels.long().expand(times, -1).flatten()
        return _compute_word_nats(model, tokens.flatten(0, 1), targets).view(times, -1).mean(dim=1)

    return read


def image_batches(
    images: ImageSequence, size: int, device: torch.device | str = "cpu"
) -> Iterator[Tensor]:
    """Yield batches of at most ``size`` images (fp32 in [0, 1]) or texts (word ids)."""
    if len(images.shape) == 5:
        size = min(size, max(1, MAX_VOXELS_PER_BATCH // math.prod(images.shape[1:])))
    for start in range(0, len(images), size):
        part = images[start : start + size]
        if not isinstance(part, Tensor):
            part = torch.from_numpy(np.array(part))
        if part.dtype in (torch.int32, torch.int64):
            yield part.to(device)  # words
            continue
        pixels = part.to(device).float()
        # divided on the device, so that one byte per pixel is transferred
        yield pixels / 255 if part.dtype == torch.uint8 else pixels


def round_batch_to_groups(model: nn.Module, batch: int) -> int:
    group = coupled_image_count(model)
    return max(1, batch // group) * group


def coupled_image_count(model: nn.Module) -> int:
    """Return how many consecutive images share expert capacity in evaluation; 1 if none do."""
    return math.lcm(*(getattr(module, "images_coupled_in_eval", 1) for module in model.modules()))


def concat_records(records: list[tuple[RoutingRecord, ...]]) -> tuple[RoutingRecord, ...]:
    return tuple(
        RoutingRecord(*(torch.cat(row) for row in zip(*layer, strict=True) if row[0] is not None))
        for layer in zip(*records, strict=True)
    )


def model_device(model: nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Set evaluation mode in the ``with`` block; restore modes and random state afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    device = model_device(model)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        model.eval()
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode


# random draws, which have no effect without values
IN_PLACE_DRAWS = (torch.Tensor.normal_, torch.Tensor.uniform_, torch.Tensor.exponential_)
NEW_DRAWS = (torch.randn, torch.rand)


@contextmanager
def meta_device_context() -> Iterator[None]:
    """Build modules in the ``with`` block on the meta device: shapes without values."""
    with torch.device("meta"), _NoDraws():
        yield


class _NoDraws(TorchFunctionMode):
    """Skips random draws, as ``normal_`` on meta takes 2 s to import torch's compiler."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        if func in IN_PLACE_DRAWS or getattr(func, "__module__", "") == torch.nn.init.__name__:
            return args[0] if args else named["tensor"]
        if func in NEW_DRAWS:
            named.pop("generator", None)
            return torch.empty(*args, **named)
        return func(*args, **named)
