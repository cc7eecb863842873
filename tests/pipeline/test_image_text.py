"""The study of images and captions, on a few mosaics: every stage, one after the other."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import yaml

from moecore.core.sources import ROOT
from moecore.study.whole import check
from moecore.study.written import write_params

STUDY = ROOT / "pipelines/image_text"
DIGITS = {"kind": "digits", "size": 14}
SMALL = {"kind": "captioned_mosaic", "source": DIGITS, "train": 120, "validation": 40, "test": 50}
STAGES = (
    "code",
    "prepare pretrain",
    "prepare finetune",
    "teacher_router {0} 0",
    "pretrain {0} 0",
    "finetune finetune {0} 0",
    "robustness finetune {0} 0",
    "measure routing finetune {0} 0",
    "measure retrieval finetune {0} 0",
    "measure explorer finetune {0} 0",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("study") / "pipelines" / STUDY.name
    shutil.copytree(STUDY, place, ignore=shutil.ignore_patterns("artifacts", ".state", "reports"))
    list(write_params(place, ROOT, ()))
    path = place / "params.yaml"
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    data["data"] = {"pretrain": SMALL, "finetune": SMALL | {"seed": 1}}
    data["model"]["image"] |= {"patch": 7, "width": 24}
    data["run"] |= {"methods": ["vmoe_text", "ermoe_frozen"], "seeds": [0], "phases": ["finetune"]}
    data["run"] |= {
        "measurements": ["retrieval", "explorer"],
        "thorough": ["finetune"],
    }
    data["claims"], data["questions"] = [], []
    for phase in ("pretrain", "finetune"):
        data[phase] |= {"epochs": 2, "batch": 20, "warmup_epochs": 0}
    data["robustness"] |= {"images": 12, "epsilons": [0.05]}
    data["routing"] |= {"images": 12}
    data["explorer"] = {"images": 4, "sigmas": [0.1], "epsilons": [0.05], "augmentations": []}
    data["explorer"]["attack"] = {"kind": "pgd", "steps": 2}
    path.write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    methods = ("vmoe_text", "ermoe_frozen")
    words = [stage.format(method) for method in methods for stage in STAGES]
    for line in [*dict.fromkeys(words), "compare"]:
        command = [sys.executable, "-m", *f"stages.{line}".split()]
        done = subprocess.run(command, cwd=place, env=env, capture_output=True, text=True)
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    return place


def result(folder, what: str, method: str) -> dict:
    path = folder / "artifacts/measured" / what / method / "0.json"
    return json.loads(path.read_text(encoding="utf-8"))


def test_the_study_is_in_order():
    check(STUDY / "params.yaml")


def test_both_directions_and_the_experts_of_words(folder):
    found = result(folder, "retrieval/finetune", "vmoe_text")
    assert (found["images"], found["captions"]) == (50, 250)
    for way in ("text_to_image", "image_to_text"):
        values = [row["recall"]["value"] for row in found[way]]
        assert [row["k"] for row in found[way]] == [1, 5, 10] and values == sorted(values)
        assert found[way][0]["recall"]["low"] <= values[0] <= found[way][0]["recall"]["high"]
    (layer,) = found["layers"]
    assert layer["same_expert"] >= layer["same_expert_chance"]
    words = {word["word"]: word for word in layer["words"]}
    assert words["<start>"]["count"] == words["<end>"]["count"] == 250
    assert sum(words["top"]["experts"]) == pytest.approx(1, abs=1e-3)
    assert "<pad>" not in words
    trained = result(folder, "finetune", "vmoe_text")
    assert trained["test_score"]["value"] == pytest.approx(
        found["text_to_image"][0]["recall"]["value"]
    )
    assert result(folder, "retrieval/finetune", "ermoe_frozen")["layers"] == []


def test_attacks_make_retrieval_no_better(folder):
    found = result(folder, "robustness/finetune", "vmoe_text")
    for rows in (*found["attacks"].values(), found["worst_case"]):
        assert rows[-1]["score"] <= rows[0]["score"]
    pgd = found["attacks"]["pgd-10"]
    assert pgd[-1]["loss"] > pgd[0]["loss"]


def test_the_table_and_the_page_say_it(folder):
    path = folder / "artifacts/compare.json"
    row = json.loads(path.read_text(encoding="utf-8"))["vmoe_text"]["finetune"]
    wanted = {"text_to_image_r1", "image_to_text_r10", "word_same_expert", "accuracy_worst_case"}
    assert wanted <= set(row)
    assert row["text_to_image_r1"]["mean"] == pytest.approx(row["test_accuracy"]["mean"])
    page = (folder / "reports/index.html").read_text(encoding="utf-8")
    assert "text → image R@1" in page and "Images and captions" in page and "&lt;start&gt;" in page
