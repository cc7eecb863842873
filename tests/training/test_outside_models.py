"""Models with parts from outside: what wrote them, and who may load them."""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from moecore.core.files import UserError, read_json, write_sealed
from moecore.core.outside_packages import allow_packages, more_packages
from moecore.nn.backbones.vit import Vit
from moecore.nn.experts.mlp import Mlp
from moecore.nn.layers.moe import MoESettings
from moecore.pipeline.predict_cli import main
from moecore.testing.check_helpers import IMAGE
from moecore.training.artifacts import load_model, save_model
from tests.my_lab import forget_package, write_my_lab
from tests.volumes import write_classes

ROUTER = {"kind": "my_lab.cosine", "k": 1}
WRITTEN = "written with my_lab, version: source tree"


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Iterator[Path]:
    """The folder of a saved model, in which my_lab lies too."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    write_my_lab(tmp_path)
    with more_packages(["my_lab"]):
        moe = MoESettings.model_validate({"router": ROUTER, "experts": Mlp(number=4)})
        model = Vit(patch=4, width=16, depth=4, heads=2).build(IMAGE, moe)
        save_model(tmp_path / "model", model)
    yield tmp_path / "model"
    allow_packages((), ())
    forget_package()


def test_it_loads_with_its_package_alone(folder):
    images = torch.rand(2, 1, 8, 8)
    first, second = (load_model(folder, packages=["my_lab"]) for _ in range(2))
    assert torch.equal(first(images).prediction, second(images).prediction)
    assert first.moe.router.model_dump(exclude_defaults=True) == {"k": 1}
    forget_package()
    with pytest.raises(UserError) as refused:
        load_model(folder)
    assert "my_lab" not in sys.modules
    said = f"has my_lab.cosine, of a package that is not listed ({WRITTEN})"
    calls = 'load_model(folder, packages=["my_lab"]), moecore predict --package my_lab'
    assert str(refused.value) == f"{folder}/model.json: {said}; to import it: {calls}"


def test_moecore_predict_is_given_the_package(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder.parent)
    forget_package()
    write_classes(folder.parent / "pictures", 2)
    with pytest.raises(SystemExit, match="has my_lab.cosine, of a package that is not listed"):
        main(["model", "pictures"])
    with pytest.raises(SystemExit, match="^0$"):
        main(["model", "pictures", "--package", "my_lab"])
    assert len(Path("predictions.csv").read_text(encoding="utf-8").splitlines()) > 2


def test_what_is_missing_is_said_with_the_version_that_wrote_it(folder):
    versions = read_json(folder / "model.json")["versions"]
    assert list(versions) == ["moecore", "torch", "my_lab"]
    assert versions["torch"] == torch.__version__
    forget_package()
    (folder.parent / "my_lab/cosine.py").unlink()
    with pytest.raises(UserError, match=f"no such module \\({WRITTEN}\\)$"):
        load_model(folder, packages=["my_lab"])
    forget_package()
    shutil.rmtree(folder.parent / "my_lab")
    with pytest.raises(UserError, match=f"my_lab, which is not installed; .* \\({WRITTEN}\\)$"):
        load_model(folder, packages=["my_lab"])
    with pytest.raises(UserError, match="^packages: found os; allowed: "):
        load_model(folder, packages=["os"])


def test_models_from_before_there_were_versions_load(folder):
    card = read_json(folder / "model.json")
    del card["versions"]
    write_sealed(folder / "model.json", card)
    assert load_model(folder, packages=["my_lab"]).moe.router.k == 1
    with pytest.raises(UserError, match="written with my_lab, version: unknown"):
        load_model(folder)
