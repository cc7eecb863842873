"""Results as JSON has them, and arrays as short text in them."""

import base64
import math
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from pydantic import BaseModel


def plain(value: Any) -> Any:
    """JSON's types: settings, arrays, tensors and paths become dicts, lists, numbers and text;
    not-finite numbers null.
    """
    if isinstance(value, BaseModel):
        return plain(value.model_dump(mode="json"))
    if hasattr(value, "_asdict"):
        return plain(value._asdict())
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(inner) for inner in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (str, int, bool)):
        return value
    return str(value)


def packed(*arrays: np.ndarray) -> str:
    """Base64 of the zlib-compressed bytes of the arrays, one after another, little endian."""
    data = b"".join(_bytes(array) for array in arrays)
    return base64.b64encode(zlib.compress(data, 9)).decode()


def unpacked(text: str) -> bytes:
    """The bytes of ``packed``."""
    return zlib.decompress(base64.b64decode(text))


def packed_values(values: np.ndarray) -> str:
    """``mean:largest:…``, one number each (N,): the mean, exact, and the deviations from it.

    The deviations are float16 shares of the largest one, so they keep three digits. Raises
    ValueError unless there are numbers and all are finite.
    """
    values = np.asarray(values, np.float64)
    if values.ndim != 1 or not len(values) or not np.isfinite(values).all():
        raise ValueError(f"packed values: shape {values.shape}; (N ≥ 1,) finite numbers are needed")
    mean = float(values.mean())
    apart = values - mean
    largest = float(np.abs(apart).max()) or 1.0
    return f"{mean!r}:{largest!r}:{packed((apart / largest).astype(np.float16))}"


def unpacked_values(text: str) -> np.ndarray:
    """The numbers (N,) fp64 of ``packed_values``; their mean is exact, but for the last digits."""
    mean, largest, rest = text.split(":")
    apart = np.frombuffer(unpacked(rest), "<f2").astype(np.float64)
    return float(mean) + float(largest) * (apart - apart.mean())


def _bytes(array: np.ndarray) -> bytes:
    return np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<")).tobytes()
