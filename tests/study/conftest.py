"""A study to read and to write."""

import shutil
from pathlib import Path
from textwrap import indent

import pytest

from moecore.core.source_layout import ROOT
from tests.project import PARAMS


@pytest.fixture
def study(tmp_path):
    """A study of this overlay, below a folder with a params.yaml."""
    shutil.copy(ROOT / "dvc.yaml", tmp_path)
    (tmp_path / "params.yaml").write_text(PARAMS, encoding="utf-8")

    def make(overlay: str, **presets: str) -> Path:
        folder = tmp_path / "pipelines/own"
        folder.mkdir(parents=True)
        (folder / "overlay.yaml").write_text(overlay, encoding="utf-8")
        if presets:
            text = "".join(f"{name}:\n{indent(one, '  ')}" for name, one in presets.items())
            (folder / "presets.yaml").write_text(text, encoding="utf-8")
        return folder

    return make
