"""What the README shows works as it is written there."""

import re
import sys

from moecore.core.files import read_json
from tests.project import PARAMS, ROOT, Project

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def example(language: str, word: str) -> str:
    """The one block of code in this language that has ``word``."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    (found,) = [block for block in blocks if word in block]
    return found


def test_a_method_is_an_entry(tmp_path):
    entry = example("yaml", "moge_z").replace("methods:\n", "")
    small = re.sub(r"epochs: 2", "epochs: 1", PARAMS).replace("teacher:\n", f"{entry}teacher:\n", 1)
    project = Project(tmp_path, small.replace("[dense, vmoe, tgr]", "[dense, moge_z]"))
    assert project.moecore("check").returncode == 0
    for stage in ("prepare pretrain", "teacher_router moge_z", "pretrain moge_z 0"):
        project.stage(*stage.split())
    assert read_json(tmp_path / "artifacts/measured/pretrain/moge_z/0.json")["test_count"] > 0
    history = (tmp_path / "artifacts/history/pretrain/moge_z/0/history.jsonl").read_text("utf-8")
    assert all(f'"{name}"' in history for name in ("load", "group_sparsity", "z_loss"))


def test_a_trained_model_is_used(finished):
    code = example("python", "load_model").replace("28, 28", "16, 16")
    printed = finished.run([sys.executable, "-c", code]).stdout.splitlines()
    assert printed == ["torch.Size([2, 10])", "torch.Size([2, 5, 4])"]


def test_every_command_is_there():
    shown = set(re.findall(r"^moecore (\w+)", TEXT, re.MULTILINE))
    listed = Project.at(ROOT).moecore("--help").stdout
    assert shown and all(re.search(rf"^  {name} ", listed, re.MULTILINE) for name in shown)
    targets = set(re.findall(r"^make (\w+)", TEXT, re.MULTILINE))
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert targets and all(re.search(rf"^{name}:", makefile, re.MULTILINE) for name in targets)
