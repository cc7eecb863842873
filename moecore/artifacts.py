"""A trained model in a folder: weights as safetensors beside the settings that rebuild it."""

from pathlib import Path

import torch
from pydantic import ValidationError
from torch import nn

from moecore.backbones import Backbone
from moecore.backbones.image import ImageSpec
from moecore.config import Config
from moecore.files import StageError, read_json, write_json
from moecore.layers.moe import MoE
from moecore.layers.positions import Interpolation, resize_positions
from moecore.tensors import read_tensors, write_tensors
from moecore.training.guide import Guide, Guided


GUIDE = "guide"


class ModelCard(Config):
    """Everything that rebuilds a model: backbone, images, experts."""

    backbone: Backbone
    image: ImageSpec
    moe: MoE | None = None
    guided: bool = False  # its router asks a teacher, which lies in the folder guide/

    def build(self) -> nn.Module:
        return self.backbone.build(self.image, self.moe)


def card_of(model: nn.Module) -> ModelCard:
    """The card of a model that was built by a backbone."""
    return ModelCard(backbone=model.config, image=model.image, moe=model.moe, guided=isinstance(model, Guided))


def save_model(folder: str | Path, model: nn.Module) -> None:
    """Write ``model.json`` and ``model.safetensors`` into ``folder``; the teacher of a model that cannot route without it into ``guide/``."""
    folder, card = Path(folder), card_of(model)
    if isinstance(model, Guided):
        save_guide(folder / GUIDE, model.guide)
        model = model.model
    write_tensors(folder / "model.safetensors", model.state_dict())
    write_json(folder / "model.json", card.model_dump(mode="json"))


def load_card(folder: str | Path) -> ModelCard:
    """The model's settings. Raises StageError that names the file where it is missing or not a model's."""
    path = Path(folder) / "model.json"
    try:
        return ModelCard.model_validate(read_json(path))
    except ValidationError as error:
        raise StageError(f"{path}: not the settings of a model of this version: {error}") from error


def load_model(folder: str | Path) -> nn.Module:
    """The trained model of ``folder``, in evaluation mode, on CPU.

    ``model(images)`` with images (B, C, H, W), or volumes (B, C, D, H, W), in [0, 1] returns ``ModelOutput(prediction, routing)``; the
    prediction is (B, K) logits of classes, or (B, 1) in the unit of the target (years).
    """
    card = load_card(folder)
    with torch.random.fork_rng(devices=[]):  # the first weights are drawn, and then replaced: the caller's draws stay what they were
        model = card.build()
    model.load_state_dict(read_tensors(Path(folder) / "model.safetensors")[0])
    return (Guided(model, load_guide(Path(folder) / GUIDE)) if card.guided else model).eval()


def transferred(folder: str | Path, image: ImageSpec, moe: MoE | None, interpolation: Interpolation = "bilinear") -> nn.Module:
    """The model of ``folder`` for other images: positions interpolated to the new grid, a fresh head for other classes.

    The statistics of the new images normalise them. A head for the same target says of the same tokens what it said before, though
    the new target's mean and deviation are others. Raises StageError where channels, axes or interpolation do not fit.
    """
    card, weights = load_card(folder), read_tensors(Path(folder) / "model.safetensors")[0]
    if card.image.channels != image.channels:
        raise StageError(f"{folder}: trained on {card.image.channels} channels, the new images have {image.channels}; choose data with the same channels")
    model = card.backbone.build(image, moe)
    if not hasattr(model, "pos_embed"):
        raise StageError(f"{folder}: a model of kind {card.backbone.kind} works at one image size only; fine-tune a vit")
    if len(card.image.shape) != len(image.shape):
        raise StageError(f"{folder}: trained on images of {len(card.image.shape)} axes, the new ones have {len(image.shape)}; choose data with as many axes")
    if "pos_embed" in weights:  # fixed positions are no weights
        try:
            weights["pos_embed"] = resize_positions(weights["pos_embed"], model.positioned, model.layout.grid, interpolation, card.backbone.grid(card.image))
        except ValueError as error:
            raise StageError(f"{folder}: {error}") from error
    if card.image.answers != image.answers:
        weights = {name: value for name, value in weights.items() if not name.startswith("head")}
    elif image.target is not None:
        weights |= _rescaled_head(weights, card.image, image)
    missing = model.load_state_dict(weights, strict=False)
    unexpected = [name for name in (*missing.missing_keys, *missing.unexpected_keys) if not name.startswith("head")]
    if unexpected:
        raise StageError(f"{folder}: the weights do not fit the model: {', '.join(unexpected[:5])}")
    return model


def _rescaled_head(weights: dict[str, torch.Tensor], old: ImageSpec, new: ImageSpec) -> dict[str, torch.Tensor]:
    """The head whose output · new deviation + new mean is what the old one's is with the old two."""
    moved = (old.target_mean - new.target_mean) / new.target_std
    scaled = {name: value * (old.target_std / new.target_std) for name, value in weights.items() if name.startswith("head.")}
    return scaled | {name: value + moved for name, value in scaled.items() if name.endswith("bias")}


def save_guide(folder: Path, guide: Guide) -> None:
    """Write the teacher, its routers and their settings into ``folder``."""
    save_model(folder / "teacher", guide.teacher)
    if guide.blocks:  # none for a dense student, and a file without tensors is not readable
        write_tensors(folder / "routers.safetensors", {str(layer): weight for layer, weight in enumerate(guide.routers)})
    settings = {"blocks": list(guide.blocks), "experts": guide.experts, "features": guide.features, "learns": guide.learns}
    write_json(folder / "guide.json", {"needed": True, **settings})


def save_no_guide(folder: Path) -> None:
    """Say that the method needs no teacher. The file never changes, so a new teacher leaves such methods up to date."""
    write_json(folder / "guide.json", {"needed": False})


def load_guide(folder: str | Path, size: int | None = None) -> Guide | None:
    """The guide of ``folder``, or None for a method that needs none; ``size`` asks for another image size.

    Its routers take gradients only where they learn with the student.
    """
    settings = read_json(Path(folder) / "guide.json")
    if not settings["needed"]:
        return None
    teacher = load_model(Path(folder) / "teacher")
    if size is not None and size != teacher.image.size:
        teacher = transferred(Path(folder) / "teacher", teacher.image.model_copy(update={"size": size}), None)
    guide = Guide(teacher, tuple(settings["blocks"]), settings["experts"], settings["features"], settings["learns"])
    weights = read_tensors(Path(folder) / "routers.safetensors")[0] if guide.blocks else {}
    with torch.no_grad():
        for layer, weight in enumerate(guide.routers):
            weight.copy_(weights[str(layer)])
    return guide.eval()


def guide_folder(method: str, seed: int) -> Path:
    """Where the guide of a pretrained method lies: beside the model where its routers learned with it, else where they were fitted."""
    learned = Path("artifacts/pretrain") / method / str(seed) / GUIDE
    return learned if learned.exists() else Path("artifacts/teacher_router") / method
