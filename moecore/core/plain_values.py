"""Values as JSON and spreadsheets take them: results made plain, and arrays as short text."""

import base64
import math
import re
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from pydantic import BaseModel


def to_jsonable(value: Any) -> Any:
    """JSON's types: settings, arrays, tensors and paths made plain; not-finite numbers are null."""
    if isinstance(value, BaseModel):
        return to_jsonable(value.model_dump(mode="json"))
    if hasattr(value, "_asdict"):
        return to_jsonable(value._asdict())
    if isinstance(value, Mapping):
        return {str(key): to_jsonable(inner) for key, inner in value.items()}
    if hasattr(value, "tolist"):
        return to_jsonable(value.tolist())
    if isinstance(value, (list, tuple, set, frozenset)):
        return [to_jsonable(inner) for inner in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (str, int, bool)):
        return value
    return str(value)


def spreadsheet_cell(value: Any) -> Any:
    """Return a cell for CSV: an apostrophe before a text that a spreadsheet would run as a formula.

    Numbers, negative ones too, stay numbers.
    """
    if not isinstance(value, str) or value[:1] not in ("=", "+", "-", "@", "\t", "\r"):
        return value
    is_number = re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?|-inf", value, re.IGNORECASE)
    return value if is_number else f"'{value}"


def encode_arrays(*arrays: np.ndarray) -> str:
    """Base64 of the zlib-compressed bytes of the arrays, one after another, little endian."""
    data = b"".join(_little_endian_bytes(array) for array in arrays)
    return base64.b64encode(zlib.compress(data, 9)).decode()


def decode_compressed_text(text: str) -> bytes:
    """The bytes of ``encode_arrays``."""
    return zlib.decompress(base64.b64decode(text))


def pack_numbers(values: np.ndarray) -> str:
    """``mean:largest:…``, one number each (N,): the mean, exact, and the deviations from it.

    The deviations are float16 shares of the largest one, so they keep three digits. Raises
    ValueError unless there are numbers and all are finite.
    """
    values = np.asarray(values, np.float64)
    if values.ndim != 1 or not len(values) or not np.isfinite(values).all():
        raise ValueError(f"pack_numbers: shape {values.shape}; (N ≥ 1,) finite numbers are needed")
    mean = float(values.mean())
    apart = values - mean
    largest = float(np.abs(apart).max()) or 1.0
    return f"{mean!r}:{largest!r}:{encode_arrays((apart / largest).astype(np.float16))}"


def decode_float_array(text: str) -> np.ndarray:
    """The numbers (N,) fp64 of ``pack_numbers``; their mean is exact, but for the last digits."""
    mean, largest, rest = text.split(":")
    apart = np.frombuffer(decode_compressed_text(rest), "<f2").astype(np.float64)
    return float(mean) + float(largest) * (apart - apart.mean())


def _little_endian_bytes(array: np.ndarray) -> bytes:
    return np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<")).tobytes()
