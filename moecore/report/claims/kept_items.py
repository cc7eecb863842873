"""What the intervals of claims and questions are of, packed small, so that a clone computes them
again: items.safetensors beside compare.json, and beside each of pipelines/results/.

Of every metric and method that a claim or question compares, each seed's value of each test item:
(S, N) as bits where a seed has two values, as bytes for up to 256, else as fp16 deviations from the
mean; or one number a seed, (S,), where a metric has no items. Means stay exact.
"""

import hashlib
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moecore.core.files import UserError, read_json
from moecore.core.safetensors_files import read_tensors
from moecore.report.claims.evaluation import SECTIONS, EvaluatedClaim, drop_zero_width_interval
from moecore.report.claims.significance import crossed_or_paired_difference
from moecore.report.tables.cells import interval_from_json
from moecore.statistics.crossed import Difference

ITEMS = Path("reports/items.safetensors")  # in git, as are the numbers
NUMBERS = Path("reports/compare.json")
MOST_BYTES = 2_000_000  # of a study's file
RESULT = "result"  # the tensor that says of which numbers these are the items
VALUES = ":values"  # behind a name: of each seed the coded values, or mean and largest distance
TOLERANCE = 1e-3  # of half an interval: what fp16 may change


def pack_items(
    evaluated: Sequence[EvaluatedClaim], numbers: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Return the items of what was judged, as tensors to be written; says on stderr of which claims
    and questions they would be too many bytes. numbers: the content of compare.json.
    """
    tensors = {RESULT: _result_digest(numbers)}
    for one in evaluated:
        names = _value_names(one.claim.model_dump())
        new: dict[str, Tensor] = {}
        for name, values in zip(names, one.values, strict=True):
            new |= {} if name in tensors else _pack_values(name, values)
        if sum(tensor.nbytes for tensor in (tensors | new).values()) > MOST_BYTES:
            print(f"items are not kept, for their size: {one.claim.words}", file=sys.stderr)
        else:
            tensors |= new
    return tensors


def verify_kept_items(results: Path) -> int:
    """Return how many differences of a result follow from the items that lie beside it; 0 where
    there are none. Raises UserError where one does not, or the items are of another result.
    """
    path = results.with_suffix(ITEMS.suffix)
    if not path.is_file():
        return 0
    tensors, _ = read_tensors(path)
    numbers = read_json(results)
    again = f"run the study again: {results} and these are one result"
    number = 0
    for section in SECTIONS.values():
        for key, entry in numbers.get(section, {}).items():
            names = _value_names(entry["asked"])
            if not set(names) <= tensors.keys():
                continue
            stored = entry["difference"]
            ours, theirs = (_unpack_values(tensors, name, stored.get("items", 0)) for name in names)
            difference = drop_zero_width_interval(crossed_or_paired_difference(ours, theirs))
            if not _agrees(difference, stored):
                problem = f"{section}: {key}: found {difference.value:.6g} of these items"
                there = f"in {results.name} {stored['mean']:.6g}"
                raise UserError(f"{path}: {problem}, {there}; {again}")
            number += 1
    if number and not torch.equal(tensors[RESULT], _result_digest(numbers)):
        raise UserError(f"{path}: found the items of another result; {again}")
    return number


def _value_names(asked: Mapping[str, Any]) -> tuple[str, str]:
    """Return the tensors of a comparison's two sides."""
    phase, metric = asked["phase"], asked["metric"]
    other = asked.get("against_metric") or metric
    return f"{phase}/{metric}/{asked['method']}", f"{phase}/{other}/{asked['against']}"


def _pack_values(name: str, values: np.ndarray) -> dict[str, Tensor]:
    if values.ndim == 1:
        return {name: torch.from_numpy(values)}
    tables = [np.unique(row, return_inverse=True) for row in values]
    most = max(len(known) for known, _ in tables)
    if most <= 256:
        codes = np.stack([positions for _, positions in tables]).astype(np.uint8)
        packed = np.packbits(codes, axis=1) if most <= 2 else codes
        known = np.stack([np.pad(row, (0, most - len(row)), "edge") for row, _ in tables])
        return {name: torch.from_numpy(packed), name + VALUES: torch.from_numpy(known)}
    mean = values.mean(axis=1)
    apart = values - mean[:, None]
    largest = np.abs(apart).max(axis=1)
    shares = (apart / largest[:, None]).astype(np.float16)
    ends = torch.from_numpy(np.stack([mean, largest], axis=1))
    return {name: torch.from_numpy(shares), name + VALUES: ends}


def _unpack_values(tensors: Mapping[str, Tensor], name: str, items: int) -> np.ndarray:
    packed = tensors[name].numpy()
    if packed.ndim == 1:
        return packed
    values = tensors[name + VALUES].numpy()
    if packed.dtype == np.uint8:
        is_bits = values.shape[1] <= 2
        codes = np.unpackbits(packed, axis=1, count=items) if is_bits else packed
        return np.take_along_axis(values, codes.astype(np.intp), axis=1)
    apart = packed.astype(np.float64)
    mean, largest = values.T[:, :, None]
    return mean + largest * (apart - apart.mean(axis=1, keepdims=True))


def _agrees(difference: Difference, stored: Mapping[str, Any]) -> bool:
    """Return whether a difference is that of an entry of compare.json, up to fp16."""
    if (difference.seeds, difference.items) != (stored["seeds"], stored.get("items", 0)):
        return False
    ours, theirs = difference.interval(), interval_from_json(stored)
    if theirs.limits is None:  # of no spread, or of values that are bounds
        return math.isclose(ours.value, theirs.value, abs_tol=1e-12)
    if ours.limits is None:
        return False
    half = (theirs.limits[1] - theirs.limits[0]) / 2
    gaps = [abs(one - other) for one, other in zip(ours.limits, theirs.limits, strict=True)]
    return max(gaps) <= TOLERANCE * half


def _result_digest(numbers: Mapping[str, Any]) -> Tensor:
    """Return the sha256 (32,) of all that was judged."""
    judged = {section: numbers.get(section, {}) for section in SECTIONS.values()}
    text = json.dumps(judged, sort_keys=True).encode()
    return torch.tensor(list(hashlib.sha256(text).digest()), dtype=torch.uint8)
