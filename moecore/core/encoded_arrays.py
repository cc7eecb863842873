"""Arrays as short text, for results that are JSON."""

import base64
import zlib

import numpy as np


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


def encode_exact(values: np.ndarray) -> str:
    """Return numbers (N,) with all their digits."""
    return encode_arrays(np.asarray(values, np.float64))


def decode_float_array(text: str) -> np.ndarray:
    """The numbers (N,) fp64 of ``pack_numbers``; their mean is exact, but for the last digits.

    Or those of ``encode_exact``.
    """
    if ":" not in text:
        return np.frombuffer(decode_compressed_text(text), "<f8")
    mean, largest, rest = text.split(":")
    apart = np.frombuffer(decode_compressed_text(rest), "<f2").astype(np.float64)
    return float(mean) + float(largest) * (apart - apart.mean())


def _little_endian_bytes(array: np.ndarray) -> bytes:
    return np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<")).tobytes()
