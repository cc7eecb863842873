"""Floor 4: the routing of region-isolated validation volumes at three epochs of a training (ERMoE-ba, supplement §3, figure S1).

What was seen is kept beside the checkpoint, so a training that was killed reports all epochs.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from moecore.data.prepared import Prepared, spread
from moecore.evaluation.regions import region_routing
from moecore.files import read_json, write_json

VOLUMES = 24  # of the validation split, evenly spread over it


def probed_epochs(epochs: int) -> tuple[int, ...]:
    """The first, the middle and the last of ``epochs``, counted from 1; fewer where they are the same."""
    return tuple(sorted({1, (epochs + 1) // 2, epochs}))


def region_probe(folder: Path, model: nn.Module, data: Prepared, experts: tuple[str, ...], epochs: int, seed: int) -> Callable[[int], None] | None:
    """What is to be called at the end of each epoch: it looks at three of them and writes into ``folder``; None without tissue maps or experts.

    model: as it is used, on its device. seed: of the random control, the same at all epochs.
    """
    if not (experts and data.card.get("regions")):
        return None
    chosen = spread(len(data.validation.labels), VOLUMES)

    def look(epoch: int) -> None:
        if epoch in probed_epochs(epochs):
            volumes, maps = np.array(data.validation.images[chosen]), np.array(data.regions("validation")[chosen])
            write_json(_path(folder, epoch), region_routing(model, volumes, maps, data.card["regions"], experts, seed))

    return look


def region_routing_over_epochs(folder: Path, epochs: int) -> list[dict[str, Any]]:
    """[{epoch, rows}] of the probed epochs. Raises StageError, naming the file, where one is missing."""
    return [{"epoch": epoch, "rows": read_json(_path(folder, epoch))} for epoch in probed_epochs(epochs)]


def _path(folder: Path, epoch: int) -> Path:
    return folder / "regions" / f"{epoch:04d}.json"
