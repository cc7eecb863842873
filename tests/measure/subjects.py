"""Small untrained models on the digits, as measurements get them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import nn

from moecore.backbones import TwoTowers, Vit, Vit3d
from moecore.core.routing_records import ModelOutput
from moecore.data.prepared import Prepared, Split
from moecore.measure import Explorer, Routing
from moecore.measure.routing_metrics.epoch_routing import count_token_pair_matches_by_image
from moecore.measure.values import Found
from moecore.parts import Backbone, Classification, ImageSpec, MeasuredModel, MoESettings
from moecore.pipeline.code_hashes import write_all_hashes
from moecore.sources import CaptionedMosaic, Digits
from moecore.training.artifacts import save_model
from tests.data.making import write_cohort


def compute_without_cache(name: str, compute: Callable[[], Any]) -> Any:
    return compute()


def routing_with_roles(images: int = 60, **roles: Any) -> Routing:
    """What experts are for, and as little else of the routing as there can be."""
    no_sweeps = {"k": [], "threshold": []}
    return Routing(images=images, overlays=0, augmentations=[], sweeps=no_sweeps, roles=roles)


def expert_roles(subject: MeasuredModel, **settings: Any) -> Found:
    return routing_with_roles(**settings).collect_result(subject, compute_without_cache)


def digits(folder: Path) -> Prepared:
    folder.mkdir(parents=True, exist_ok=True)
    Digits(size=12, train_limit=50, test_limit=60).write(folder)
    return Prepared.open(folder)


def built(backbone: Backbone, moe: MoESettings | None, data: Prepared, factor: float) -> nn.Module:
    """With weights ``factor`` times as large: a router that prefers some experts."""
    torch.manual_seed(1)
    model = backbone.build(ImageSpec.from_card(data.card), moe)
    for parameter in model.parameters():
        parameter.data *= factor
    return model.eval()


class Brightness(nn.Module):
    """Answers with 100 times the mean of the voxels that are not 0, which its head reads."""

    moe = None

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Identity()

    def forward(self, volumes: torch.Tensor) -> ModelOutput:
        found = volumes.flatten(1)
        mean = found.sum(1) / (found != 0).sum(1).clamp(min=1)
        return ModelOutput(self.head((100 * mean)[:, None]))


class Source:
    """People of brightness age / 100: 0.1 year more in a second scan, 10 years at another site."""

    subjects = 40

    def __init__(self) -> None:
        self.asked = []

    def person_seed(self, number: int) -> int:
        return 7_000_000 + number

    def draw(self, age, sex, seed, scan, site):
        self.asked.append((age, sex, seed, scan, site))
        return np.full((1, 2, 2, 2), (age + scan / 10 + 10 * site) / 100, np.float32), None


def top_k_mlps(k: int = 1, hidden_ratio: float = 1, blocks: tuple = (0, 1)) -> MoESettings:
    experts = {"kind": "mlp", "number": 4, "hidden_ratio": hidden_ratio}
    return MoESettings(router={"kind": "noisy_top_k", "k": k}, experts=experts, blocks=blocks)


MODELS = {"vit": top_k_mlps(hidden_ratio=0.5), "dense": None}


def train(model: nn.Module, steps: int, rate: float, loss: Callable[[], torch.Tensor]) -> nn.Module:
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for _ in range(steps):
        value = loss()
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    return model.eval()


def train_on_ages(data: Prepared, moe: MoESettings | None) -> nn.Module:
    torch.manual_seed(1)
    backbone = Vit3d(patch=4, width=16, depth=2, heads=2, mlp_ratio=1)
    model = backbone.build(ImageSpec.from_card(data.card), moe)
    volumes = torch.from_numpy(np.array(data.train.images)).float()
    labels = torch.from_numpy(data.train.labels)
    return train(model, 30, 3e-3, lambda: (model(volumes).prediction[:, 0] - labels).abs().mean())


def write_models(folder: Path) -> dict[str, MeasuredModel]:
    """Write 200 training and 60 test images, and MODELS after 40 steps, as a run has them."""
    target = folder / "artifacts/data/pretrain"
    target.mkdir(parents=True)
    Digits(size=12, train_limit=200, test_limit=60).write(target)
    data = Prepared.open(target)
    images = torch.from_numpy(np.array(data.train.images)).float() / 255
    labels = torch.from_numpy(data.train.labels[:])

    def trained(name: str) -> MeasuredModel:
        torch.manual_seed(1)
        backbone = Vit(patch=6, width=16, depth=2, heads=2)
        model = backbone.build(ImageSpec.from_card(data.card), MODELS[name])
        loss = nn.functional.cross_entropy
        train(model, 40, 1e-2, lambda: loss(model(images).prediction, labels))
        target = folder / "artifacts/pretrain" / name / "0"
        target.mkdir(parents=True)
        save_model(target, model)
        return MeasuredModel(model, data)

    return {name: trained(name) for name in MODELS}


def in_run(patch: pytest.MonkeyPatch, folder: Path, **sections: Any) -> None:
    """Stages run in ``folder`` with a params.yaml of these sections, after the stage ``code``."""
    patch.chdir(folder)
    patch.delenv("MOECORE_PARAMS", raising=False)
    patch.setenv("MOECORE_THREADS", "1")
    named = sections.get("run", {}).get("methods", [])
    sections = {"run": {"methods": []}, "methods": dict.fromkeys(named, {})} | sections
    (folder / "params.yaml").write_text(yaml.safe_dump(sections))
    write_all_hashes("params.yaml")


NASTY = "<img src=x onerror=alert(1)>"
MOVED = {"name": "moved", "views": {"affine": {"degrees": 40, "translate": 0.3}}}
PGD, VIEWS = {"kind": "pgd", "steps": 2}, (MOVED, "rotation", "brightness")
FEW = Explorer(images=5, gallery=40, epsilons=(0.02, 0.1), attack=PGD, augmentations=VIEWS)
OF_VOLUMES = FEW.model_copy(update={"augmentations": ("shift", "noise")})


def moe(experts: int = 4, blocks: tuple[int, ...] = (0, 1)) -> MoESettings:
    router = {"kind": "noisy_top_k", "k": min(2, experts)}
    mlps = {"kind": "mlp", "number": experts, "hidden_ratio": 0.25}
    return MoESettings(router=router, experts=mlps, blocks=blocks)


def images(classes: int = 3, size: int = 12, channels: int = 1, number: int = 50) -> Prepared:
    """Generated images; the first class has a name that a page must not read as HTML."""
    names = (NASTY, *(f"class {place}" for place in range(1, classes)))
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (number, channels, size, size), dtype=np.uint8)
    split = Split(pixels, random.integers(0, classes, number))
    card = {"name": "generated", "task": Classification(classes=names).model_dump(), "size": size}
    card |= {"channels": channels, "mean": [0.5] * channels, "std": [0.3] * channels}
    card["simulated"] = False
    return Prepared(card, split, split, split)


def surer(backbone: Backbone, data: Prepared, layers: MoESettings | None, seed=0) -> MeasuredModel:
    """An untrained model whose tokens differ and whose routers are sure."""
    torch.manual_seed(seed)
    model = backbone.build(ImageSpec.from_card(data.card), layers)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight *= 30 if "router" in name else 4
    return MeasuredModel(model.eval(), data)


def subject(data: Prepared, layers: MoESettings | None, patch: int = 4, seed=0) -> MeasuredModel:
    return surer(Vit(patch=patch, width=16, depth=2, heads=2), data, layers, seed)


def volumes(folder: Path, seed: int = 0) -> MeasuredModel:
    """A model of age on volumes of 16³ voxels, in cubes of 4³."""
    backbone = Vit3d(patch=4, width=16, depth=2, heads=2, mlp_ratio=1)
    return surer(backbone, write_cohort(folder), moe(), seed)


def captioned(folder: Path) -> MeasuredModel:
    """Two towers, untrained but sure, and 30 test mosaics of digits with five captions each."""
    folder.mkdir(parents=True, exist_ok=True)
    source = {"kind": "digits", "size": 8}
    CaptionedMosaic(source=source, train=60, validation=20, test=30).write(folder)
    vit, text = Vit(patch=4, width=16, depth=2, heads=2), {"width": 16, "depth": 2, "heads": 2}
    return surer(TwoTowers(image=vit, text=text, joint=8), Prepared.open(folder), moe())


def match_ratios(probs_1, probs_2, is_pair) -> list[float]:
    """Return ``count_token_pair_matches_by_image`` of all images as shares of pairs (PRC)."""
    counts = count_token_pair_matches_by_image(probs_1, probs_2, is_pair).sum(dim=0)
    return (counts.double() / is_pair.sum()).tolist()
