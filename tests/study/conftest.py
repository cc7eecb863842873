"""A question to read and to write."""

import shutil
from pathlib import Path

import pytest

from moecore.core.source_layout import ROOT
from moecore.study.questions import QuestionFile
from tests.project import PARAMS


@pytest.fixture
def place(tmp_path) -> Path:
    shutil.copy(ROOT / "dvc.yaml", tmp_path)
    (tmp_path / "params.yaml").write_text(PARAMS, encoding="utf-8")
    return tmp_path


@pytest.fixture
def ask(place):
    """Write the question own/asked of a project, and its worlds, by name; return it."""

    def write(text: str, **worlds: str) -> QuestionFile:
        files = {"own/asked": text} | {f"worlds/{name}": one for name, one in worlds.items()}
        for name, one in files.items():
            path = place / f"pipelines/{name}.yaml"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(one, encoding="utf-8")
        return QuestionFile(place, "own/asked")

    return write
