"""Arrays as short texts in JSON, and texts as cells of spreadsheets."""

import base64
import re
import zlib
from typing import Any

import numpy as np


def spreadsheet_cell(value: Any) -> Any:
    """Return the value for a cell of a CSV; a text that would run as a formula gets a leading '."""
    if not isinstance(value, str) or value[:1] not in ("=", "+", "-", "@", "\t", "\r"):
        return value
    is_number = re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?|-inf", value, re.IGNORECASE)
    return value if is_number else f"'{value}"


def encode_concatenated_arrays(*arrays: np.ndarray) -> str:
    """Return base64 of the arrays' concatenated little-endian bytes, compressed by zlib."""
    data = b"".join(array.astype(array.dtype.newbyteorder("<")).tobytes() for array in arrays)
    return base64.b64encode(zlib.compress(data, 9)).decode()


def decode_compressed_text(text: str) -> bytes:
    """Return the bytes of the arrays in a text of ``encode_concatenated_arrays``."""
    return zlib.decompress(base64.b64decode(text))


def pack_numbers(values: np.ndarray) -> str:
    """Encode numbers (N,) as ``mean:largest:deviations``, with the exact mean."""
    # Deviations from the mean are float16 shares of the largest, so they keep three digits.
    values = np.asarray(values, np.float64)
    if values.ndim != 1 or not len(values) or not np.isfinite(values).all():
        raise ValueError(f"pack_numbers: shape {values.shape}; (N ≥ 1,) finite numbers are needed")
    mean = float(values.mean())
    apart = values - mean
    largest = float(np.abs(apart).max()) or 1.0
    deviations = encode_concatenated_arrays((apart / largest).astype(np.float16))
    return f"{mean!r}:{largest!r}:{deviations}"


def encode_exact(values: np.ndarray) -> str:
    return encode_concatenated_arrays(np.asarray(values, np.float64))


def decode_float_array(text: str) -> np.ndarray:
    """Return the fp64 numbers (N,) that ``pack_numbers`` or ``encode_exact`` encoded."""
    if ":" not in text:
        return np.frombuffer(decode_compressed_text(text), "<f8")
    mean, largest, rest = text.split(":")
    apart = np.frombuffer(decode_compressed_text(rest), "<f2").astype(np.float64)
    return float(mean) + float(largest) * (apart - apart.mean())
