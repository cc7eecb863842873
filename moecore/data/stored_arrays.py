"""Arrays on disk, as .npy files."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from moecore.core.files import UserError
from moecore.tasks.base import Task

PREPARE_AGAIN = "run the stage `prepare` again"


def open_array(path: Path, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return a .npy file memory-mapped. Raises UserError unless it has this shape and dtype."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; {PREPARE_AGAIN}") from None
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"{path}: not a whole .npy file ({error}); {PREPARE_AGAIN}") from error
    if array.shape != shape or array.dtype != dtype:
        raise UserError(
            f"{path}: holds {array.dtype} {array.shape}; card.json says {np.dtype(dtype)} {shape}. "
            f"{PREPARE_AGAIN.capitalize()}"
        )
    return array


def save_array(path: Path, values: np.ndarray) -> None:
    with open(path, "wb") as file:
        # Given a real file, numpy writes through the C library, whose errors have no reason.
        writer: Any = SimpleNamespace(write=file.write)
        np.save(writer, values, allow_pickle=False)


def new_array(path: Path, dtype: Any, shape: tuple[int, ...], begun: bool = False) -> np.memmap:
    """Return a memory-mapped .npy file to fill; ``begun``: continue an existing one."""
    array = np.lib.format.open_memmap(path, mode="r+" if begun else "w+", dtype=dtype, shape=shape)
    # Filling a sparse file on a full disk kills the process (SIGBUS): take the space now.
    if hasattr(os, "posix_fallocate"):  # not on macOS
        with open(path, "r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    return array


def open_labels(folder: Path, task: Task, split: str, number: int) -> np.ndarray:
    return np.array(open_array(folder / f"{split}_labels.npy", *task.storage_format(number)))
