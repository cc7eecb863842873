"""docs/methods.md: every part that params.yaml can name has an entry, and every file it names
exists.

What the README shows works as it is written there.
"""

import re
import sys

from moecore.core.files import read_json
from tests.project import PARAMS, ROOT, Project

METHODS = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
KIND = re.compile(r'^    kind: Literal\["(\w+)"\]', re.MULTILINE)


def kinds() -> set[str]:
    """The kinds of all parts: settings classes whose `kind` is the stem of their file."""
    found = set()
    for file in (ROOT / "moecore").rglob("*.py"):
        found |= {kind for kind in KIND.findall(file.read_text("utf-8")) if kind == file.stem}
    return found


def test_every_kind_has_an_entry():
    headed = set(re.findall(r"^### .* · `(\w+)`$", METHODS, re.MULTILINE))
    assert kinds() == headed


def test_an_entry_names_its_file_and_every_file_exists():
    for entry in METHODS.split("\n### ")[1:]:
        title = entry.splitlines()[0]
        named = re.findall(r"`((?:moecore|stages|benchmarks)/[\w/.]+)`", entry)
        assert named, f"{title}: no file"
        lost = [path for path in named if not (ROOT / path).is_file()]
        assert not lost, f"{title}: {lost}"


def test_a_kind_is_described_by_its_own_file():
    for entry in METHODS.split("\n### ")[1:]:
        title = entry.splitlines()[0]
        if kind := re.search(r"· `(\w+)`$", title):
            assert f"/{kind[1]}.py`" in entry, title


README = (ROOT / "README.md").read_text(encoding="utf-8")


def example(language: str, word: str) -> str:
    """The one block of code in this language that has ``word``."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    (found,) = [block for block in blocks if word in block]
    return found


def test_a_method_is_an_entry(tmp_path):
    entry = example("yaml", "moge_z").replace("methods:\n", "")
    small = re.sub(r"epochs: 2", "epochs: 1", PARAMS).replace("teacher:\n", f"{entry}teacher:\n", 1)
    project = Project(tmp_path, small.replace("[dense, vmoe, tgr]", "[dense, moge_z]"))
    assert project.moecore("check").returncode == 0
    for stage in ("prepare pretrain", "teacher_router moge_z 0", "pretrain moge_z 0"):
        project.stage(*stage.split())
    assert read_json(tmp_path / "artifacts/measured/pretrain/moge_z/0.json")["test_count"] > 0
    history = (tmp_path / "artifacts/history/pretrain/moge_z/0/history.jsonl").read_text("utf-8")
    assert all(f'"{name}"' in history for name in ("load", "group_sparsity", "z_loss"))


def test_a_trained_model_is_used(finished):
    code = example("python", "load_model").replace("28, 28", "16, 16")
    printed = finished.run([sys.executable, "-c", code]).stdout.splitlines()
    assert printed == ["torch.Size([2, 10])", "torch.Size([2, 5, 4])"]


def test_every_command_is_there():
    shown = set(re.findall(r"^moecore (\w+)", README, re.MULTILINE))
    listed = Project.at(ROOT).moecore("--help").stdout
    assert shown and all(re.search(rf"^  {name} ", listed, re.MULTILINE) for name in shown)
    targets = set(re.findall(r"^make (\w+)", README, re.MULTILINE))
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert targets and all(re.search(rf"^{name}:", makefile, re.MULTILINE) for name in targets)
