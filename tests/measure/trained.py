"""Small models of the digits that are right about most of their images, in the folders of a run."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from moecore.data.prepared import Prepared
from moecore.data.sources.digits import Digits
from moecore.nn.backbones.image import ImageSpec
from moecore.nn.backbones.vit import Vit
from moecore.nn.layers.moe import MoE
from moecore.pipeline.code_hashes import write_code
from moecore.training.artifacts import save_model

SPARSE = MoE(
    router={"kind": "noisy_top_k", "k": 1},
    experts={"kind": "mlp", "number": 4, "hidden_ratio": 0.5},
    blocks=[0, 1],
)
MODELS = {"vit": SPARSE, "dense": None}


def write_digits(folder: Path) -> Prepared:
    """200 training and 60 test images in artifacts/data/pretrain."""
    target = folder / "artifacts/data/pretrain"
    target.mkdir(parents=True)
    Digits(size=12, train_limit=200, test_limit=60).prepare(target)
    return Prepared.open(target)


def trained(data: Prepared, moe: MoE | None, seed: int = 1) -> torch.nn.Module:
    """After 40 steps."""
    torch.manual_seed(seed)
    backbone = Vit(patch=6, width=16, depth=2, heads=2)
    model = backbone.build(ImageSpec.from_card(data.card), moe)
    images = torch.from_numpy(np.array(data.train.images)).float() / 255
    labels = torch.from_numpy(data.train.labels[:])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(40):
        loss = torch.nn.functional.cross_entropy(model(images).prediction, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def write_models(folder: Path, data: Prepared) -> dict[str, torch.nn.Module]:
    """The models, also in artifacts/pretrain/<name>/0."""
    models = {name: trained(data, moe) for name, moe in MODELS.items()}
    for name, model in models.items():
        target = folder / "artifacts/pretrain" / name / "0"
        target.mkdir(parents=True)
        save_model(target, model)
    return models


def in_run(patch: pytest.MonkeyPatch, folder: Path, **sections: Any) -> None:
    """Stages run in ``folder`` with a params.yaml of these sections, after the stage ``code``."""
    patch.chdir(folder)
    patch.delenv("MOECORE_PARAMS", raising=False)
    patch.setenv("MOECORE_THREADS", "1")
    named = sections.get("run", {}).get("methods", [])
    sections = {"run": {"methods": []}, "methods": dict.fromkeys(named, {})} | sections
    (folder / "params.yaml").write_text(yaml.safe_dump(sections))
    write_code("params.yaml")
