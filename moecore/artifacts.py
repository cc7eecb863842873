"""A trained model in a folder: weights as safetensors beside the settings that rebuild it."""

from pathlib import Path

from pydantic import ValidationError
from torch import nn

from moecore.backbones import Backbone
from moecore.backbones.image import ImageSpec
from moecore.config import Config
from moecore.files import StageError, read_json, write_json
from moecore.layers.moe import MoE
from moecore.layers.positions import Interpolation, resize_positions
from moecore.tensors import read_tensors, write_tensors


class ModelCard(Config):
    """Everything that rebuilds a model: backbone, images, experts."""

    backbone: Backbone
    image: ImageSpec
    moe: MoE | None = None

    def build(self) -> nn.Module:
        return self.backbone.build(self.image, self.moe)


def card_of(model: nn.Module) -> ModelCard:
    """The card of a model that was built by a backbone."""
    return ModelCard(backbone=model.config, image=model.image, moe=model.moe)


def save_model(folder: str | Path, model: nn.Module) -> None:
    """Write ``model.json`` and ``model.safetensors`` into ``folder``."""
    folder = Path(folder)
    write_tensors(folder / "model.safetensors", model.state_dict())
    write_json(folder / "model.json", card_of(model).model_dump(mode="json"))


def load_card(folder: str | Path) -> ModelCard:
    """The model's settings. Raises StageError that names the file where it is missing or not a model's."""
    path = Path(folder) / "model.json"
    try:
        return ModelCard.model_validate(read_json(path))
    except ValidationError as error:
        raise StageError(f"{path}: not the settings of a model of this version: {error}") from error


def load_model(folder: str | Path) -> nn.Module:
    """The trained model of ``folder``, in evaluation mode, on CPU.

    ``model(images)`` with images (B, C, H, W) in [0, 1] returns ``ModelOutput(prediction (B, K), routing)``.
    """
    model = load_card(folder).build()
    model.load_state_dict(read_tensors(Path(folder) / "model.safetensors")[0])
    return model.eval()


def transferred(folder: str | Path, image: ImageSpec, moe: MoE | None, interpolation: Interpolation = "bilinear") -> nn.Module:
    """The model of ``folder`` for other images: positions interpolated to the new grid, a fresh head for other classes.

    The statistics of the new images normalise them. Raises StageError where the number of channels differs.
    """
    card, weights = load_card(folder), read_tensors(Path(folder) / "model.safetensors")[0]
    if card.image.channels != image.channels:
        raise StageError(f"{folder}: trained on {card.image.channels} channels, the new images have {image.channels}; choose data with the same channels")
    model = card.backbone.build(image, moe)
    side = image.size // card.backbone.patch
    weights["pos_embed"] = resize_positions(weights["pos_embed"], model.positioned, (side, side), interpolation)
    if card.image.classes != image.classes:
        weights = {name: value for name, value in weights.items() if not name.startswith("head")}
    missing = model.load_state_dict(weights, strict=False)
    unexpected = [name for name in (*missing.missing_keys, *missing.unexpected_keys) if not name.startswith("head")]
    if unexpected:
        raise StageError(f"{folder}: the weights do not fit the model: {', '.join(unexpected[:5])}")
    return model
