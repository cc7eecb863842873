"""The stage ``code`` checks and hashes again exactly when something that it reads has changed."""

import shutil
from pathlib import Path

import pytest

from moecore.core.files import UserError
from moecore.core.source_layout import ROOT
from moecore.pipeline import code_hashes
from moecore.stages import code as stage
from tests.project import PARAMS


@pytest.fixture
def runs(tmp_path, monkeypatch) -> list[str]:
    """Return the paths whose models were checked, in a folder with a copy of the source."""
    source = tmp_path / "source"
    compiled = shutil.ignore_patterns("__pycache__")
    for name in ("moecore", "stages"):
        shutil.copytree(ROOT / name, source / name, ignore=compiled, symlinks=True)
    monkeypatch.setattr(code_hashes, "ROOT", source)
    monkeypatch.chdir(tmp_path)
    Path("params.yaml").write_text(PARAMS, encoding="utf-8")
    for phase in ("pretrain", "finetune"):
        card = Path("artifacts/data", phase, "card.json")
        card.parent.mkdir(parents=True)
        card.touch()
    checked: list[str] = []
    monkeypatch.setattr(stage, "check_models", checked.append)
    stage.code()
    stage.code()
    assert checked == ["params.yaml"], "the second time there was nothing to do"
    return checked


def test_an_edit_of_what_it_reads_or_writes_is_noticed(runs):
    edited = (
        "source/moecore/report/page/page_objects.py",
        "source/stages/pretrain.py",
        "params.yaml",
    )
    edited += ("dvc.yaml", "artifacts/code/stages/pretrain.json", "source/moecore/nn/new.py")
    for number, path in enumerate(edited, 2):
        file = Path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a", encoding="utf-8") as handle:
            handle.write("\n# edited\n")
        stage.code()
        assert len(runs) == number, path
        hashes = Path("artifacts/code/stages/pretrain.json").read_text(encoding="utf-8")
        assert "edited" not in hashes


def test_what_is_gone_is_noticed(runs):
    shutil.rmtree("artifacts/code")
    stage.code()
    assert len(runs) == 2 and Path("artifacts/code/stages/pretrain.json").is_file()
    Path("artifacts/code/settings/pretrain.json").unlink()
    stage.code()
    assert len(runs) == 3
    Path("artifacts/data/finetune/card.json").unlink()  # its raw data count again
    stage.code()
    assert len(runs) == 4


def test_a_refused_study_is_checked_again(runs, monkeypatch):
    Path("params.yaml").write_text(PARAMS + "\n", encoding="utf-8")

    def refuse(path: str) -> None:
        runs.append(path)
        raise UserError(f"{path}: refused")

    monkeypatch.setattr(stage, "check_models", refuse)
    for _ in range(2):
        with pytest.raises(UserError, match="refused"):
            stage.code()
    assert len(runs) == 3


def test_an_edit_during_the_check_is_noticed_by_the_next_run(runs, monkeypatch):
    file = Path("source/moecore/nn/dispatch.py")
    Path("params.yaml").write_text(PARAMS + "\n", encoding="utf-8")

    def edit_meanwhile(path: str) -> None:
        runs.append(path)
        file.write_text(file.read_text(encoding="utf-8") + "\nEDITED = 1\n", encoding="utf-8")

    monkeypatch.setattr(stage, "check_models", edit_meanwhile)
    stage.code()
    monkeypatch.setattr(stage, "check_models", runs.append)
    stage.code()
    assert len(runs) == 3


def test_a_damaged_record_is_no_error(runs):
    Path(".state/code.sha256").write_bytes(b"\xff torn")
    stage.code()
    stage.code()
    assert len(runs) == 2
