"""Floor 4: how often corresponding patches in two random views of an image get the same experts, kind by kind (PRC, tables 4 and 5).

N images, T tokens per view, E experts. Every view is a function of (seed, name, place among the images), so that all methods see the same ones
and no result depends on the batch.
"""

import hashlib
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from moecore.config import Config
from moecore.correspondence import TokenPairs, sides, token_pairs
from moecore.data.loader import generator_for
from moecore.data.randaugment import RandAugment
from moecore.data.views import Affine, Crop, Views, ViewSettings, make_views
from moecore.evaluation.chance import chance_iou, chance_overlap
from moecore.evaluation.consistency import chance_matches, independent_top1, match_ratios, matched_pairs
from moecore.evaluation.intervals import bootstrap
from moecore.evaluation.predict import predictions
from moecore.evaluation.routing import confidence, iou
from moecore.files import StageError
from moecore.records import Layout, RoutingRecord

PART = 100  # images whose views are drawn together: of fixed size, so that no result depends on the batch
NAMES = ("match_top1", "match_top2_ordered", "match_top2_sets")
Preset = Literal["identity", "noise", "shift", "flip", "crop", "rotation", "affine", "brightness", "contrast", "randaugment", "erasing"]


class Augmentation(Config):
    """What is done to an image, twice with independent draws; the default does nothing."""

    name: str = Field(min_length=1, description="Its name in tables; the draws depend on it")
    views: ViewSettings = Field(ViewSettings(), description="Geometry and colours, drawn for each view")
    noise: float = Field(0.0, ge=0, le=1, description="Standard deviation of Gaussian noise on the pixels in [0, 1], added last; no geometry")


def _colour(name: Literal["brightness", "contrast"]) -> Augmentation:
    """Factors of 0.55 or 1.45: half of RandAugment's range."""
    return Augmentation(name=name, views=ViewSettings(randaugment=RandAugment(operations=1, magnitude=5, names=(name,))))


PRESETS = {  # PRC names none for table 4; its fine-tuning takes crop and flip, its pretraining RandAugment (table 1). The limits are ours.
    "identity": Augmentation(name="identity"),
    "noise": Augmentation(name="noise", noise=0.05),
    "shift": Augmentation(name="shift", views=ViewSettings(shift=2)),
    "flip": Augmentation(name="flip", views=ViewSettings(flip=True)),
    "crop": Augmentation(name="crop", views=ViewSettings(crop=Crop())),
    "rotation": Augmentation(name="rotation", views=ViewSettings(affine=Affine(degrees=15))),
    "affine": Augmentation(name="affine", views=ViewSettings(affine=Affine(degrees=10, translate=0.1, scale=(0.9, 1.1), shear=10))),
    "brightness": _colour("brightness"),
    "contrast": _colour("contrast"),
    "randaugment": Augmentation(name="randaugment", views=ViewSettings(randaugment=RandAugment())),
    "erasing": Augmentation(name="erasing", views=ViewSettings(erasing=1.0)),
}


OF_VOLUMES = {name: PRESETS[name] for name in ("identity", "noise", "shift", "flip", "rotation")} | {  # the others are for flat images only
    "affine": Augmentation(name="affine", views=ViewSettings(affine=Affine(degrees=10, translate=0.1, scale=(0.9, 1.1))))
}


def resolved(asked: Preset | Augmentation, volumes: bool = False) -> Augmentation:
    """A preset by its name, or the augmentation itself. Raises StageError for a preset that volumes do not have."""
    if isinstance(asked, Augmentation):
        return asked
    known = OF_VOLUMES if volumes else PRESETS
    if asked not in known:
        raise StageError(f"routing.augmentations: found {asked}, which is for flat images; allowed for volumes: {', '.join(known)}")
    return known[asked]


def two_views(images: np.ndarray, asked: Augmentation, seed: int, *words: int) -> Views:
    """Both views of images uint8 (N, C, H, W): fp32 (2N, C, h, w) in [0, 1] and affines (2N, 3, 3), first all first views.

    Of volumes float16 (N, C, D, H, W): fp32 volumes and affines (2N, 4, 4).

    Drawn from (seed, place, view, ``words``); with more images the first ones' views stay, in whole parts of 100.
    """
    made: tuple[list[Views], list[Views]] = ([], [])
    for start in range(0, len(images), PART):
        part = torch.from_numpy(np.array(images[start : start + PART]))
        for number, views in enumerate(made):
            generator = generator_for(seed, start, number, *words)
            pixels, affines = make_views(part, asked.views, generator)
            noise = torch.randn(pixels.shape, generator=generator) * asked.noise if asked.noise else 0.0
            if asked.noise and pixels.ndim == 5:  # the background of a volume stays 0, as everywhere
                noise = noise * (pixels != 0)
            views.append(Views((pixels + noise).clamp(0, 1) if asked.noise else pixels, affines))
    return Views(*(torch.cat([getattr(part, field) for views in made for part in views]) for field in Views._fields))


def layer_matches(record: RoutingRecord, pairs: TokenPairs, layout: Layout) -> dict[str, Any]:
    """What partners of one MoE layer share: match ratios of the best two experts, IoU of the chosen sets, and their values by chance.

    record: fields (2N, T, E), first all first views.  ``chance_*``: even draws; ``independent_top1``: draws with the experts' own popularity.
    Experts are ranked by their logits: the order of the probs, but without the ties of those that an eigenbasis router clamps.
    """
    ours, theirs = sides(record.logits, pairs, layout)
    ratios = match_ratios(ours, theirs, pairs.found)
    sets = [side[pairs.found] for side in sides(record.chosen, pairs, layout)]
    return {
        **dict(zip(NAMES, ratios, strict=True)),
        "independent_top1": independent_top1(ours, theirs, pairs.found), "chosen_iou": iou(*sets), "chance_iou": chance_overlap(*sets),
        "confidence": confidence(record.probs)._asdict(),
    }  # fmt: skip


def match_intervals(records: tuple[RoutingRecord, ...], pairs: TokenPairs, layout: Layout) -> dict[str, float]:
    """95 % intervals of the match ratios, averaged over layers: bootstrap over images, as an image's pairs are not independent."""
    counts = torch.stack([matched_pairs(*sides(record.logits, pairs, layout), pairs.found) for record in records]).double().mean(dim=0).numpy()
    number = pairs.found.sum(dim=1).numpy()
    counts, number = counts[number > 0], number[number > 0]
    limits = {}
    for column, name in enumerate(NAMES):
        found = bootstrap(lambda chosen, hits=counts[:, column]: float(hits[chosen].sum() / number[chosen].sum()), len(number), lowest=0.0)
        limits |= {f"{name}_low": found.low, f"{name}_high": min(1.0, found.high)}
    return limits


def measured(model: nn.Module, views: Views, batch: int) -> dict[str, Any]:
    """Match ratios with intervals, IoU of the chosen sets and confidence, as means over the MoE layers, and each layer's; ``pairs`` counts partners.

    ``draws`` is a digest of affines and pixels: equal where two models saw the same views.
    """
    _, records = predictions(model, views.images, batch)
    pairs = token_pairs(views.affines, model.layout, special=False)
    layers = [layer_matches(record, pairs, model.layout) for record in records]
    values = {name: sum(layer[name] for layer in layers) / len(layers) for name in layers[0] if name != "confidence"}
    sure = {name: sum(layer["confidence"][name] for layer in layers) / len(layers) for name in layers[0]["confidence"]}
    limits = match_intervals(records, pairs, model.layout)
    return {"pairs": int(pairs.found.sum()), **values, **limits, "confidence": sure, "layers": layers, "draws": digest(views)}


def chance(experts: int, k: int | None) -> dict[str, float]:
    """What even draws of ``k`` of ``experts`` experts share: {} for one expert; no IoU where a token's number of experts is not set."""
    if experts < 2:
        return {}
    matches = dict(zip(NAMES, chance_matches(experts), strict=True))
    return matches if k is None else matches | {"chosen_iou": chance_iou(experts, k)}


def digest(views: Views) -> str:
    """16 hexadecimal digits of the views' bytes."""
    return hashlib.sha256(_bytes(views.affines) + _bytes(views.images)).hexdigest()[:16]


def _bytes(values: Tensor) -> bytes:
    return values.cpu().contiguous().numpy().tobytes()
