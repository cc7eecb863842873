"""Read and analyse the expert ids that inference engines record (vLLM, SGLang, llama.cpp).

- vLLM (--enable-return-routed-experts), JSON responses: in 0.21 (its page "Routed Experts Replay")
  prompt_routed_experts and choices[].routed_experts, lists (tokens, layers, k), −1 for cached
  tokens; later (its tests) the latter, a base64 .npy file of all tokens but the last.
- SGLang (return_routed_experts; its page "OpenAI APIs - Completions" and its capturer): base64 of
  flat ids, int32 or routed_experts_dtype, in meta_info, sgl_ext or sglext.
- llama.cpp (pull request 28544, moe-trace): lines "layer,expert" without a header.

R requests, T tokens of a request, L MoE layers, E experts, k chosen per token.
"""

import base64
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from moecore.core.files import UserError
from moecore.lens.analyses import mean_and_limits
from moecore.measure.routing_metrics.choice_patterns import chance_maxvio, mean_pair_lift_by_image
from moecore.measure.routing_metrics.layer_metrics import linearize_at_mean
from moecore.statistics.comparisons import linearize_ratio

DTYPES = ("int32", "uint16", "uint8")
SUFFIXES = (".json", ".jsonl", ".csv")
ALLOWED_IDS = "(tokens, layers, k) integers, as lists or base64; did the engine record them?"
BATCH_SIZES = (8, 64)  # tokens, each of another request
CACHE_POLICIES = ("lru", "lfu", "static", "belady")
CHANCE_ROTATIONS = 50  # of the phases of a request, for the chance level


class EngineFacts(NamedTuple):
    """Facts about the model that engine files lack; None: unknown."""

    top_k: int | None = None
    layers: int | None = None
    first_layer: int = 0  # the first MoE layer
    experts: int | None = None


class EngineRequest(NamedTuple):
    """A request: name in errors, expert ids (T, L, k; −1: not recorded), length of its prompt."""

    place: str  # as in messages: a path, and for JSON the line, response and choice
    ids: np.ndarray
    prompt: int | None  # leading tokens of the prompt, before generated ones; None: unknown


def read_engine_files(paths: Sequence[Path], form: EngineFacts) -> list[EngineRequest]:
    requests: list[EngineRequest] = []
    for path in paths:
        for request in read_engine_file(path, form):
            ids = request.ids[:, form.first_layer :].astype(np.int64)
            shape = requests[0].ids.shape[1:] if requests else ids.shape[1:]
            if ids.shape[1:] != shape or ids.max(initial=-1) < 0:
                text = f"{ids.shape}, highest id {ids.max(initial=-1)}"
                allowed = f"recorded ids of (1 or more tokens, layers and k {shape})"
                raise UserError.at(request.place, found=text, allowed=allowed)
            requests.append(request._replace(ids=ids))
            check_expert_ids(requests[-1], form)
    if not requests:
        raise UserError.at(paths[0], found="no request", allowed="1 or more")
    return requests


def check_expert_ids(request: EngineRequest, form: EngineFacts) -> None:
    ids = np.sort(request.ids, axis=-1)
    is_twice = np.diff(ids, axis=-1, append=2**31) == 0
    highest = (form.experts or 2**31) - 1
    is_empty = (ids == -1).all(axis=-1, keepdims=True)
    for token, layer, slot in np.argwhere(~is_empty & (is_twice | (ids < 0) | (ids > highest)))[:1]:
        place = f"{request.place}: token {token}, layer {layer + form.first_layer}"
        text = f"expert {ids[token, layer, slot]} in {request.ids[token, layer].tolist()}"
        allowed = f"0 to {highest}, each once, or all -1 (dense layers: --first-layer)"
        raise UserError.at(place, found=text, allowed=allowed)


def read_engine_file(path: Path, form: EngineFacts) -> Iterator[EngineRequest]:
    if path.suffix not in SUFFIXES:
        raise UserError.at(path, found=f"suffix {path.suffix!r}", allowed=", ".join(SUFFIXES))
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise UserError.at(path, found=error, allowed="a readable file in UTF-8") from None
    if path.suffix == ".csv":
        yield read_llama_cpp_csv(path, text, form)
        return
    for line, part in enumerate([text] if path.suffix == ".json" else text.splitlines(), 1):
        try:
            value = json.loads(part)
        except ValueError as error:
            raise UserError.at(f"{path}:{line}", found=error, allowed="JSON responses") from None
        for number, response in enumerate(value if isinstance(value, list) else [value]):
            yield from read_engine_response(response, f"{path}:{line}: response {number}", form)


def read_engine_response(response: Any, place: str, form: EngineFacts) -> Iterator[EngineRequest]:
    response = response if isinstance(response, Mapping) else {}
    meta = response.get("meta_info")
    choices = [meta] if meta else response.get("choices") or []
    usage = meta or response.get("usage") or {}
    if not choices or not all(isinstance(part, Mapping) for part in (usage, *choices)):
        text = "no choices and no meta_info, or one or usage that is no object"
        raise UserError.at(place, found=text, allowed="a response of vLLM or SGLang")
    for number, choice in enumerate(choices):
        key = f"{place}, choice {number}: routed_experts"
        extra = choice.get("sgl_ext") or choice.get("sglext") or response.get("sglext") or {}
        ids = decode_expert_ids({**choice, **extra}, key, form)
        prompt, generated = usage.get("prompt_tokens"), usage.get("completion_tokens")
        if response.get("prompt_routed_experts") is not None:
            values = {"routed_experts": response["prompt_routed_experts"]}
            first = decode_expert_ids(values, f"{place}: prompt_routed_experts", form)
            if first.shape[1:] != ids.shape[1:]:
                raise UserError.at(key, found=ids.shape, allowed=f"(tokens, {first.shape[1:]})")
            prompt, ids = len(first), np.concatenate([first, ids])
        elif isinstance(prompt, int) and isinstance(generated, int):
            # The last token is never routed. SGLang may leave out the first ones.
            missing = prompt + generated - 1 - len(ids)
            if not 0 <= missing <= prompt:
                allowed = f"{generated - 1} to {prompt + generated - 1}, by the numbers of tokens"
                raise UserError.at(key, found=f"{len(ids)} tokens", allowed=allowed)
            prompt -= missing
        yield EngineRequest(key, ids, prompt)


def decode_expert_ids(choice: Mapping[str, Any], place: str, form: EngineFacts) -> np.ndarray:
    """Decode ``routed_experts`` (lists, base64 of .npy or of integers) to ids (T, L, k)."""
    payload = choice.get("routed_experts")
    dtype = choice.get("routed_experts_dtype", DTYPES[0])
    try:
        if not isinstance(payload, str):
            ids = np.array(payload)
        elif (data := base64.b64decode(payload, validate=True)).startswith(b"\x93NUMPY"):
            ids = np.load(BytesIO(data), allow_pickle=False)
        elif dtype in DTYPES and form.top_k and form.layers:
            ids = np.frombuffer(data, dtype).reshape(-1, form.layers, form.top_k)
        else:
            allowed = f"{', '.join(DTYPES)}, with --layers and --top-k"
            raise UserError.at(place, found=f"flat ids of {dtype}", allowed=allowed)
    except (ValueError, EOFError) as error:
        raise UserError.at(place, found=" ".join(str(error).split()), allowed=ALLOWED_IDS) from None
    if ids.ndim != 3 or ids.dtype.kind not in "iu":
        raise UserError.at(place, found=f"{ids.dtype} of shape {ids.shape}", allowed=ALLOWED_IDS)
    return ids


def read_llama_cpp_csv(path: Path, content: str, form: EngineFacts) -> EngineRequest:
    """Read a request from ``content``, the lines "layer,expert" of llama.cpp's forward passes."""
    # The prompt is what is evaluated before the last passes of one token each.
    lines = [line.split(",") for line in content.splitlines()]
    for line, cells in enumerate(lines, 1):
        if len(cells) != 2 or not all(cell.isdecimal() for cell in cells):
            text = repr(",".join(cells)[:40])
            raise UserError.at(f"{path}:{line}", found=text, allowed="layer,expert")
    if not form.top_k or not content.endswith("\n"):
        text = f"--top-k {form.top_k}, end {content[-9:]!r}"
        raise UserError.at(path, found=text, allowed="whole lines layer,expert, with --top-k")
    layer, expert = np.array(lines, int).T
    layers = np.unique(layer)
    starts = np.flatnonzero(np.diff(layer, prepend=layer[0] + 1) < 0)  # first rows of passes
    parts = []
    for first, last in zip(starts, [*starts[1:], len(layer)], strict=True):
        counts = [int((layer[first:last] == number).sum()) for number in layers]
        if len({*counts}) > 1 or counts[0] % form.top_k:
            allowed = f"as many of each layer in a pass, a multiple of k = {form.top_k}"
            text = f"{counts} lines of layers {layers.tolist()}"
            raise UserError.at(f"{path}:{first + 1}", found=text, allowed=allowed)
        parts.append(expert[first:last].reshape(len(layers), -1, form.top_k).swapaxes(0, 1))
    sizes = [len(part) for part in parts]
    while len(sizes) > 1 and sizes[-1] == 1:
        sizes.pop()
    return EngineRequest(str(path), np.concatenate(parts), sum(sizes) if len(layers) > 1 else None)


def simulate_cache(requests: Sequence[np.ndarray], size: int, policy: str) -> np.ndarray:
    """Simulate a cache of ``size`` experts shared by requests; return hits per request (R,)."""
    # requests: experts (n,) in order of use. On a miss, lru evicts the least recently used expert,
    # lfu the least often used (ties: least recently), belady the one with the farthest next use
    # (optimal if every miss is stored). static: always holds the experts most used in the others.
    if policy == "static":
        counts = [Counter(request.tolist()) for request in requests]
        total = sum(counts, Counter())
        hits = []
        for count in counts:
            hits.append(sum(count[expert] for expert, _ in (total - count).most_common(size)))
        return np.array(hits)
    uses = np.concatenate(requests).tolist()
    later: dict[int, int] = {}
    next_uses = [0] * len(uses)
    for time in range(len(uses) - 1, -1, -1):
        next_uses[time] = later.get(uses[time], len(uses))
        later[uses[time]] = time
    cached: dict[int, tuple[int, ...]] = {}  # expert → rank, the lowest is replaced
    number: Counter[int] = Counter()
    is_hit = np.zeros(len(uses))
    for time, expert in enumerate(uses):
        is_hit[time] = expert in cached
        if expert not in cached and len(cached) >= size:
            del cached[min(cached, key=cached.__getitem__)]
        number[expert] += 1
        ranks = {"lru": (time,), "lfu": (number[expert], time), "belady": (-next_uses[time],)}
        cached[expert] = ranks[policy]
    ends = np.cumsum([len(request) for request in requests])[:-1]
    return np.array([part.sum() for part in np.split(is_hit, ends)])


# quantity → (values (R,), one per request, whose mean is the quantity; chance level)
Quantities = dict[str, tuple[np.ndarray, float]]


def linearize_statistic(function: Callable[[Tensor], Tensor], rows: np.ndarray) -> np.ndarray:
    """Return jackknife pseudo-values (R,), with mean ``function`` of the mean of rows (R, D)."""
    return linearize_at_mean(function, torch.from_numpy(rows + 1e-12)).numpy()


def prompt_generation_distance(row: Tensor) -> Tensor:
    """Return the total variation distance of prompt and generated loads; row: both, (2 E,)."""
    prompt, generated = row.chunk(2)
    return (prompt / prompt.sum() - generated / generated.sum()).abs().sum() / 2


def measure_load_and_cache_hits(chosen: np.ndarray, sizes: Sequence[int]) -> Quantities:
    """Measure a layer's load, and the hits of caches of ``sizes`` experts; chosen: (R, T, E)."""
    experts = chosen.shape[2]
    loads = chosen.sum(axis=1, dtype=float)
    k = int(chosen.sum(axis=2).max())
    tokens = loads.sum(axis=1) / k
    uses = loads.sum()
    cv2 = linearize_statistic(lambda load: experts * (load / load.sum()).square().sum() - 1, loads)
    busiest = linearize_statistic(lambda load: load.max() / load.sum(), loads)
    measured = {
        "load_cv2": (cv2, (experts - k) / uses),
        "busiest_share": (busiest, (1 + chance_maxvio(int(uses), experts)) / experts),
    }
    rates = np.column_stack([loads, tokens])
    for size in BATCH_SIZES:

        def count_distinct(row: Tensor, size: int = size) -> Tensor:
            return (1 - (1 - row[:-1] / row[-1]).clamp_min(0) ** size).sum()

        chance = experts * (1 - (1 - k / experts) ** size)
        measured[f"experts_of_{size}_tokens"] = linearize_statistic(count_distinct, rates), chance
    if k > 1:  # the lift of padded texts, times the share of tokens that are no padding
        lift = mean_pair_lift_by_image(torch.from_numpy(chosen)).numpy()
        mean = tokens.mean()
        values = (lift * mean + lift.mean() * (tokens - mean)) / chosen.shape[1]
        measured["pair_lift"] = values, (k - 1) * experts / ((experts - 1) * k)
    orders = [np.nonzero(request)[1] for request in chosen]
    for size in sizes:
        for policy in CACHE_POLICIES:
            hits = simulate_cache(orders, size, policy)
            measured[f"hits_{policy}_{size}"] = linearize_ratio(hits, tokens * k), size / experts
    return measured


def compare_with_prompt(chosen: np.ndarray, lengths: np.ndarray, prompts: np.ndarray) -> Quantities:
    """Measure how much a layer's loads differ between prompts and generated tokens."""
    # Chance level: phase labels are rotated by random offsets in each request. lengths, prompts:
    # tokens of each request and of its prompt, (R, 1).
    generator = np.random.default_rng(0)
    values = []
    for rotation in range(1 + CHANCE_ROTATIONS):
        shifts = generator.integers(0, lengths) * (rotation > 0)
        is_prompt = ((np.arange(chosen.shape[1]) + shifts) % lengths < prompts)[..., None]
        rows = np.hstack([(chosen & is_prompt).sum(1), (chosen & ~is_prompt).sum(1)])
        values.append(linearize_statistic(prompt_generation_distance, rows))
    return {"phase_distance": (values[0], float(np.mean(values[1:])))}


def measure_engine_agreement(ours: np.ndarray, theirs: np.ndarray) -> Quantities:
    """Measure the share of equal choices (R, T, E) of two engines, and its chance level."""
    both = ours.any(axis=2, keepdims=True) & theirs.any(axis=2, keepdims=True)
    first, second = (np.logical_and(part, both) for part in (ours, theirs))
    choices = first.sum(axis=(1, 2))
    chance = (first.mean((0, 1)) @ second.mean((0, 1))) / first.mean((0, 1)).sum() / both.mean()
    return {"agreement": (linearize_ratio((first & second).sum((1, 2)), choices), float(chance))}


def ids_to_choices(requests: Sequence[EngineRequest], layer: int, experts: int) -> np.ndarray:
    """Convert a layer's expert ids to choices (R, T, E) bool; padding chooses no expert."""
    longest = max(len(request.ids) for request in requests)
    chosen = np.zeros((len(requests), longest, experts + 1), bool)
    for row, request in zip(chosen, requests, strict=True):
        np.put_along_axis(row[: len(request.ids)], request.ids[:, layer], True, axis=1)
    return chosen[..., :-1]  # id −1 set the last column


def analyse_engines(
    files: Sequence[Path], against: Sequence[Path], form: EngineFacts
) -> list[dict[str, Any]]:
    """Analyse engine files; return table rows per layer and for the mean over layers."""
    # files: recorded by one engine; against: the same requests, in order, by another, or ().
    requests = read_engine_files(files, form)
    theirs = read_engine_files(against, form) if against else []
    shapes, their_shapes = ([part.ids.shape for part in parts] for parts in (requests, theirs))
    if theirs and shapes != their_shapes:
        place = f"{against[0]}: (tokens, layers, k) of requests"
        raise UserError.at(place, found=their_shapes, allowed=f"{shapes}, as in {files[0]}")
    experts = form.experts or 1 + max(int(part.ids.max()) for part in [*requests, *theirs])
    sizes = sorted({max(1, experts // part) for part in (8, 4, 2)})
    lengths = np.c_[[len(request.ids) for request in requests]]
    prompts = np.c_[[request.prompt or 0 for request in requests]]
    table: list[tuple[int | str, str, np.ndarray, float]] = []
    for layer in range(shapes[0][1]):
        chosen = ids_to_choices(requests, layer, experts)
        values = measure_load_and_cache_hits(chosen, sizes)
        if prompts.all() and (prompts < lengths).any():
            values |= compare_with_prompt(chosen, lengths, prompts)
        if theirs:
            values |= measure_engine_agreement(chosen, ids_to_choices(theirs, layer, experts))
        table += [(layer + form.first_layer, name, *part) for name, part in values.items()]
    for name in dict.fromkeys(row[1] for row in table):
        parts = [row for row in table if row[1] == name]
        values, chance = np.mean([row[2] for row in parts], axis=0), fmean(row[3] for row in parts)
        table.append(("mean", name, values, chance))
    return [
        {"layer": layer, "quantity": name, **mean_and_limits(values)._asdict(), "chance": chance}
        for layer, name, values, chance in table
    ]


def print_mean_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    for row in rows:
        if row["layer"] == "mean":
            limits = "" if row["low"] is None else f" [{row['low']:.4g}, {row['high']:.4g}]"
            chance = f"by chance {row['chance']:.4g}"
            print(f"{row['quantity']:<24} {row['value']:.4g}{limits}; {chance}")
