"""Part of a study: its tracked numbers stay, and claims wait for the rest."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from moecore.core.safetensors_files import read_tensors
from moecore.core.source_layout import ROOT
from moecore.pipeline.write_studies import write_study
from moecore.report.claims.kept_items import ITEMS, NUMBERS
from moecore.run.partial_comparison import (
    DVC_ITEMS,
    DVC_NUMBERS,
    PARTIAL_NUMBERS,
    describe_waiting_claims,
    list_left_out_of_overlay,
    split_answerable_comparisons,
    write_comparison,
)
from moecore.stages.compare import Params
from moecore.study.reading.stage_params import read_params
from moecore.study.writing.assignments import write_assignments

STUDY = Path("pipelines/fashion_moge")


@pytest.fixture
def study(tmp_path, monkeypatch) -> Path:
    """A study with claims in a project of its own."""
    (tmp_path / STUDY).mkdir(parents=True)
    for name in ("params.yaml", "dvc.yaml", "pipelines/stages.yaml", STUDY / "overlay.yaml"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "data").symlink_to(ROOT / "data")
    monkeypatch.chdir(tmp_path)
    write_study(STUDY)
    return STUDY / "params.yaml"


def test_the_whole_study_leaves_nothing_out(study):
    params = read_params(Params, str(study))
    assert list_left_out_of_overlay(study, params.run) == []
    ready, waiting = split_answerable_comparisons(params.claims, params.run)
    assert ready == list(params.claims) and not waiting


def test_one_method_and_one_seed_wait_for_the_rest(study):
    write_assignments(
        study, ["run.methods=[moge]", "run.seeds=[0]"]
    )  # and the file is in order with it
    params = read_params(Params, str(study))
    assert list_left_out_of_overlay(study, params.run) == [
        "moe",
        "moge_circular",
        "moe_matched",
        "seed 1",
        "seed 2",
    ]
    ready, waiting = split_answerable_comparisons([*params.claims, *params.questions], params.run)
    assert ready == [] and waiting
    said = describe_waiting_claims(waiting, params.run)
    assert "\n" not in said and "method moe" in said and "a second seed" in said


def test_the_numbers_of_a_part_are_written_beside_those_of_the_whole(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    few, all_items = ({name: torch.ones(1)} for name in ("prc", "vmoe"))
    assert write_comparison({"prc": 1}, few, ["vmoe"]) == NUMBERS, "there is nothing to keep yet"
    assert write_comparison({"prc": 1, "vmoe": 2}, all_items, []) == NUMBERS
    assert write_comparison({"prc": 3}, few, ["vmoe"]) == PARTIAL_NUMBERS
    assert json.loads(PARTIAL_NUMBERS.read_text()) == {"prc": 3}
    for path in (NUMBERS, DVC_NUMBERS):
        assert json.loads(path.read_text()) == {"prc": 1, "vmoe": 2}
    for path in (ITEMS, DVC_ITEMS):
        assert read_tensors(path)[0] == all_items
    ITEMS.unlink()  # a study of an older version, of which a part is run
    write_comparison({"prc": 3}, few, ["vmoe"])
    assert read_tensors(DVC_ITEMS)[0] == {}
