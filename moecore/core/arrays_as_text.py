"""Encode arrays as short texts for JSON, and escape formulas in cells of CSV files."""

import base64
import re
import zlib
from typing import Any

import numpy as np


def escape_spreadsheet_formula(value: Any) -> Any:
    """Return a CSV cell's value; texts that a spreadsheet would run get a leading apostrophe."""
    if not isinstance(value, str) or value[:1] not in ("=", "+", "-", "@", "\t", "\r"):
        return value
    is_number = re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?|-inf", value, re.IGNORECASE)
    return value if is_number else f"'{value}"


def encode_concatenated_arrays(*arrays: np.ndarray) -> str:
    """Return base64 of the arrays' concatenated little-endian bytes, compressed by zlib."""
    data = b"".join(array.astype(array.dtype.newbyteorder("<")).tobytes() for array in arrays)
    return base64.b64encode(zlib.compress(data, 9)).decode()


def decode_base64_zlib(text: str) -> bytes:
    """Return the bytes that ``encode_concatenated_arrays`` encoded as ``text``."""
    return zlib.decompress(base64.b64decode(text))


def encode_rounded(values: np.ndarray) -> str:
    """Encode numbers (N,) as a text: the exact mean, and deviations to about three digits."""
    # Deviations from the mean are float16 shares of the largest, so they keep three digits.
    values = np.asarray(values, np.float64)
    if values.ndim != 1 or not len(values) or not np.isfinite(values).all():
        raise ValueError(f"encode_rounded: shape {values.shape}; needs (N ≥ 1,) finite numbers")
    mean = float(values.mean())
    centred = values - mean
    largest = float(np.abs(centred).max()) or 1.0
    deviations = encode_concatenated_arrays((centred / largest).astype(np.float16))
    return f"{mean!r}:{largest!r}:{deviations}"


def encode_exact(values: np.ndarray) -> str:
    return encode_concatenated_arrays(np.asarray(values, np.float64))


def decode_float_array(text: str) -> np.ndarray:
    """Return the fp64 numbers (N,) in a text of ``encode_rounded`` or ``encode_exact``."""
    if ":" not in text:
        return np.frombuffer(decode_base64_zlib(text), "<f8")
    mean, largest, rest = text.split(":")
    centred = np.frombuffer(decode_base64_zlib(rest), "<f2").astype(np.float64)
    return float(mean) + float(largest) * (centred - centred.mean())
