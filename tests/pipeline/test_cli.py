"""The command ``moecore``: output and errors; own pictures, `quick`, `run -S`, the notebook."""

import csv
import errno
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from typer.main import get_command
from typer.testing import CliRunner

from moecore.core.files import read_json, write_atomic
from moecore.data.sources.image_folder import ImageFolder
from moecore.pipeline import command_group
from moecore.pipeline.cli import app
from moecore.study.questions import QuestionFile
from tests.data.making import COLOURS, image_classes, write_classes
from tests.my_lab import write_my_lab
from tests.project import PARAMS, ROOT, SHIPPED, Project

DIGITS = "{kind: digits, size: 28}"
FLOWERS = "{kind: image_folder, root: flowers, size: 28, channels: 1}"


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with our params.yaml on data that are always there, dvc.yaml and MoGE's studies."""
    shutil.copy(ROOT / "dvc.yaml", tmp_path)
    text = SHIPPED.read_text(encoding="utf-8")
    fashion = "{kind: fashion_mnist, validation: 5000}"
    assert fashion in text
    text = text.replace(fashion, DIGITS)
    (tmp_path / "params.yaml").write_text(text, encoding="utf-8")
    for name in ("moge", "worlds"):
        shutil.copytree(ROOT / "pipelines" / name, tmp_path / "pipelines" / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def moecore(*words: str):
    return CliRunner().invoke(app, words, catch_exceptions=False)


def test_a_read_only_project_is_one_line(monkeypatch):
    def refuse(path, value):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr("moecore.pipeline.cli.write_json", refuse)
    said = moecore("schema")
    assert said.exit_code == 1 and said.stderr.count("\n") == 1
    assert "params.schema.json: read-only file system" in said.stderr


def test_a_file_in_order_says_what_its_data_are(place):
    said = moecore("check").stdout
    head, *data = said.splitlines()
    assert head == "params.yaml: in order (dense, vmoe, prc, ermoe, tgr, moge; seeds 0)"
    told = [line.split(";")[0] for line in data if line.startswith("  data.")]
    assert told == ["  data.pretrain: Digits", "  data.finetune: Digits"]


def test_data_that_appear_and_go_are_checked_anew(place):
    path = place / "params.yaml"
    path.write_text(path.read_text(encoding="utf-8").replace(DIGITS, FLOWERS), encoding="utf-8")
    away = moecore("check")
    assert away.exit_code == 1 and "data.pretrain.root: flowers: no such folder" in away.stderr
    assert away.stderr.endswith("params.yaml: all else is in order\n") and not away.stdout
    image_classes(place / "flowers", {"aster": 400, "rose": 400}, size=(2, 2))
    there = moecore("check")
    assert there.exit_code == 0 and "576 train, 64 validation, 160 test; 2 clas" in there.stdout
    image_classes(place / "flowers", {"tulip": 400}, size=(2, 2))
    assert "864 train, 96 validation, 240 test; 3 classes" in moecore("check").stdout
    shutil.rmtree(place / "flowers")
    assert moecore("check").stderr == away.stderr


def test_data_that_were_prepared_need_no_raw_ones(place):
    """As after `dvc pull`, on a machine without the raw data."""
    path = place / "params.yaml"
    raw = ImageFolder(root="flowers", size=28, channels=1)
    image_classes(place / "flowers", {"aster": 400, "rose": 400}, size=(2, 2))
    raw.write(place / "artifacts/data/pretrain")
    shutil.rmtree(place / "flowers")
    text = path.read_text(encoding="utf-8").replace(DIGITS, FLOWERS)
    path.write_text(text, encoding="utf-8")
    assert "576 train, 64 validation, 160 test; 2 classes" in moecore("check").stdout
    path.write_text(text.replace("flowers, size: 28", "flowers, size: 14"), encoding="utf-8")
    assert "flowers: no such folder" in moecore("check").stderr, "these were not prepared"


def test_a_metric_that_nothing_measures_is_refused_with_its_place(place):
    path = place / "params.yaml"
    asked = "{asks: so, metric: match_top3, method: prc, against: vmoe, better: higher}"
    text = path.read_text(encoding="utf-8").replace("questions: []", f"questions: [{asked}]")
    path.write_text(text, encoding="utf-8")
    wrong = moecore("check")
    line = text[: text.index("match_top3")].count("\n") + 1
    assert wrong.exit_code == 1 and wrong.stderr.startswith(f"params.yaml:{line}:")
    assert "questions[0].metric: found 'match_top3', did you mean 'match_top1'?" in wrong.stderr


def test_presets_are_listed_written_and_taken_back(place):
    listed = moecore("study", "preset", "moge/paper_scale").stdout.split()
    assert listed == list(QuestionFile(ROOT, "moge/paper_scale").presets)
    folder = ".runs/moge.paper_scale"
    assert moecore("study", "write", "moge/paper_scale").stdout == f"{folder}: written\n"
    done = moecore("study", "preset", "moge/paper_scale", "top_5")
    changed = ("methods.vmoe.router.k: 1 → 5", "methods.moge.router.k: 1 → 5")
    assert done.exit_code == 0 and all(line in done.stdout for line in changed)
    assert f"to run it: cd {folder} && moecore run\n" in done.stdout
    again = moecore("study", "preset", "moge/paper_scale", "top_5").stdout
    assert again.startswith("nothing changes\n")
    back = moecore("study", "write", "moge/paper_scale")
    assert f"{folder}: methods.moge.router.k: 5 → 1\n" in back.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("preset moge/paper_scale top_7", "found no preset 'top_7', did you mean 'top_"),
        ("preset nowhere", "found no question 'nowhere'; allowed: "),
        ("run pipelines/ablations_moge_tables", "now: moecore study run moge/tables_5_and_7 --rou"),
        ("write moge/tables_5_and_7 --round 3", "found round 3; allowed: 1 to 2"),
        ("keep moge/paper_scale", "compare.json does not exist; run `moecore study run moge/paper"),
        ("check", "found no question; allowed: names of questions, or --all"),
        ("write", "overlay.yaml: cannot be read (no such file or directory)"),
    ],
)
def test_what_cannot_be_done_with_a_question_is_one_line(place, words, said):
    wrong = moecore("study", *words.split())
    assert wrong.exit_code == 1 and said in wrong.stderr
    assert wrong.stderr.count("\n") == 1 and not (place / ".runs").exists()


def test_a_new_question_is_in_order(place):
    assert moecore("study", "new", "own").exit_code == 0
    path = place / "pipelines/ours/own.yaml"
    assert moecore("study", "check", "ours/own").stdout == "ours/own: in order\n"
    assert moecore("study", "write", "own").stdout == ".runs/ours.own: written\n"
    assert moecore("check", ".runs/ours.own/params.yaml").exit_code == 0
    again = moecore("study", "new", "own")
    assert again.exit_code == 1 and "is there already; take another name" in again.stderr
    named = moecore("study", "new", "Own-Study")
    assert named.exit_code == 1 and "allowed: small letters, digits and _" in named.stderr
    path.write_text(path.read_text("utf-8").replace("[dense, vmoe]", "[dense, vmeo]"), "utf-8")
    shutil.rmtree(place / "pipelines/moge")
    wrong = moecore("study", "check", "--all")
    assert wrong.exit_code == 1 and "ours/own.yaml:6:18: methods: found 'vmeo'" in wrong.stderr


def test_help_has_every_command_in_a_users_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert moecore("--version").stdout == f"moecore {version('moecore')}\n"
    panels = re.split(r"\n(?=\w.*:\n)", moecore("--help").stdout)[2:]
    assert [panel.partition(":")[0] for panel in panels] == list(command_group.PANELS)
    commands = [re.findall(r"^  (\w+)  ", panel, re.M) for panel in panels]
    assert commands == [list(names) for names in command_group.PANELS.values()]
    assert {name for names in commands for name in names} == get_command(app).commands.keys()


def test_help_imports_no_torch():
    """A real process: torch takes seconds."""
    code = (
        "import sys; from moecore.pipeline.cli import app; app(['--help'], standalone_mode=False); "
    )
    code += "print(sorted({'torch', 'mlflow', 'numpy'} & set(sys.modules)))"
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.endswith("[]\n"), done.stderr


@pytest.fixture(scope="module")
def prepared(finished, tmp_path_factory):
    """A project with data and teacher routers, in which no method with experts is trained."""
    project = finished.copy(tmp_path_factory.mktemp("bad") / "project")
    shutil.rmtree(project.folder / "artifacts/pretrain/vmoe")
    shutil.rmtree(project.folder / "artifacts/history/pretrain/vmoe")
    return project


@pytest.fixture
def project(prepared):
    """The same with params.yaml and data put back after the test."""
    params = prepared.folder / "params.yaml"
    images = prepared.folder / "artifacts/data/pretrain/train_images.npy"
    kept = {path: path.read_bytes() for path in (params, images)}
    yield prepared
    for path, content in kept.items():
        path.write_bytes(content)


def test_truncated_data(project):
    images = project.folder / "artifacts/data/pretrain/train_images.npy"
    os.truncate(images, images.stat().st_size // 2)
    done = project.attempt_stage("pretrain", "vmoe", "0")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "train_images.npy" in done.stderr and "`prepare`" in done.stderr
    assert not (project.folder / "artifacts/pretrain/vmoe").exists()


def test_a_loss_that_is_not_finite_stops_the_run(project):
    old = "pretrain:\n  {epochs: 2, batch: 64, learning_rate: "
    project.edit(f"{old}0.001,", f"{old}1.0e+38, clip: null,")
    done = project.attempt_stage("pretrain", "vmoe", "0")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    said = ("the loss is not finite since step", "importance", "checkpoint")
    assert all(words in done.stderr for words in said), done.stderr
    assert not (project.folder / "artifacts/pretrain/vmoe").exists()
    history = project.folder / "artifacts/history/pretrain/vmoe/0/history.jsonl"
    assert '"status": "FAILED"' in history.read_text()


def test_a_full_disk_loses_nothing_and_the_run_goes_on_later(project):
    done = project.attempt_limited(60_000, "pretrain", "vmoe", "0")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    (said,) = [line for line in done.stderr.splitlines() if "file too large" in line]
    place = r"pretrain vmoe 0: \.state/pretrain/vmoe/0/\w+/checkpoint.safetensors"
    assert re.match(f"{place}: file too large", said)
    assert not (project.folder / "artifacts/pretrain/vmoe").exists()
    project.stage("pretrain", "vmoe", "0")
    assert (project.folder / "artifacts/pretrain/vmoe/0/model.safetensors").exists()


def test_two_processes_do_not_train_the_same(project):
    import fcntl

    lock = Path(project.folder / ".state/pretrain/vmoe/0/lock")
    lock.parent.mkdir(parents=True, exist_ok=True)
    with open(lock, "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        done = project.attempt_stage("pretrain", "vmoe", "0")
    assert done.returncode == 1 and "another process is at work" in done.stderr


def test_a_folder_of_pictures_runs_to_the_page_and_to_a_prediction(tmp_path):
    """README's command, with a shorter training; the params.yaml of the project is not changed."""
    write_classes(tmp_path / "flowers", 30)
    (tmp_path / "project").mkdir()
    project = Project(tmp_path / "project").with_dvc()
    wanted = ["pretrain.updates=1", "methods.vmoe.router.k=[1,2]", "run.measurements=[]"]
    sets = [word for value in wanted for word in ("-S", value)]
    done = project.moecore("run", "--data", "../flowers", "--sweep", *sets, "--jobs", "2")
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    place = ".runs/data.flowers.vmoe_k"
    assert done.stdout.endswith(f"Page: {place}/reports/index.html\n")
    assert (project.folder / "params.yaml").read_text(encoding="utf-8") == PARAMS
    page = (project.folder / place / "reports/index.html").read_text(encoding="utf-8")
    assert "flowers" in page and "vmoe_k2" in page and "images → images" not in page
    model = f"{place}/artifacts/pretrain/vmoe_k1/0"
    done = project.moecore("predict", model, str(tmp_path / "flowers"))
    assert done.returncode == 0, done.stderr
    with open(project.folder / "predictions.csv", newline="", encoding="utf-8") as handle:
        rows = list(csv.DictReader(handle))
    assert len(rows) == 90 and {row["prediction"] for row in rows} <= set(COLOURS)
    said = r"accuracy of this model: .* test items of .*; its calibration was not measured"
    assert re.search(said, done.stdout) and (project.folder / "predictions.html").is_file()


@pytest.fixture(scope="module")
def looked(tmp_path_factory) -> Project:
    """A project whose question `quick` ran, with a shorter training and a loss of its own."""
    params = SHIPPED.read_text(encoding="utf-8")
    project = Project(tmp_path_factory.mktemp("quick"), params).with_dvc()
    folder = project.folder / "pipelines"
    text = (ROOT / "pipelines/ours/quick.yaml").read_text(encoding="utf-8")
    own = "    regularizers: [{kind: my_lab.calm}]"
    text = re.sub("^    regularizers: .*", own, f"packages: [my_lab]\n{text}", flags=re.M)
    write_atomic(folder / "ours/quick.yaml", text.replace("epochs: 4", "epochs: 1"))
    write_my_lab(folder / "ours")
    wanted = ["-S", "data.pretrain.train=1000"]
    done = project.moecore("study", "run", "quick", "--jobs", "2", *wanted)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "params.yaml: data.pretrain.train: 12000 → 1000" in done.stdout
    assert "results/ours/quick.json: left as it is: this run has other settings" in done.stdout
    text = (folder / "ours/quick.yaml").read_text(encoding="utf-8")
    write_atomic(folder / "ours/quick.yaml", text.replace("train: 12000", "train: 1000"))
    return project


def test_the_first_look_ends_with_a_page(looked):
    done = looked.moecore("quick")
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "Running stage" not in done.stdout
    assert "Page: .runs/ours.quick/reports/index.html" in done.stdout
    reports = looked.folder / ".runs/ours.quick/reports"
    assert (reports / "index.html").is_file()
    assert (reports / "explorer.html").stat().st_size <= 3 * 2**20
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [line[1] for line in lines if line[:1] == ["pretrain"]] == ["dense", "vmoe", "told"]
    result = read_json(looked.folder / "pipelines/results/ours/quick.json")["1"]
    assert result.pop("asked") == {"commit": None, "file": "pipelines/ours/quick.yaml"}
    assert result == read_json(reports / "compare.json")


def test_dvc_works_in_the_folder_of_a_question(looked):
    study = Project.at(looked.folder / ".runs/ours.quick")
    study.root = looked.folder
    assert set(json.loads(study.run(["dvc", "status", "--json"]).stdout)) <= {"code"}
    assert study.run(["dvc", "params", "diff"]).stdout == ""
    path = study.folder / "params.yaml"
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("truth: {images: 300}", "truth: {images: 200}"), encoding="utf-8")
    assert "truth.images" in study.run(["dvc", "params", "diff"]).stdout
    path.write_text(text, encoding="utf-8")
    assert study.repro() == ["code"]
    kept = looked.moecore("study", "keep", "ours/quick")
    assert kept.stdout == "pipelines/results/ours/quick.json: written\n", kept.stderr


def test_a_part_in_the_questions_folder_is_used_hashed_and_in_its_schema(looked):
    folder = looked.folder / ".runs/ours.quick"
    history = folder / "artifacts/history/pretrain/vmoe/0/history.jsonl"
    assert "my_lab.calm" in history.read_text(encoding="utf-8")
    assert "my_lab/calm.py" in read_json(folder / "artifacts/code/methods/vmoe.json")
    study = Project.at(folder)
    study.root = looked.folder
    assert study.moecore("schema").returncode == 0
    assert "my_lab.calm" in (folder / "params.schema.json").read_text(encoding="utf-8")
    (looked.folder / "pipelines/ours/my_lab/calm.py").write_text("", encoding="utf-8")
    checked = study.moecore("check")
    write_my_lab(looked.folder / "pipelines/ours")
    assert "has no class Calm" in checked.stderr and checked.stderr.count("\n") == 1


def test_the_notebook_runs(looked):
    docs = looked.folder / "docs"
    docs.mkdir()
    notebook = nbformat.read(ROOT / "docs/first_steps.ipynb", as_version=4)
    there = {"metadata": {"path": str(docs)}}
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources=there).execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    said = "".join(output.get("text", "") for cell in cells for output in cell.outputs)
    drawn = [cell for cell in cells for out in cell.outputs if "image/png" in out.get("data", {})]
    assert "of 4 patches went to another expert" in said and "told  agreement" in said
    assert len(drawn) == 2, "the routing of one image, clean and attacked"
    assert "Warning" not in said


@pytest.fixture(scope="module")
def spare(finished, tmp_path_factory) -> Project:
    return finished.copy(tmp_path_factory.mktemp("spare") / "project")


KERNEL = Path("/sys/kernel")  # of Linux: nobody may write there, root neither


def link_to_kernel(folder: Path) -> None:
    if not KERNEL.is_dir():
        pytest.skip(f"{KERNEL} is not here")
    folder.symlink_to(KERNEL)


def link_to_itself(folder: Path) -> None:
    folder.symlink_to(folder)


@pytest.mark.parametrize(
    ("name", "stages", "replace"),
    [
        ("artifacts", [("code",), ("calibrate", "pretrain", "vmoe", "0")], link_to_kernel),
        ("artifacts", [("prepare", "pretrain")], link_to_itself),
        (".state", [("prepare", "pretrain")], Path.touch),
        (".state", [("teacher", "0")], link_to_kernel),
        ("reports", [("compare",)], link_to_itself),
        ("reports", [("compare",)], Path.touch),
    ],
)
def test_a_folder_that_cannot_be_used_is_one_line(
    spare: Project, name: str, stages: list, replace: Callable[[Path], None]
):
    place = spare.folder / name
    aside = place.rename(spare.folder / "aside")
    replace(place)
    ended = [spare.attempt_stage(*words) for words in stages]
    place.unlink()
    aside.rename(place)
    for words, done in zip(stages, ended, strict=True):
        assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
        assert done.stderr.startswith(f"{' '.join(words)}: {name}"), done.stderr
