"""Arrays encoded as short text, for results in JSON."""

import base64
import zlib

import numpy as np


def encode_arrays(*arrays: np.ndarray) -> str:
    """Return base64 of the arrays' concatenated little-endian bytes, compressed by zlib."""
    data = b"".join(_little_endian_bytes(array) for array in arrays)
    return base64.b64encode(zlib.compress(data, 9)).decode()


def decode_compressed_text(text: str) -> bytes:
    """Return the bytes that ``encode_arrays`` encoded."""
    return zlib.decompress(base64.b64decode(text))


def pack_numbers(values: np.ndarray) -> str:
    """Return ``mean:largest:…`` of numbers (N,): the exact mean, and encoded deviations.

    Deviations are float16 shares of the largest deviation, so they keep three digits. Raises
    ValueError for an empty array and for values that are not finite.
    """
    values = np.asarray(values, np.float64)
    if values.ndim != 1 or not len(values) or not np.isfinite(values).all():
        raise ValueError(f"pack_numbers: shape {values.shape}; (N ≥ 1,) finite numbers are needed")
    mean = float(values.mean())
    apart = values - mean
    largest = float(np.abs(apart).max()) or 1.0
    return f"{mean!r}:{largest!r}:{encode_arrays((apart / largest).astype(np.float16))}"


def encode_exact(values: np.ndarray) -> str:
    """Return numbers (N,) encoded as fp64, without loss."""
    return encode_arrays(np.asarray(values, np.float64))


def decode_float_array(text: str) -> np.ndarray:
    """Return fp64 numbers (N,) of ``pack_numbers``, with the exact mean, or ``encode_exact``."""
    if ":" not in text:
        return np.frombuffer(decode_compressed_text(text), "<f8")
    mean, largest, rest = text.split(":")
    apart = np.frombuffer(decode_compressed_text(rest), "<f2").astype(np.float64)
    return float(mean) + float(largest) * (apart - apart.mean())


def _little_endian_bytes(array: np.ndarray) -> bytes:
    return np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<")).tobytes()
