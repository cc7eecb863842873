"""The routing of region-isolated validation volumes at three epochs of a training.

Source: ERMoE-ba, supplement §3, figure S1. What was seen is kept beside the checkpoint.
"""

from pathlib import Path

import numpy as np

from moecore.core.files import read_json, write_json
from moecore.data.prepared import Prepared, evenly_spread
from moecore.measure.routing_metrics.regions import region_routing
from moecore.nn.backbones.model import Model
from moecore.training.outcome import Probed

VOLUMES = 24  # of the validation split, evenly spread over it


def probed_epochs(epochs: int) -> tuple[int, ...]:
    """The first, the middle and the last of ``epochs``, from 1; fewer if they are the same."""
    return tuple(sorted({1, (epochs + 1) // 2, epochs}))


def keep_regions(
    folder: Path,
    epoch: int,
    model: Model,
    data: Prepared,
    experts: tuple[str, ...],
    seed: int,
) -> None:
    """Write into ``folder`` what the experts do on single tissues after ``epoch``.

    Nothing for data without tissue maps. model: as it is used, on its device. seed: of the random
    control, the same at all epochs.
    """
    regions = data.card.get("regions")
    if not regions:
        return
    chosen = evenly_spread(len(data.validation.labels), VOLUMES)
    volumes = np.array(data.validation.images[chosen])
    maps = np.array(data.regions("validation")[chosen])
    rows = region_routing(model, volumes, maps, regions, experts, seed)
    probed = Probed(epoch=epoch, rows=rows)
    write_json(_path(folder, epoch), probed.model_dump(mode="json"))


def kept_regions(folder: Path, data: Prepared, epochs: int) -> tuple[Probed, ...]:
    """What was kept in ``folder``; () for data without tissue maps.

    Raises UserError, naming the file, where an epoch is missing.
    """
    if not data.card.get("regions"):
        return ()
    kept = [read_json(_path(folder, epoch)) for epoch in probed_epochs(epochs)]
    return tuple(Probed.model_validate(probed) for probed in kept)


def _path(folder: Path, epoch: int) -> Path:
    return folder / "regions" / f"{epoch:04d}.json"
