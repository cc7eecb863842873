"""Checks of .npy files without loading them."""

from pathlib import Path
from typing import Any

import numpy as np

from moecore.core.files import UserError


def check_array(path: Path, shape: tuple[int, ...], dtype: Any) -> None:
    """Raise UserError, naming the file, unless it is a whole .npy file with this shape and
    dtype.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file; run the stage `prepare` again")
    try:
        with open(path, "rb") as handle:
            np.lib.format.read_magic(handle)
            found, _, kind = np.lib.format.read_array_header_1_0(handle)
            expected = handle.tell() + int(np.prod(found, dtype=np.int64)) * kind.itemsize
    except ValueError as error:
        raise UserError(
            f"{path}: not a whole .npy file ({path.stat().st_size} bytes: {error}); run the "
            "stage `prepare` again"
        ) from error
    if (size := path.stat().st_size) != expected:
        raise UserError(
            f"{path}: expected {expected} bytes, found {size}; run the stage `prepare` again"
        )
    if found != shape or kind != dtype:
        raise UserError(
            f"{path}: holds {kind} {found}; card.json says {np.dtype(dtype)} {shape}. Run the "
            "stage `prepare` again"
        )
