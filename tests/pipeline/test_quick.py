"""`moecore quick`, the first look; and `moecore run -S`, which edits params.yaml for its user."""

import shutil

from tests.project import ROOT, Project


def test_a_first_look_and_another_value(tmp_path):
    project = Project(tmp_path, (ROOT / "params.yaml").read_text(encoding="utf-8")).with_dvc()
    study = tmp_path / "pipelines/quick"
    ignored = shutil.ignore_patterns("artifacts", "reports", ".state", "dvc.lock")
    shutil.copytree(ROOT / "pipelines/quick", study, ignore=ignored)
    wanted = ["-S", "pretrain.epochs=1", "-S", "stability.images=10"]
    shorter = project.moecore("study", "run", "pipelines/quick", "--jobs", "2", *wanted)
    assert shorter.returncode == 0, f"{shorter.stdout}\n{shorter.stderr}"
    assert "params.yaml: pretrain.epochs: 8 → 1" in shorter.stdout
    looked = project.moecore("quick")
    assert looked.returncode == 0, f"{looked.stdout}\n{looked.stderr}"
    running = [line for line in looked.stdout.splitlines() if line.startswith("Running stage")]
    assert running == ["Running stage 'code':"]
    assert "Page: pipelines/quick/reports/index.html" in looked.stdout
    assert (study / "reports/index.html").is_file()
    lines = [line.split() for line in looked.stdout.splitlines()]
    assert [line[1] for line in lines if line[:1] == ["pretrain"]] == ["vmoe", "prc"]
    wrong = project.moecore("study", "run", "pipelines/quick", "-S", "pretrain.epoch=1")
    assert wrong.returncode == 1 and "did you mean 'epochs'" in wrong.stderr
    assert "Traceback" not in wrong.stderr
