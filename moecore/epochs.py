"""How the routing moves while a model is trained: its decisions on the same images after every epoch (TGR, §5.1; MoGE, figure 2)."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moecore.data.loader import OnDevice, OnDisk
from moecore.evaluation.class_maps import class_maps
from moecore.evaluation.consistency import epoch_agreement, epoch_agreement_by_layer
from moecore.evaluation.multi_label import per_label
from moecore.evaluation.predict import predictions
from moecore.records import real
from moecore.tensors import read_tensors, write_tensors

IMAGES = 500  # of the validation split


def keep_routing(folder: Path, epoch: int, model: nn.Module, split: OnDevice | OnDisk, classes: int) -> None:
    """Write each token's most probable expert and the mean probs per class, on the first images of ``split``, into ``folder``.

    Real labels have no classes, and so no maps.
    """
    _, records = predictions(model, split.images[:IMAGES], batch=250)
    first = torch.stack([record.probs.argmax(dim=-1) for record in records], dim=1).to(torch.int16)  # (N, layers, T)
    labels = split.labels[:IMAGES].cpu()
    maps = {} if real(labels) else {"maps": class_maps(*per_label(records, labels), classes).float()}
    write_tensors(_path(folder, epoch), {"first": first} | maps)


def routing_over_epochs(folder: Path, epochs: int) -> dict[str, Any]:
    """Agreement with the final model and between consecutive epochs (shares of tokens), and class maps of a few epochs (none for real labels)."""
    kept = [read_tensors(_path(folder, epoch))[0] for epoch in range(1, epochs + 1)]
    agreement = epoch_agreement([_first(tensors) for tensors in kept])
    by_layer = epoch_agreement_by_layer([tensors["first"].numpy() for tensors in kept])
    shown = sorted({1, max(1, epochs // 3), max(1, 2 * epochs // 3), epochs})
    mapped = [epoch for epoch in shown if "maps" in kept[epoch - 1]]
    maps = {str(epoch): [[[round(value, 5) for value in layer] for layer in of_class] for of_class in kept[epoch - 1]["maps"].tolist()] for epoch in mapped}
    return {
        "agreement_with_final": agreement["with_final"], "agreement_consecutive": agreement["consecutive"],
        "agreement_with_final_by_layer": by_layer["with_final"], "agreement_consecutive_by_layer": by_layer["consecutive"], "class_maps": maps,
    }  # fmt: skip


def _first(tensors: dict[str, Tensor]) -> Any:
    return tensors["first"].flatten(1).numpy()


def _path(folder: Path, epoch: int) -> Path:
    return folder / "epochs" / f"{epoch:04d}.safetensors"
