"""Data of one's own, as README says: a folder of pictures, the pipeline, a page, a prediction.

90 pictures in three classes, of odd sizes and in every mode.

`moecore quick`, the first look; `moecore run -S`, which edits params.yaml for its user; and the
notebook that looks at the models of the first.
"""

import csv
import re
import shutil

import nbformat
import pytest
import yaml
from nbclient import NotebookClient

from tests.project import PARAMS, ROOT, Project
from tests.volumes import COLOURS, write_classes

SMALL = {
    "run": {
        "methods": ["dense", "vmoe"],
        "seeds": [0],
        "phases": ["finetune"],
        "measurements": [],
        "thorough": [],
    },
    "calibrate": {"calibrator": {"kind": "temperature"}, "resamples": 100},
}


def readme_data() -> dict:
    """The data of README's example; a phase that it leaves out has the same pictures."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = text.split("## Your own data")[1]
    block = re.search(r"```yaml\n(.*?)```", section, re.DOTALL)
    data = yaml.safe_load(block[1])["data"]
    return {"finetune": dict(data["pretrain"])} | data


def test_readmes_example_runs_to_the_page_and_to_a_prediction(tmp_path):
    write_classes(tmp_path / "flowers", 30)
    data = readme_data()
    for phase, size in {"pretrain": 16, "finetune": 24}.items():
        assert data[phase]["root"] == "/data/flowers"
        data[phase] |= {"root": str(tmp_path / "flowers"), "size": size}
    settings = yaml.safe_load(PARAMS) | SMALL | {"data": data}
    folder = tmp_path / "project"
    folder.mkdir()
    project = Project(folder, yaml.safe_dump(settings)).with_dvc()
    done = project.moecore("run", "--jobs", "2")
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    page = (folder / "reports/index.html").read_text(encoding="utf-8")
    assert "flowers" in page and "images → images" not in page
    model = "artifacts/finetune/vmoe/0"
    done = project.moecore("predict", model, str(tmp_path / "flowers"))
    assert done.returncode == 0, done.stderr
    with open(folder / "predictions.csv", newline="", encoding="utf-8") as handle:
        rows = list(csv.DictReader(handle))
    assert len(rows) == 90
    assert {row["prediction"] for row in rows} <= set(COLOURS)
    assert "probabilities are calibrated" in done.stdout
    assert (folder / "predictions.html").is_file()


@pytest.fixture(scope="module")
def looked(tmp_path_factory) -> Project:
    """A project whose study `quick` ran, with a shorter training."""
    params = (ROOT / "params.yaml").read_text(encoding="utf-8")
    project = Project(tmp_path_factory.mktemp("quick"), params).with_dvc()
    ignored = shutil.ignore_patterns("artifacts", "reports", ".state", "dvc.lock")
    study = project.folder / "pipelines/quick"
    shutil.copytree(ROOT / "pipelines/quick", study, ignore=ignored)
    wanted = ["-S", "pretrain.epochs=1", "-S", "stability.images=10"]
    done = project.moecore("study", "run", "pipelines/quick", "--jobs", "2", *wanted)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "params.yaml: pretrain.epochs: 8 → 1" in done.stdout
    return project


def test_the_first_look_ends_with_a_page(looked):
    done = looked.moecore("quick")
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    running = [line for line in done.stdout.splitlines() if line.startswith("Running stage")]
    assert running == ["Running stage 'code':"]
    assert "Page: pipelines/quick/reports/index.html" in done.stdout
    assert (looked.folder / "pipelines/quick/reports/index.html").is_file()
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [line[1] for line in lines if line[:1] == ["pretrain"]] == ["vmoe", "prc"]


def test_a_wrong_key_is_one_line(looked):
    wrong = looked.moecore("study", "run", "pipelines/quick", "-S", "pretrain.epoch=1")
    assert wrong.returncode == 1 and "did you mean 'epochs'" in wrong.stderr
    assert "Traceback" not in wrong.stderr


def test_the_notebook_runs(looked):
    docs = looked.folder / "docs"
    docs.mkdir()
    notebook = nbformat.read(ROOT / "docs/first_steps.ipynb", as_version=4)
    there = {"metadata": {"path": str(docs)}}
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources=there).execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    said = "".join(output.get("text", "") for cell in cells for output in cell.outputs)
    drawn = [
        cell for cell in cells for output in cell.outputs if "image/png" in output.get("data", {})
    ]
    assert "of 16 patches went to another expert" in said and "prc   agreement" in said
    assert len(drawn) == 2, "the routing of one image, clean and attacked"
    assert "Warning" not in said
