"""What is said of attacked images with real targets: pure functions of the absolute error of each of N images.

Every error stands beside that of the clean image, which lies in every ball: an attack that happens to mend an image changes nothing.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from moecore.evaluation.intervals import bootstrap_mean


def error_score(errors: Tensor) -> dict[str, float | None]:
    """The mean absolute error of errors (N,), in the target's unit, with its 95 % bootstrap interval over images: mae, low, high."""
    found = bootstrap_mean(errors.double().numpy())
    return {"mae": found.value, "low": found.low, "high": found.high}


def worst_errors(curves: Mapping[str, Sequence[Mapping[str, Any]] | None]) -> list[dict[str, Any]]:
    """One row per epsilon over all attacks: the largest error of each image at that epsilon; null curves are left out.

    curves: attack → rows with epsilon and ``errors``, one an image, the same epsilons in all.  Raises ValueError where they differ.
    """
    found = [rows for rows in curves.values() if rows is not None]
    if len({tuple(row["epsilon"] for row in rows) for rows in found}) > 1:
        raise ValueError("worst_errors: the attacks were run at different epsilons")
    worst = [torch.tensor([row["errors"] for row in rows], dtype=torch.float64).amax(dim=0) for rows in zip(*found, strict=True)]
    epsilons = [row["epsilon"] for row in found[0]] if found else []
    return [{"epsilon": epsilon, **error_score(errors), "errors": errors.tolist()} for epsilon, errors in zip(epsilons, worst, strict=True)]
