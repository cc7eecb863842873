"""What is said of attacked images: pure functions of whether each of N images is still classified right."""

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moecore.evaluation.intervals import wilson


def score(hits: Tensor) -> dict[str, Any]:
    """The share of hits (N,) bool with its Wilson interval: accuracy, low, high, and the count ``correct``."""
    correct = int(hits.sum())
    accuracy, low, high = wilson(correct, len(hits))
    return {"accuracy": accuracy, "low": low, "high": high, "correct": correct}


def packed(hits: Tensor) -> str:
    """Hits (N,) bool as base64 of numpy.packbits, the first image in the highest bit."""
    return base64.b64encode(np.packbits(hits.numpy()).tobytes()).decode()


def unpacked(text: str, images: int) -> Tensor:
    """Hits (N,) bool of ``packed``."""
    return torch.from_numpy(np.unpackbits(np.frombuffer(base64.b64decode(text), np.uint8), count=images).astype(bool))


def worst_case(curves: Mapping[str, Sequence[Mapping[str, Any]] | None], images: int) -> list[dict[str, Any]]:
    """One row per epsilon over all attacks: an image is correct where no attack broke it at that epsilon; null curves are left out.

    curves: attack → rows with epsilon and packed ``hits``, the same epsilons in all.  Raises ValueError where they differ.
    """
    found = [rows for rows in curves.values() if rows is not None]
    if len({tuple(row["epsilon"] for row in rows) for rows in found}) > 1:
        raise ValueError("worst_case: the attacks were run at different epsilons")
    return [
        {"epsilon": rows[0]["epsilon"], **score(torch.stack([unpacked(row["hits"], images) for row in rows]).all(dim=0))}
        for rows in zip(*found, strict=True)
    ]
