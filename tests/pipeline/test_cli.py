"""The command ``moecore``: what it prints and how it ends; what it calls is tested elsewhere."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moecore.core.files import UserError
from moecore.core.sources import ROOT
from moecore.data.sources.image_folder import ImageFolder
from moecore.pipeline.cli import app
from moecore.study.overlay import presets_of
from tests.data.making import image_classes


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with our params.yaml on data that are always there, dvc.yaml and one study."""
    shutil.copy(ROOT / "dvc.yaml", tmp_path)
    text = (ROOT / "params.yaml").read_text(encoding="utf-8")
    fashion = "{kind: fashion_mnist, validation: 5000}"
    assert fashion in text
    text = text.replace(fashion, "{kind: digits, size: 28}")
    (tmp_path / "params.yaml").write_text(text, encoding="utf-8")
    shutil.copytree(ROOT / "pipelines/moge", tmp_path / "pipelines/moge")
    if (ROOT / "pipelines/stages.yaml").is_file():
        shutil.copy(ROOT / "pipelines/stages.yaml", tmp_path / "pipelines")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def moecore(*words: str):
    return CliRunner().invoke(app, words, catch_exceptions=False)


def test_a_file_in_order_is_checked_once(project, monkeypatch):
    said = moecore("check").stdout
    head, *data = said.splitlines()
    assert head == "params.yaml: in order (dense, vmoe, prc, ermoe, tgr, moge; seeds 0)"
    assert [line.split(";")[0] for line in data] == [
        "  data.pretrain: Digits",
        "  data.finetune: Digits",
    ]
    monkeypatch.setattr("moecore.study.foreseen.foresee", lambda *_: pytest.fail("checked again"))
    assert moecore("check").stdout == said


def test_data_that_appear_and_go_are_checked_anew(project):
    path = project / "params.yaml"
    own = "{kind: image_folder, root: flowers, size: 28, channels: 1}"
    path.write_text(
        path.read_text(encoding="utf-8").replace("{kind: digits, size: 28}", own), encoding="utf-8"
    )
    away = moecore("check")
    assert away.exit_code == 1 and "data.pretrain.root: flowers: no such folder" in away.stderr
    assert away.stderr.endswith("params.yaml: all else is in order\n") and not away.stdout
    image_classes(project / "flowers", {"aster": 400, "rose": 400}, size=(2, 2))
    there = moecore("check")
    assert there.exit_code == 0 and "576 train, 64 validation, 160 test; 2 clas" in there.stdout
    image_classes(project / "flowers", {"tulip": 400}, size=(2, 2))
    assert "864 train, 96 validation, 240 test; 3 classes" in moecore("check").stdout
    (project / "flowers/rose/notes.txt").write_text("no image", encoding="utf-8")
    assert "files that are no images are passed over (1 .txt)" in moecore("check").stdout
    shutil.rmtree(project / "flowers")
    assert moecore("check").stderr == away.stderr


def test_data_that_were_prepared_need_no_raw_ones(project):
    """As after `dvc pull`, on a machine without the raw data."""
    path = project / "params.yaml"
    raw = ImageFolder(root="flowers", size=28, channels=1)
    image_classes(project / "flowers", {"aster": 400, "rose": 400}, size=(2, 2))
    raw.prepare(project / "artifacts/data/pretrain")
    shutil.rmtree(project / "flowers")
    own = "{kind: image_folder, root: flowers, size: 28, channels: 1}"
    text = path.read_text(encoding="utf-8").replace("{kind: digits, size: 28}", own)
    path.write_text(text, encoding="utf-8")
    assert "576 train, 64 validation, 160 test; 2 classes" in moecore("check").stdout
    path.write_text(text.replace("flowers, size: 28", "flowers, size: 14"), encoding="utf-8")
    assert "flowers: no such folder" in moecore("check").stderr, "these were not prepared"


def test_a_path_that_is_no_folder_is_one_line(project):
    wrong = moecore("check", "dvc.yaml/params.yaml")
    assert wrong.exit_code == 1 and wrong.stderr.startswith("dvc.yaml/params.yaml: cannot be read")


def test_a_change_is_checked_anew(project):
    assert moecore("check").exit_code == 0
    path = project / "params.yaml"
    path.write_text(path.read_text().replace("seeds: [0", "seeds: [zero", 1), encoding="utf-8")
    wrong = moecore("check")
    assert wrong.exit_code == 1 and wrong.stdout == ""
    assert wrong.stderr.startswith("params.yaml:")
    assert "found 'zero' (str); allowed: integer" in wrong.stderr
    assert "Traceback" not in wrong.stderr


def test_a_metric_that_nothing_measures_is_refused_with_its_place(project):
    path = project / "params.yaml"
    asked = "{asks: so, metric: match_top3, method: prc, against: vmoe, better: higher}"
    text = path.read_text(encoding="utf-8").replace("questions: []", f"questions: [{asked}]")
    path.write_text(text, encoding="utf-8")
    wrong = moecore("check")
    line = text[: text.index("match_top3")].count("\n") + 1
    assert wrong.exit_code == 1 and wrong.stderr.startswith(f"params.yaml:{line}:")
    assert "questions[0].metric: found 'match_top3', did you mean 'match_top1'?" in wrong.stderr


def test_other_code_checks_anew(project, monkeypatch):
    assert moecore("check").exit_code == 0
    monkeypatch.setattr("moecore.study.remembered._code", lambda: iter(["other.py"]))
    monkeypatch.setattr("moecore.study.foreseen.foresee", _refuse)
    assert moecore("check").exit_code == 1


def _refuse(path: Path, *_: object) -> None:
    raise UserError("refused")


def test_what_is_remembered_may_be_damaged(project):
    assert moecore("check").exit_code == 0
    (project / ".state/checked.json").write_text("{", encoding="utf-8")
    assert moecore("check").exit_code == 0


def test_presets_are_listed_written_and_taken_back(project):
    listed = moecore("study", "preset", "pipelines/moge").stdout.split()
    assert listed == list(presets_of(ROOT / "pipelines/moge"))
    done = moecore("study", "preset", "pipelines/moge", "top_5")
    changed = ("methods.vmoe.router.k: 1 → 5", "methods.moge.router.k: 1 → 5")
    assert done.exit_code == 0 and all(line in done.stdout for line in changed)
    assert moecore("study", "preset", "pipelines/moge", "top_5").stdout == "nothing changes\n"
    back = moecore("study", "write", "pipelines/moge")
    assert "pipelines/moge: methods.moge.router.k: 5 → 1\n" in back.stdout


def test_an_unknown_preset_is_one_line(project):
    wrong = moecore("study", "preset", "pipelines/moge", "top_7")
    assert wrong.exit_code == 1 and "found no preset 'top_7', did you mean 'top_" in wrong.stderr
    nowhere = moecore("study", "preset", "pipelines/nowhere")
    assert nowhere.exit_code == 1
    assert nowhere.stderr.startswith("pipelines/nowhere: found no overlay.yaml; allowed: ")


def test_a_new_study_is_in_order(project):
    assert moecore("study", "new", "own").exit_code == 0
    folder = project / "pipelines/own"
    assert {"README.md", "overlay.yaml", "params.yaml"} <= {path.name for path in folder.iterdir()}
    assert moecore("check", "pipelines/own/params.yaml").exit_code == 0
    again = moecore("study", "new", "own")
    assert again.exit_code == 1 and "is there already; take another name" in again.stderr
    named = moecore("study", "new", "Own-Study")
    assert named.exit_code == 1 and "allowed: small letters, digits and _" in named.stderr


def test_a_study_that_is_not_written_says_how(project):
    (project / "pipelines/moge/params.yaml").unlink()
    wrong = moecore("study", "run", "pipelines/moge")
    assert wrong.exit_code == 1 and "moecore study write pipelines/moge" in wrong.stderr


def test_jobs_are_at_least_one(project):
    wrong = moecore("run", "--jobs", "0")
    assert wrong.exit_code == 2 and "greater than or equal to 1" in wrong.stderr


def test_mlflow_is_served_and_fed(project, monkeypatch):
    monkeypatch.setattr("moecore.tracking.ui.ui", lambda port: port - 5000)
    monkeypatch.setattr("moecore.tracking.sync.sync", lambda: "3 runs added")
    assert moecore("ui", "--port", "5003").exit_code == 3
    assert moecore("sync").stdout == "3 runs added\n"


def test_predict_hands_its_words_to_the_script(project, monkeypatch):
    called = []
    monkeypatch.setattr(os, "execv", lambda path, words: called.append((path, words)))
    moecore("predict", "artifacts/pretrain/vmoe/0", "cohort", "--out", "ages.csv")
    given = ["artifacts/pretrain/vmoe/0", "cohort", "--out", "ages.csv"]
    assert called == [(sys.executable, [sys.executable, "-m", "stages.predict", *given])]


def test_help_and_an_unchanged_check_import_no_torch(project):
    """One real process each: torch takes seconds."""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    code = "import sys; from moecore.pipeline.cli import app; app(standalone_mode=False); "
    code += "print(sorted({'torch', 'mlflow', 'numpy'} & set(sys.modules)))"
    moecore("check")
    for words in (["--help"], ["check"]):
        done = subprocess.run(
            [sys.executable, "-c", code, *words], env=env, capture_output=True, text=True
        )
        assert done.returncode == 0 and done.stdout.endswith("[]\n"), done.stderr
