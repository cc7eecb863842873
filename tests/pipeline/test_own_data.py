"""Data of one's own, as README says: a folder of pictures, the pipeline, a page, a prediction.

90 pictures in three classes, of odd sizes and in every mode.
"""

import csv
import re

import yaml

from tests.pictures import COLOURS, write_classes
from tests.project import PARAMS, ROOT, Project

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
